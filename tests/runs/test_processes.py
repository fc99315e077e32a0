"""A run is known by host, start of the system and start of its process; nothing else is ever signalled."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mmlab.comparison.background import PROCESS, find_run
from mmlab.machine import describe_process, find_process, process_runs, this_process
from mmlab.runs.control import CONTROL


@pytest.fixture
def bystander() -> Iterator[subprocess.Popen[bytes]]:
    """A process that has nothing to do with any run."""
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as process:
        yield process
        process.kill()


@pytest.mark.parametrize(
    "change", [{"host_name": "elsewhere"}, {"boot_id": "an earlier start"}, {"process_start_s": 0.5}]
)
def test_a_process_with_the_number_of_a_run_is_not_signalled(
    tmp_path: Path, bystander: subprocess.Popen[bytes], change: dict
) -> None:
    identity = {**describe_process(bystander.pid), **change}
    job = {"data": None, "schedulers": ["random"], "options": {}}
    (tmp_path / PROCESS).write_text(json.dumps({"process": identity, "job": job}))
    run = find_run(tmp_path)
    assert run is not None
    elsewhere = "host_name" in change
    assert run.state == ("running" if elsewhere else "failed")
    run.stop(timeout_s=0.2)
    assert bystander.poll() is None
    assert (tmp_path / CONTROL).exists() == elsewhere, "a run of another machine is asked by its file"


def test_a_run_whose_folder_is_gone_can_be_stopped(
    tmp_path: Path, bystander: subprocess.Popen[bytes]
) -> None:
    job = {"data": None, "schedulers": ["random"], "options": {}}
    (folder := tmp_path / "run").mkdir()
    (folder / PROCESS).write_text(json.dumps({"process": describe_process(bystander.pid), "job": job}))
    run = find_run(folder)
    assert run is not None
    shutil.rmtree(folder)
    run.stop(timeout_s=10)
    assert bystander.wait(10) != 0, "ended by the interrupt"


def test_a_process_is_found_by_its_identity_until_it_ends(bystander: subprocess.Popen[bytes]) -> None:
    identity = json.loads(json.dumps(describe_process(bystander.pid)))
    process = find_process(identity)
    assert process is not None
    assert process.pid == bystander.pid
    assert process_runs(identity)
    bystander.kill()
    bystander.wait()
    assert not process_runs(identity)
    assert find_process(identity) is None
    assert process_runs(this_process())
