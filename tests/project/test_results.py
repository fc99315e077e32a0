"""The list of measured results says which of them are older than the code they measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.project.checkout import ROOT, read


def test_the_list_of_results_is_true(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from list_results import render

    assert read(Path("benchmarks/results/README.md")) == render(), (
        "run `python benchmarks/list_results.py`: it names the rooms that changed since each result was measured"
    )


def test_only_code_changes_a_rooms_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import _common

    monkeypatch.setattr(_common, "PACKAGE", tmp_path)
    module = tmp_path / "schedule" / "plan.py"
    module.parent.mkdir()
    digests = []
    for text in ("def f(): return 1", '"""Says."""\n\n\ndef f():\n    return 1  # one', "def f(): return 2"):
        module.write_text(text)
        _common.room_digest.cache_clear()
        digests.append(_common.room_digest("schedule"))
    _common.room_digest.cache_clear()
    assert digests[0] == digests[1] != digests[2]
