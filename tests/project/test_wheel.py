"""The wheel is the whole of mmlab: what it is given beside code is in it, and the tour starts without the repository."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest

import mmlab
from mmlab.cli.main import main
from tests.project.checkout import ROOT, tracked

BUILD = "import setuptools.build_meta as backend; print(backend.build_wheel('wheels'))"
TOUR = ("notebooks/", "data/", "examples/", "docs/", "benchmarks/results/")


def toured() -> set[str]:
    """What a tour must hold: the tracked files of its folders, without the site's tools and the executed copies."""
    files = {path.as_posix() for path in tracked() if path.as_posix().startswith(TOUR)}
    return {name for name in files if not name.startswith(("docs/site/", "docs/notebooks/"))}


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the wheel installs, built from the tracked files alone."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("installed")
    for path in tracked():
        (source / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, source / path)
    subprocess.run([sys.executable, "-c", BUILD], cwd=source, check=True, capture_output=True, timeout=280)
    (wheel,) = (source / "wheels").glob("mmlab-*.whl")
    with ZipFile(wheel) as archive:
        archive.extractall(target)
    return target


def run(installed: Path, cwd: Path, *words: str) -> str:
    """What the installed command says, started where no checkout is."""
    code = (
        f"import sys; sys.path.insert(0, {str(installed)!r}); import mmlab; from mmlab.cli.main import main; "
    )
    code += f"assert mmlab.__file__.startswith({str(installed)!r}), mmlab.__file__; sys.exit(main())"
    command = [sys.executable, "-P", "-c", code, *words]
    return subprocess.run(command, cwd=cwd, check=True, capture_output=True, text=True, env={}).stdout


def test_everything_is_inside(installed: Path) -> None:
    found = {path.relative_to(installed).as_posix() for path in installed.rglob("*") if path.is_file()}
    package = {path.as_posix() for path in tracked("mmlab/*")}
    assert package - found == set()
    assert {f"mmlab/tour/{name}" for name in toured()} == {
        name for name in found if name.startswith("mmlab/tour/")
    }
    assert {name.split("/")[0] for name in found} == {"mmlab", f"mmlab-{mmlab.__version__}.dist-info"}


def test_the_tour_starts_from_the_wheel(installed: Path, tmp_path: Path) -> None:
    assert run(installed, tmp_path, "--version").strip() == f"mmlab {mmlab.__version__}"
    found = json.loads(run(installed, tmp_path, "tour", "here", "--json"))
    copied = {path.relative_to(tmp_path / "here").as_posix() for path in (tmp_path / "here").rglob("*.*")}
    assert toured() - copied == set()
    assert found["notebooks"] == [str(path) for path in tracked(":(glob)notebooks/*.ipynb")]
    said = run(installed, tmp_path / "here" / "notebooks", "data", "inspect", "../data/sample", "--json")
    assert json.loads(said)["num_images"] == 56


def test_a_folder_with_something_in_it_is_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    for folder in (tmp_path, tmp_path / "mine.txt"):
        assert main(["tour", str(folder)]) == 2
        assert "is not an empty folder; nothing was copied" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
    assert (tmp_path / "mine.txt").read_text() == "mine"


def test_a_tour_that_finds_no_room_says_so_in_one_line_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def copytree(source: Path, target: Path, **_: object) -> None:
        target.mkdir(parents=True)
        raise shutil.Error([(str(source), str(target), "No space left on device")] * 100)

    monkeypatch.setattr("mmlab.cli.tour.copytree", copytree)
    assert main(["tour", str(tmp_path / "new")]) == 1
    assert len(capsys.readouterr().err) < 300
    assert not (tmp_path / "new").exists()


def test_the_tour_of_a_checkout_is_that_of_the_wheel(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tour", str(tmp_path / "new")]) == 0
    assert "jupyter lab notebooks/00_start_here.ipynb" in capsys.readouterr().out
    copied = {path.relative_to(tmp_path / "new").as_posix() for path in (tmp_path / "new").rglob("*.*")}
    assert toured() - copied == set()
