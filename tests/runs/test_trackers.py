"""Runs are exported as they were at the end, in little memory; the tracker is a double."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

from mmlab.runs import trackers
from mmlab.runs.events import RunEvent, RunLog


def test_a_long_run_is_exported_row_by_row_without_the_steps_that_it_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for rank in range(2):
        with RunLog(tmp_path, rank) as log:
            for begun, last in ((0, 3000), (1000, 4000)):
                log.emit(RunEvent("start", begun, rank, float(begun), {"seed": begun}))
                for step in range(begun + 1, last + 1):
                    log.emit(RunEvent("step", step, rank, float(begun + step), {"loss": 1.0, "lr": begun}))
    found = []

    def take(_name: str, _target: str, start: dict, rows: Iterable) -> None:
        assert start == {"seed": 0}
        assert not isinstance(rows, Sequence)
        for values, step, _ in rows:
            found.extend((name[4], value, step) for name, value in values.items() if name.endswith("lr"))

    monkeypatch.setitem(trackers.TRACKERS, "double", take)
    assert trackers.export_run(tmp_path, "double", "") == 2 * 2 * 4000
    for rank in "01":
        wanted = [(rank, 0 if step <= 1000 else 1000, step) for step in range(1, 4001)]
        assert [point for point in found if point[0] == rank] == wanted


def test_runs_of_two_comparisons_are_exported_under_different_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = []
    monkeypatch.setitem(trackers.TRACKERS, "double", lambda name, *_: names.append(name))
    for comparison in ("first", "second"):
        folder = tmp_path / comparison / "runs" / "random"
        with RunLog(folder) as log:
            log.emit(RunEvent("start", 0, 0, 0.0, {}))
        trackers.export_run(folder, "double", "")
    assert names == ["first/random", "second/random"]
