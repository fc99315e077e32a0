"""What every benchmark script shares: on what it ran, and one form for its results."""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import cache
from math import exp, log, sqrt
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from mmlab.machine import describe_host, total_memory_bytes
from mmlab.machine import versions as library_versions

# image sizes and text lengths of the 25,014 pairs of COCO val2017, see data/README.md
COCO_LENGTHS = Path(__file__).resolve().parents[1] / "data/coco_val2017_lengths.parquet"
PACKAGE = Path(__file__).resolve().parents[1] / "mmlab"
NOT_MEASURED = {"errors", "types", "cli"}  # rooms in which nothing is computed that a figure depends on
# Student's t, two-sided 95 %, by the number of pairs
_T_95 = (
    12.71,
    4.303,
    3.182,
    2.776,
    2.571,
    2.447,
    2.365,
    2.306,
    2.262,
    2.228,
    2.201,
    2.179,
    2.16,
    2.145,
    2.131,
)
T_95 = dict(enumerate(_T_95, start=2))
Row = Mapping[str, Any]
Goal = Mapping[str, Any]  # name, goal (text), measured, met


def machine() -> dict[str, Any]:
    """What a reader must know of the machine to place the figures."""
    import torch

    gpus = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return {
        **describe_host(),
        "memory_bytes": total_memory_bytes(),
        "gpus": [{"name": gpu.name, "memory_bytes": gpu.total_memory} for gpu in gpus],
    }


def versions() -> dict[str, str | None]:
    """Versions of Python, mmlab and the libraries that matter, and of torch's CUDA."""
    import torch

    return {**library_versions(), "cuda": torch.version.cuda}


def is_docstring(node: ast.stmt) -> bool:
    """Whether a statement is a bare constant, as docstrings are."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


@cache
def room_digest(room: str) -> str:
    """A short digest of a room's code; comments, docstrings and layout do not count."""
    digest = hashlib.sha256()
    for path in sorted([*PACKAGE.glob(f"{room}.py"), *PACKAGE.glob(f"{room}/**/*.py")]):
        tree = ast.parse(path.read_text("utf-8"))
        for node in ast.walk(tree):
            body = getattr(node, "body", None)
            if isinstance(body, list) and body and is_docstring(body[0]):
                del body[0]
        code = ast.dump(tree).replace(", type_params=[]", "")  # of Python 3.12; 3.11 has none
        digest.update(f"{path.relative_to(PACKAGE)}\n{code}\n".encode())
    return digest.hexdigest()[:12]


def measured_code() -> dict[str, str]:
    """Room -> digest, for every room of mmlab that this process has loaded: the code that its figures are of."""
    rooms = {name.split(".")[1] for name in sys.modules if name.startswith("mmlab.")} - NOT_MEASURED
    return {room: room_digest(room) for room in sorted(rooms)}


def add_common_options(
    parser: argparse.ArgumentParser, name: str, *, quick: str = "under a minute", out: str = ""
) -> None:
    """`--quick`, and `--json FILE` or `--out DIR` for the results of the benchmark `name`.

    Args:
        quick: what a short run costs, or cannot tell.
        out: what `--out` does besides writing the results.
    """
    parser.add_argument("--quick", action="store_true", help=quick)
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    where.add_argument("--out", type=Path, metavar="DIR", help=f"write DIR/{name}.json{out}")


def goal(name: str, bound: str, measured: float | str, met: bool) -> dict[str, Any]:
    """One goal: what was aimed at, in words, beside what was measured."""
    return {"name": name, "goal": bound, "measured": measured, "met": bool(met)}


def paired(of_one: Sequence[float], of_other: Sequence[float]) -> tuple[float, float]:
    """How many times larger the second is, turn by turn: the geometric mean, and the lower end of its 95 % interval
    (Student's t)."""
    logs = [log(other / one) for one, other in zip(of_one, of_other, strict=True)]
    middle = mean(logs)
    return exp(middle), exp(middle - T_95[len(logs)] * stdev(logs) / sqrt(len(logs)))


def now() -> str:
    """The date and time, in UTC."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def write_results(path: str | Path, rows: Sequence[Row], goals: Sequence[Goal]) -> Path:
    """Write one JSON file: machine, versions, date, the code measured, rows and goals."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    document = {
        "machine": machine(),
        "versions": versions(),
        "date": now(),
        "code": measured_code(),
        "rows": list(rows),
        "goals": list(goals),
    }
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return path


def write_if_asked(
    options: argparse.Namespace, name: str, rows: Sequence[Row], goals: Sequence[Goal]
) -> None:
    """Write the results where `--json` or `--out` says, and say where; see `add_common_options`."""
    path = options.json or (options.out and options.out / f"{name}.json")
    if path:
        print("wrote", write_results(path, rows, goals))


def print_goals(goals: Sequence[Goal]) -> None:
    """One line a goal: met or missed, the bound, the measured value."""
    width = max((len(item["name"]) for item in goals), default=0)
    for item in goals:
        measured = f"{item['measured']:.4g}" if isinstance(item["measured"], float) else item["measured"]
        print(
            f"{'met' if item['met'] else 'MISSED':<7} {item['name']:<{width}}  goal {item['goal']}, measured {measured}"
        )
