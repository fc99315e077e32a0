"""What an earlier run left is moved aside, nothing is overwritten, and a folder has one run at a time."""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mmlab.errors import OptionError
from mmlab.runs.folders import exclusive_folder, move_earlier_aside, put_back_if_refused

# holds a folder, has a child that outlives it, and waits to be killed
HOLDER = """
import subprocess, sys, time
from pathlib import Path
from mmlab.runs.folders import exclusive_folder
with exclusive_folder(Path(sys.argv[1])):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], stdout=subprocess.DEVNULL)
    print(child.pid, flush=True)
    time.sleep(60)
"""


def test_a_number_is_never_used_again_while_a_later_one_is_there(tmp_path: Path) -> None:
    for text in ("first", "second", "third"):
        (move_earlier_aside(tmp_path, ["log*.txt"]) / "log.txt").write_text(text)
    (tmp_path / "previous-1" / "log.txt").unlink()
    (tmp_path / "previous-1").rmdir()
    (tmp_path / "previous-mine").mkdir()
    move_earlier_aside(tmp_path, ["log*.txt"])
    kept = {path.parent.name: path.read_text() for path in tmp_path.glob("*/log.txt")}
    assert kept == {"previous-2": "second", "previous-3": "third"}


def test_a_folder_is_held_until_its_holder_is_gone_and_no_child_keeps_it(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(folder)], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        child = int(holder.stdout.readline())
        try:
            process = rf" \(process {holder.pid} on {platform.node()}\)" if sys.platform == "linux" else ""
            with (
                pytest.raises(OptionError, match=rf"active in {folder}{process}; stop it, or name another"),
                exclusive_folder(folder),
            ):
                pass
            with exclusive_folder(tmp_path / "other"):
                holder.kill()
                holder.wait()
            for _ in range(2):
                with exclusive_folder(folder):
                    move_earlier_aside(folder, ["*"])
        finally:
            os.kill(child, signal.SIGKILL)
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("has_begun", [False, True])
def test_an_interrupt_before_a_run_has_begun_puts_the_earlier_one_back(
    tmp_path: Path, has_begun: bool
) -> None:
    def start() -> None:
        with put_back_if_refused(tmp_path, ["config.toml"], begun="config.toml"):
            move_earlier_aside(tmp_path, ["config.toml"])
            if has_begun:
                (tmp_path / "config.toml").write_text("later")
            raise KeyboardInterrupt

    (tmp_path / "config.toml").write_text("earlier")
    with pytest.raises(KeyboardInterrupt):
        start()
    assert (tmp_path / "config.toml").read_text() == ("later" if has_begun else "earlier")
    assert (tmp_path / "previous-1").exists() == has_begun


def test_a_run_that_is_refused_leaves_no_files_of_its_own(tmp_path: Path) -> None:
    def start() -> None:
        with put_back_if_refused(tmp_path, ["tokenizer", "*.json", "*.toml"], begun="config.toml"):
            (tmp_path / "tokenizer").mkdir()
            (tmp_path / "memory.json").write_text("fitted anew")
            raise OptionError("refused")

    for name in ("config.toml", "memory.json"):  # of the run that this one would resume
        (tmp_path / name).write_text("earlier")
    with pytest.raises(OptionError):
        start()
    found = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert found == {"config.toml": "earlier", "memory.json": "earlier"}
