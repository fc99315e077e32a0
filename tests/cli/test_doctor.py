"""The doctor looks at the real machine, goes on where something is broken, and has a remedy for what is not well."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mmlab.cli import doctor
from mmlab.cli.doctor import diagnose
from mmlab.errors import DataError
from mmlab.loading.speeds import read_rates
from mmlab.machine import cpu_name, num_usable_cores, total_memory_bytes, versions

ROOT = Path(__file__).parents[2]


def test_it_tells_what_this_machine_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    diagnosis = diagnose()
    assert diagnosis.ok
    checks = {check.name: check for check in diagnosis.checks}
    assert f"torch {versions(['torch'])['torch']}," in checks["libraries"].detail
    assert checks["libraries"].values["torch"] == versions(["torch"])["torch"]
    assert checks["cores"].values["num_usable"] == num_usable_cores()
    assert cpu_name() in checks["cores"].detail
    assert checks["memory"].values["total_bytes"] == total_memory_bytes() > 2**28
    assert checks["reading"].values["num_bytes"] == 64 * 2**20
    assert not list(tmp_path.iterdir()), "the scratch file is gone"
    assert all(bool(check.remedy) == (check.status != "ok") for check in diagnosis.checks)
    assert json.loads(json.dumps(diagnosis.as_dict()))["ok"]
    text = str(diagnosis)
    for check in diagnosis.checks:
        assert re.search(
            rf"^{check.status} +{re.escape(check.name)} +{re.escape(check.detail)}$", text, re.MULTILINE
        )
        assert check.remedy in text


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_it_says_so_and_nothing_is_missing() -> None:
    (check,) = doctor._devices()
    assert (check.name, check.status) == ("device", "warn")
    assert "no GPU that torch can use" in check.detail


def test_the_libraries_are_those_that_the_installed_project_depends_on() -> None:
    needed = doctor.needed_libraries()
    assert {"torch", "numpy", "fsspec", "simplejpeg"} <= set(needed)
    assert not {"pytest", "voila", "ruff"} & set(needed), "those of extras are not needed"
    assert all(str(wanted) for wanted in needed.values()), "a requirement without a version"


def test_where_mmlab_is_not_installed_no_library_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.metadata, "requires", lambda name: None)
    (check,) = doctor._libraries()
    assert (check.name, check.status, check.remedy) == ("mmlab", "warn", "pip install .")


def test_what_is_absent_or_too_old_is_missing_with_the_command_that_gets_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = ["no-such-library>=1.0", "numpy[more]>=99.1", "pillow>=1.10", "torch<1.0,>=0.4"]
    asked += ['pytest>=8; extra == "test"', 'pywin32>=1; sys_platform == "win32"']
    monkeypatch.setattr(doctor.metadata, "requires", lambda name: asked)
    found, absent, old, new = doctor._libraries()
    assert (found.status, found.detail) == ("ok", "1 of 4 have a version that is allowed")
    assert found.values["no-such-library"] == "not installed"
    assert (absent.status, absent.detail, absent.remedy) == (
        "missing",
        "not installed",
        "pip install 'no-such-library>=1.0'",
    )
    assert (old.status, old.remedy) == ("missing", "pip install 'numpy>=99.1'")
    assert old.detail.endswith("too old or too new")
    assert (new.status, new.remedy) == ("missing", "pip install 'torch<1.0,>=0.4'")
    assert not doctor.Diagnosis(checks=(absent, found)).ok


def test_the_deprecated_pynvml_is_warned_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pynvml-11.5.0.dist-info").mkdir()
    (tmp_path / "pynvml-11.5.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: pynvml\n")
    monkeypatch.syspath_prepend(tmp_path)
    check = list(doctor._libraries())[-1]
    assert (check.name, check.status) == ("pynvml", "warn")
    assert "pip uninstall pynvml" in check.remedy


def test_a_torch_that_cannot_be_imported_is_reported_and_the_rest_still_looked_at(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise OSError('libcudart.so.13: cannot open shared object file')\n")
    code = "from mmlab.cli.doctor import diagnose; import json; print(json.dumps(diagnose(data='mmlab').as_dict()))"
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    child = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    found = json.loads(child.stdout)
    checks = {check["name"]: check for check in found["checks"]}
    assert not found["ok"]
    assert checks["import torch"]["detail"] == "OSError: libcudart.so.13: cannot open shared object file"
    assert "MiB/s" in checks["reading"]["detail"]  # ok or slow, as the disk is


def test_a_small_file_stands_for_its_folder_and_a_large_one_for_itself(tmp_path: Path) -> None:
    for number in range(5):
        (tmp_path / f"image-{number}.jpg").write_bytes(bytes(1000 * number))
    rates = read_rates(tmp_path / "image-1.jpg")
    assert (rates.what, rates.num_files, rates.num_bytes) == (
        str(tmp_path),
        4,
        10_000,
    )  # the empty one is left out
    shard = tmp_path / "shard.tar"
    shard.write_bytes(bytes(64 * 2**20))
    rates = read_rates(shard)
    assert (rates.what, rates.num_files, rates.num_bytes) == (str(shard), 1, 64 * 2**20)


def test_where_nothing_can_be_written_the_rest_is_still_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(where: Path | None) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("mmlab.loading.speeds.read_rates", full)
    found = diagnose().checks[-1]
    assert (found.name, found.status, found.detail) == (
        "reading",
        "warn",
        "not measured: No space left on device",
    )


def test_nothing_to_read_is_an_error_that_names_the_place(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=re.escape(f"{tmp_path}: no readable file with anything in it")):
        diagnose(data=tmp_path)
    with pytest.raises(DataError, match="nowhere: no such file or folder"):
        diagnose(data=tmp_path / "nowhere")
