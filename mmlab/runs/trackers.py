"""Export a run to an experiment tracker: TensorBoard, Weights & Biases or MLflow.

Reads the event files, so training does not depend on trackers and a run can be exported again later. Numbers of `step`,
`epoch`, `eval` and `device` events become curves named `kind/key`, the start event's configuration the run's parameters.
Steps that were repeated after a resume appear once.

Costs nothing in training. Does not: install a tracker, upload checkpoints, or follow a run in progress.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from mmlab.errors import DataError, OptionError, check_name
from mmlab.runs.events import EVENT_FILES, RunEvent, read_events


def export_run(run: str | Path, to: str, target: str | Path) -> int:
    """Export one run to a tracker; returns the number of points.

    It is named there by its folder and the one above, `runs` left out: runs of two comparisons stay apart
    (`demo/runs/random` is `demo/random`).

    Args:
        run: the run's folder.
        to: `tensorboard`, `wandb` or `mlflow`.
        target: TensorBoard's folder, the Weights & Biases project, or MLflow's tracking address.

    Raises:
        DataError: there are no events in the folder.
        OptionError: the tracker is unknown or not installed.
    """
    check_name("tracker", to, TRACKERS)
    folder = Path(run)
    paths = sorted(folder.glob(EVENT_FILES))
    if not paths:
        raise DataError(f"{folder}: no {EVENT_FILES} in it; give the folder of a run")
    try:
        events = [event for path in paths for event in current_events(read_events(path)[0])]
    except OSError as error:
        raise DataError(f"{error.filename or folder}: cannot be read: {error.strerror}") from error
    start = next((event.values for event in events if event.kind == "start"), {})
    name = "/".join([part for part in folder.resolve().parts[1:] if part != "runs"][-2:])
    try:  # points one by one: those of a million steps would take gigabytes
        TRACKERS[to](name, str(target), start, _points(events, several_ranks=len(paths) > 1))
    except ModuleNotFoundError as error:
        raise OptionError(f"{to} is not installed ({error}); pip install {to}") from error
    return sum(1 for _ in _points(events, several_ranks=len(paths) > 1))


def current_events(events: Sequence[RunEvent]) -> list[RunEvent]:
    """One rank's events without the steps that a resumed run repeated.

    >>> def event(kind, step): return RunEvent(kind, step, 0, 0.0, {})
    >>> done = [event("step", 1), event("step", 2), event("start", 1), event("step", 2)]
    >>> [(event.kind, event.step) for event in current_events(done)]
    [('step', 1), ('start', 1), ('step', 2)]
    """
    kept: list[RunEvent] = []
    for event in events:
        if event.kind == "start":
            kept = [old for old in kept if old.step <= event.step]
        kept.append(event)
    return kept


Point = tuple[str, float, int, float]  # name, value, step, seconds since 1970


def _points(events: Sequence[RunEvent], *, several_ranks: bool) -> Iterator[Point]:
    step = 0
    for event in sorted(events, key=lambda event: event.time_s):
        step = event.step if event.step >= 0 else step  # device events carry no step: take the last one
        if event.kind in ("step", "epoch", "eval", "device"):
            rank = f"rank{event.rank}/" if several_ranks else ""
            for key, value in event.values.items():
                if isinstance(value, int | float) and math.isfinite(value):
                    yield f"{rank}{event.kind}/{key}", float(value), step, event.time_s


def _to_tensorboard(name: str, target: str, start: Mapping[str, Any], points: Iterable[Point]) -> None:
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(Path(target) / name), purge_step=0) as writer:  # an earlier export is replaced
        writer.add_text("start", f"```json\n{json.dumps(start, indent=1)}\n```")
        for curve, value, step, time_s in points:
            writer.add_scalar(curve, value, step, walltime=time_s)


def _to_wandb(name: str, target: str, start: Mapping[str, Any], points: Iterable[Point]) -> None:
    wandb = import_module("wandb")
    with wandb.init(project=target, name=name, config=start) as run:
        run.define_metric("*", step_metric="run_step")  # wandb's own steps must not decrease
        for curve, value, step, _ in points:
            run.log({curve: value, "run_step": step})


def _to_mlflow(name: str, target: str, start: Mapping[str, Any], points: Iterable[Point]) -> None:
    mlflow = import_module("mlflow")
    mlflow.set_tracking_uri(target)
    with mlflow.start_run(run_name=name) as run:
        mlflow.log_dict(start, "start.json")
        make = mlflow.entities.Metric
        metrics = [make(curve, value, int(1000 * time_s), step) for curve, value, step, time_s in points]
        for first in range(0, len(metrics), 1000):  # as many as one call may carry
            mlflow.MlflowClient().log_batch(run.info.run_id, metrics=metrics[first : first + 1000])


TRACKERS: dict[str, Callable[[str, str, Mapping[str, Any], Iterable[Point]], None]] = {
    "tensorboard": _to_tensorboard,
    "wandb": _to_wandb,
    "mlflow": _to_mlflow,
}
