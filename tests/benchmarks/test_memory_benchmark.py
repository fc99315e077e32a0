"""A result file of the memory benchmark has the rows of one machine."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from mmlab.errors import OptionError

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def memory() -> ModuleType:
    spec = importlib.util.spec_from_file_location("memory_benchmark", FOLDER / "memory.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        spec.loader.exec_module(module)
        yield module
    sys.modules.pop("_memory_arms", None)


def test_rows_of_this_machine_are_kept_and_those_of_another_refused(
    memory: ModuleType, tmp_path: Path
) -> None:
    path = tmp_path / "memory.json"
    assert memory.rows_measured_here(path) == []
    row = {"kind": "faults", "machine": memory.machine_id()}
    memory.write_results(path, [row], [])
    assert memory.rows_measured_here(path) == [row]
    for other in ({**row, "machine": "0123456789ab"}, {"kind": "faults"}):
        memory.write_results(path, [row, other], [])
        with pytest.raises(OptionError, match=r"has rows of another machine \((0123456789ab|None)"):
            memory.rows_measured_here(path)


@pytest.mark.parametrize(
    ("name", "found"), [("versions", {"torch": "1.0"}), ("code", {"pricing": "0"}), ("code", None)]
)
def test_rows_of_other_versions_or_code_are_refused(
    memory: ModuleType, tmp_path: Path, name: str, found: dict | None
) -> None:
    path = memory.write_results(tmp_path / "memory.json", [{"machine": memory.machine_id()}], [])
    path.write_text(json.dumps({**json.loads(path.read_text()), name: found}))
    with pytest.raises(OptionError, match=f"was measured with other {name}"):
        memory.rows_measured_here(path)


def test_a_row_replaces_the_one_of_the_same_setting(memory: ModuleType) -> None:
    one = {"kind": "accuracy", "model": "tiny", "precision": "fp32", "checkpointing": False, "device": "cpu"}
    assert memory.what_is_measured(one) == memory.what_is_measured({**one, "fit_cpu_s": 3})
    assert memory.what_is_measured(one) != memory.what_is_measured({**one, "precision": "bf16"})


def test_a_step_is_done_though_an_operation_of_it_runs_out_of_memory(memory: ModuleType) -> None:
    row = memory.faults(400)
    assert row["num_tried"] == row["num_recovered"] == -(-row["num_operations"] // 400)
