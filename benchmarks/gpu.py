"""Measure on a machine with a CUDA device: readings, precisions, bytes, seconds, loops, schedulers, the articles.

    PYTHONPATH=. python benchmarks/gpu.py --out DIR        (or: make gpu)

Needs torch, transformers and the libraries that mmlab's training imports; what else is missing (Jupyter, nvidia-ml-py,
numba) costs only the cases that need it, which are then recorded as skipped. Writes DIR/gpu.json after every case,
with every repetition, and ends within `--seconds` (900 unless told): a case for which too little time is left is
skipped, one that takes too long is cut off, and both are recorded. A file of this machine that is there keeps what this
run does not measure; each row has its own date, and the code that it measured. `--quick` takes small sizes and few repetitions.
Exit code: 0 done, 1 a case failed, 2 no CUDA device.

To add a case: a function in one of the files `_gpu_*.py` that takes a `Bench` and returns a row and its goals, and one
line in `CASES`.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from _common import machine, measured_code, now, print_goals, write_results
from _gpu_bench import QUICK, Bench, Result, Skipped
from _gpu_device import device_reads, doctor, live_bytes, readings
from _gpu_epochs import articles, compare_schedulers, loading
from _gpu_steps import compiling, loops, new_shapes, precisions, step_seconds


class Case(NamedTuple):
    """What to run, and the time under which it is not worth starting."""

    run: Callable[[Bench], Result]
    least_s: float


CASES = {  # the comparison is last: cut off, it keeps the epochs that it has
    "new_shapes": Case(new_shapes, 15),
    "precisions": Case(precisions, 25),
    "articles": Case(articles, 60),
    "step_seconds": Case(step_seconds, 40),
    "live_bytes": Case(live_bytes, 20),
    "device_reads": Case(device_reads, 5),
    "readings": Case(readings, 20),
    "loops": Case(loops, 15),
    "compiling": Case(compiling, 90),
    "doctor": Case(doctor, 15),
    "loading": Case(loading, 60),
    "compare": Case(compare_schedulers, 60),
}


def run_cases(
    bench: Bench, names: list[str], *, deadline: float, save: Callable[[list, list], object]
) -> list[dict]:
    """Run cases in order and `save(rows, goals)` after each; returns the rows.

    Args:
        deadline: of `time.monotonic`; a case is skipped when it has less than its `least_s` left, and cut off then.
    """
    rows: list[dict[str, Any]] = []
    goals: list[dict[str, Any]] = []
    for name in names:
        case, started = CASES[name], time.monotonic()
        left_s = deadline - started
        row: dict[str, Any] = {"case": name, "status": "done"}
        try:
            if left_s < case.least_s:
                raise Skipped(f"{left_s:.0f} s left, it needs {case.least_s:.0f}")
            with _cut_off_after(left_s):
                figures, found = case.run(bench)
            row |= figures
            goals += [{"case": name, **item} for item in found]
        except (Skipped, ImportError) as error:
            row |= {"status": "skipped", "reason": str(error)}
        except KeyboardInterrupt:
            if time.monotonic() < deadline:  # by the user
                raise
            row |= {"status": "skipped", "reason": f"cut off after {left_s:.0f} s"}
        except Exception as error:  # the other cases are still worth running; the row keeps what went wrong
            row |= {"status": "failed", "reason": repr(error), "traceback": traceback.format_exc()}
        row |= {"wall_s": time.monotonic() - started, "date": now(), "code": measured_code()}
        rows.append(row)
        save(rows, goals)
        print(f"{name:<12} {row['status']:<8} {row['wall_s']:6.1f} s  {row.get('reason', '')}", flush=True)
    return rows


def with_earlier(
    before: dict[str, Any], rows: list[dict[str, Any]], goals: list[dict[str, Any]]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows and goals of this run, and of an earlier one those of the cases that this run has not measured."""
    done = {row["case"] for row in rows if row["status"] == "done"}
    kept = [row for row in before["rows"] if row["case"] not in done]
    names = {row["case"] for row in kept}
    return (
        [*kept, *(row for row in rows if row["case"] not in names)],
        [*(item for item in before["goals"] if item["case"] not in done), *goals],
    )


def main(arguments: list[str] | None = None) -> int:
    """The command line."""
    started = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for gpu.json")
    parser.add_argument("--cases", default=",".join(CASES), help="cases to run, separated by commas")
    parser.add_argument("--seconds", type=float, default=900, help="time for everything")
    parser.add_argument("--quick", action="store_true", help="small sizes and few repetitions")
    options = parser.parse_args(arguments)
    names = options.cases.split(",")
    if unknown := set(names) - set(CASES):
        parser.error(f"no such case: {', '.join(sorted(unknown))}; there are {', '.join(CASES)}")
    import torch

    if not torch.cuda.is_available():
        print(
            "gpu.py: torch sees no CUDA device; run this on a machine with one (mmlab doctor says why)",
            file=sys.stderr,
        )
        return 2
    path = options.out / "gpu.json"
    last: list[Any] = []
    before = json.loads(path.read_text("utf-8")) if path.exists() else {}
    if before.get("machine") != machine():
        before = {"rows": [], "goals": []}

    def save(rows: list[Any], goals: list[Any]) -> None:
        write_results(path, *with_earlier(before, rows, goals))
        last[:] = goals

    rows = run_cases(
        QUICK if options.quick else Bench(), names, deadline=started + options.seconds, save=save
    )
    print_goals(last)
    print(
        f"{path}: {len(rows)} cases in {time.monotonic() - started:.0f} s on {torch.cuda.get_device_name()}"
    )
    return int(any(row["status"] == "failed" for row in rows))


@contextmanager
def _cut_off_after(seconds: float) -> Iterator[None]:
    """Interrupt as Ctrl-C does, so that a comparison keeps the epochs that it has."""

    def interrupt(signum: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


if __name__ == "__main__":
    sys.exit(main())
