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
from itertools import islice
from pathlib import Path
from typing import Any

from mmlab.errors import DataError, OptionError, check_name
from mmlab.machine import progress_bar
from mmlab.runs.events import EVENT_FILES, RunEvent, read_events

_SHOWN = ("step", "epoch", "eval", "device")  # kinds of events whose numbers become curves
Row = tuple[dict[str, float], int, float]  # of one event: values by curve, step, seconds since 1970


def export_run(run: str | Path, to: str, target: str | Path, *, progress: bool = True) -> int:
    """Export one run to a tracker; returns the number of points.

    It is named there by its folder and the one above, `runs` left out: runs of two comparisons stay apart
    (`demo/runs/random` is `demo/random`).

    Args:
        run: the run's folder.
        to: `tensorboard`, `wandb` or `mlflow`.
        target: TensorBoard's folder, the Weights & Biases project, or MLflow's tracking address.

    Raises:
        DataError: there are no events in the folder, or they cannot be read.
        OptionError: the tracker is unknown or not installed.
    """
    check_name("tracker", to, TRACKERS)
    folder = Path(run)
    if not (paths := sorted(folder.glob(EVENT_FILES))):
        raise DataError(f"{folder}: no {EVENT_FILES} in it; give the folder of a run")
    try:
        events = [event for path in paths for event in current_events(read_events(path)[0])]
    except OSError as error:
        raise DataError(f"{error.filename or folder}: cannot be read: {error.strerror}") from error
    start = next((event.values for event in events if event.kind == "start"), {})
    name = "/".join([part for part in folder.resolve().parts[1:] if part != "runs"][-2:])
    num_rows = sum(event.kind in _SHOWN for event in events)
    try:  # rows one by one: those of a million steps would take gigabytes
        rows = progress_bar(_rows(events, len(paths) > 1), "exporting", num_rows, show=progress)
        TRACKERS[to](name, str(target), start, rows)
    except ModuleNotFoundError as error:
        raise OptionError(f"{to} is not installed ({error}); pip install {to}") from error
    return sum(len(values) for values, *_ in _rows(events, len(paths) > 1))


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


def _rows(events: Sequence[RunEvent], several_ranks: bool) -> Iterator[Row]:
    step = 0
    for event in sorted(events, key=lambda event: event.time_s):
        step = event.step if event.step >= 0 else step  # device events carry no step: take the last one
        if event.kind in _SHOWN:
            prefix = f"rank{event.rank}/{event.kind}" if several_ranks else event.kind
            numbers = {
                f"{prefix}/{key}": float(value)
                for key, value in event.values.items()
                if isinstance(value, int | float) and math.isfinite(value)
            }
            yield numbers, step, event.time_s


def _to_tensorboard(name: str, target: str, start: Mapping[str, Any], rows: Iterable[Row]) -> None:
    from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(Path(target) / name), purge_step=0) as writer:  # an earlier export is replaced
        writer.add_text("start", f"```json\n{json.dumps(start, indent=1)}\n```")
        for numbers, step, time_s in rows:
            values = [Summary.Value(tag=curve, simple_value=value) for curve, value in numbers.items()]
            writer.file_writer.add_summary(Summary(value=values), step, time_s)


def _to_wandb(name: str, target: str, start: Mapping[str, Any], rows: Iterable[Row]) -> None:
    wandb = import_module("wandb")
    with wandb.init(project=target, name=name, config=start) as run:
        run.define_metric("*", step_metric="run_step")  # wandb's own steps must not decrease
        for numbers, step, _ in rows:
            run.log({**numbers, "run_step": step})


def _to_mlflow(name: str, target: str, start: Mapping[str, Any], rows: Iterable[Row]) -> None:
    mlflow = import_module("mlflow")
    mlflow.set_tracking_uri(target)
    with mlflow.start_run(run_name=name) as run:
        mlflow.log_dict(start, "start.json")
        metrics = (
            mlflow.entities.Metric(curve, value, int(1000 * time_s), step)
            for numbers, step, time_s in rows
            for curve, value in numbers.items()
        )
        while batch := list(islice(metrics, 1000)):  # as many as one call may carry
            mlflow.MlflowClient().log_batch(run.info.run_id, metrics=batch)


TRACKERS: dict[str, Callable[[str, str, Mapping[str, Any], Iterable[Row]], None]] = {
    "tensorboard": _to_tensorboard,
    "wandb": _to_wandb,
    "mlflow": _to_mlflow,
}
