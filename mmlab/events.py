"""What happened in a run, as lines in a file: the boundary between training and everything that looks at it.

A run is a folder; each rank appends to its own `events-rank<rank>.jsonl`, one JSON object a line. The trainer and the
device monitor write, views read: in the same process, in another one, or long after the run.

Costs: about 25 us and 400 bytes a step event: one unbuffered `write` to the operating system, no `fsync`. So a killed
process loses nothing and leaves at most one torn last line; a power cut may lose the last seconds.
Does not: rotate or compress files, nor guard against two processes that write the same rank's file.

JSON has no NaN and no infinity, and a loss may be either. They are written as the texts "NaN", "Infinity" and
"-Infinity" (which JavaScript's `Number()` reads back as numbers) and `read_events` returns them as floats.
"""

from __future__ import annotations

import json
import math
import mmap
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mmlab.errors import DataError, OptionError, unknown_name

if TYPE_CHECKING:
    import pandas as pd

EVENT_KINDS = {
    "start": "the run begins, or goes on from a checkpoint: its whole configuration",
    "step": "one optimizer step",
    "eval": "one evaluation on held-out samples",
    "device": "one reading of the device, by the monitor's thread at a fixed interval",
    "epoch": "an epoch is complete",
    "checkpoint": "a checkpoint is on disk",
    "warning": "something that a person should see; the run goes on",
    "end": "the run ends, whichever way",
}


class EventKey(NamedTuple):
    """One row of the key table."""

    kinds: str  # kinds of event that carry the key, separated by spaces
    unit: str
    meaning: str


EVENT_KEYS = {
    # the run
    "run_name": EventKey("start", "text", "name of the run, or of the comparison's arm"),
    "scheduler": EventKey("start", "text", "name of the batch scheduler"),
    "model": EventKey("start", "text", "name or preset of the model"),
    "objective": EventKey("start", "text", "training objective"),
    "precision": EventKey("start", "text", "fp32, tf32, bf16 or fp16"),
    "device": EventKey("start device", "text", "torch device: cpu, cuda:0"),
    "device_name": EventKey("start", "text", "the device's own name"),
    "world_size": EventKey("start", "count", "number of ranks"),
    "seed": EventKey("start", "integer", "seed of the run"),
    "batch_size": EventKey("start", "samples", "batch size asked for, where the scheduler has one"),
    "budget": EventKey("start", "cost units", "budget asked for, where the scheduler has one"),
    "num_workers": EventKey("start", "count", "data-loading worker processes"),
    "accumulation_steps": EventKey("start", "batches", "batches in one optimizer step"),
    "num_epochs": EventKey("start", "epochs", "epochs planned"),
    "num_steps": EventKey("start epoch end", "steps", "optimizer steps planned (start) or done (epoch, end)"),
    "num_parameters": EventKey("start", "count", "trainable parameters"),
    "config": EventKey("start", "object", "every option of the run, nested"),
    "versions": EventKey("start", "object", "versions of Python and of the libraries used"),
    # the batch and its plan
    "epoch": EventKey("step eval epoch checkpoint", "epochs", "epoch, counted from 0"),
    "num_samples": EventKey("step eval epoch", "samples", "samples in the step, the evaluation or the epoch"),
    "num_batches": EventKey("step epoch", "batches", "batches in the step or the epoch"),
    "num_tokens": EventKey("step", "tokens", "T: padded text length, the longest of the step's batches"),
    "height": EventKey("step", "pixels", "H: padded image height, the largest of the step's batches"),
    "width": EventKey("step", "pixels", "W: padded image width, the largest of the step's batches"),
    "text_waste": EventKey("step epoch", "ratio 0-1", "share of text positions that is padding"),
    "image_waste": EventKey("step epoch", "ratio 0-1", "share of pixels that is padding"),
    "combined_waste": EventKey("step epoch", "ratio 0-1", "share of text and image tokens that is padding"),
    "predicted_cost": EventKey("step", "cost units", "the plan's cost of the step"),
    "predicted_s": EventKey("step", "s", "the plan's duration of the step"),
    "predicted_bytes": EventKey("step", "bytes", "the plan's peak memory of the step"),
    # learning
    "loss": EventKey("step eval epoch", "number", "loss that is minimised; mean over the samples"),
    "contrastive_loss": EventKey("step eval epoch", "number", "image-text contrastive part of the loss"),
    "matching_loss": EventKey("step eval epoch", "number", "image-text matching part of the loss"),
    "per_sample_loss": EventKey(
        "step eval epoch", "number", "loss that does not depend on the batch size, for comparing schedulers"
    ),
    "lr": EventKey("step", "number", "learning rate of the first parameter group"),
    "grad_norm": EventKey("step", "number", "L2 norm of the gradient before clipping"),
    "loss_scale": EventKey("step", "number", "gradient scaler's factor; 1 without a scaler"),
    "skipped": EventKey("step", "true or false", "the scaler skipped this update because of an overflow"),
    "matching_accuracy": EventKey("eval", "ratio 0-1", "share of pairs rightly called matching or not"),
    "image_to_text_r1": EventKey("eval", "ratio 0-1", "images whose best-ranked text is theirs"),
    "image_to_text_r5": EventKey("eval", "ratio 0-1", "images with a text of theirs among the best five"),
    "image_to_text_r10": EventKey("eval", "ratio 0-1", "images with a text of theirs among the best ten"),
    "text_to_image_r1": EventKey("eval", "ratio 0-1", "texts whose best-ranked image is theirs"),
    "text_to_image_r5": EventKey("eval", "ratio 0-1", "texts with their image among the best five"),
    "text_to_image_r10": EventKey("eval", "ratio 0-1", "texts with their image among the best ten"),
    "chance_r1": EventKey("eval", "ratio 0-1", "R@1 of a random ranking over the same candidates"),
    # time
    "step_s": EventKey(
        "step", "s", "from the end of the previous step to the end of this one, device synchronised"
    ),
    "data_wait_s": EventKey("step", "s", "part of `step_s` spent waiting for the loader"),
    "samples_per_s": EventKey("step eval epoch", "samples/s", "samples over time"),
    "eval_s": EventKey("eval", "s", "duration of the evaluation"),
    "epoch_s": EventKey("epoch", "s", "duration of the epoch"),
    "checkpoint_s": EventKey("checkpoint", "s", "time to write the checkpoint"),
    "run_s": EventKey("end", "s", "from start to end of the run"),
    # memory and device
    "peak_bytes": EventKey(
        "step eval", "bytes", "peak memory within the step, as counted by `memory_source`"
    ),
    "allocated_bytes": EventKey("step device", "bytes", "held by live tensors, as torch's allocator counts"),
    "reserved_bytes": EventKey("step device", "bytes", "taken from the device by torch's allocator"),
    "memory_bytes": EventKey("device", "bytes", "memory in use, as counted by `memory_source`"),
    "memory_total_bytes": EventKey("device", "bytes", "memory there is, of the same source"),
    "memory_source": EventKey(
        "step eval device",
        "text",
        "what counted the memory: NVML, torch allocator, live tensors, process RSS",
    ),
    "utilization_ratio": EventKey(
        "device", "ratio 0-1", "busy share since the reading before, by `utilization_source`"
    ),
    "utilization_source": EventKey("device", "text", "what measured the use: NVML or process CPU"),
    "reading_s": EventKey("device", "s", "time that the reading took"),
    "monitor_cpu_s": EventKey("device", "s", "CPU time used by the monitor's thread since its start"),
    # messages and files
    "message": EventKey("warning end", "text", "what happened, for a person"),
    "source": EventKey("warning", "text", "part of mmlab that warns"),
    "traceback": EventKey("warning end", "text", "traceback of the error behind it"),
    "status": EventKey("end", "text", "done, stopped or failed"),
    "path": EventKey("checkpoint", "text", "file written, relative to the run's folder"),
    "checkpoint_bytes": EventKey("checkpoint", "bytes", "size of the checkpoint"),
}
USER_PREFIX = "user_"  # keys that begin so are the user's own and need no row in the table

EVENT_FILES = "events-rank*.jsonl"  # the pattern of a run's files, one a rank
_FIELDS = ("kind", "step", "rank", "time_s")
_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


@dataclass(frozen=True, slots=True)
class RunEvent:
    """One thing that happened in a run.

    >>> RunEvent("step", 3, 0, 1792000000.5, {"loss": 2.25}).values["loss"]
    2.25
    """

    kind: str  # a key of EVENT_KINDS
    step: (
        int  # optimizer steps done when it happened; -1 where the writer does not know, as in device readings
    )
    rank: int
    time_s: float  # seconds since 1970, UTC
    values: Mapping[str, Any]  # keys of EVENT_KEYS

    @classmethod
    def now(cls, kind: str, step: int, values: Mapping[str, Any], rank: int = 0) -> RunEvent:
        """An event that happens now."""
        return cls(kind, step, rank, time.time(), values)


class RunLog:
    """Append events to one rank's file in a run's folder; a context manager, safe to call from any thread.

    The folder is made if need be. If a killed run left a torn last line, it is cut off and a warning event says so.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with RunLog(folder) as log:
    ...         log.write("step", 1, loss=float("nan"))
    ...     events, _ = read_events(log.path)
    >>> events[0].kind, events[0].values
    ('step', {'loss': nan})

    Raises:
        OptionError: an event's kind or key is in no table, so no view would know its unit.
        TypeError: a value is not a number, text, truth value, None, or a list or dict of those.
    """

    def __init__(self, folder: str | Path, rank: int = 0) -> None:
        self.rank = rank
        self.path = Path(folder) / f"events-rank{rank}.jsonl"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        num_torn_bytes = _cut_torn_line(self.path)
        self._file = open(self.path, "ab", buffering=0)  # noqa: SIM115 (close() closes it)
        self._lock = threading.Lock()
        if num_torn_bytes:
            message = (
                f"cut {num_torn_bytes} bytes of a torn last line, left by a run that was killed while writing"
            )
            self.write("warning", -1, message=message, source="events")

    def write(self, kind: str, step: int, **values: Any) -> None:
        """Append an event that happens now."""
        self.emit(RunEvent.now(kind, step, values, self.rank))

    def emit(self, event: RunEvent) -> None:
        """Append an event."""
        line = _encode(event)
        with self._lock:
            num_written = self._file.write(line)
            while num_written < len(line):  # a signal or a full disk can cut a write short
                num_written += self._file.write(line[num_written:])

    def close(self) -> None:
        """Close the file; writing after that is an error."""
        self._file.close()

    def __enter__(self) -> RunLog:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def read_events(path: str | Path, offset: int = 0) -> tuple[list[RunEvent], int]:
    """Read the whole lines that stand in a file after `offset` bytes; call again with the new offset to follow a run.

    A last line without its newline is still being written (or torn): it is left for the next call.

    Returns:
        The events, and the offset behind the last whole line.

    Raises:
        DataError: a whole line is not an event, or the file is shorter than `offset`.
    """
    with open(path, "rb") as file:
        size = file.seek(0, 2)
        if size < offset:
            raise DataError(
                f"{path}: {size} bytes where {offset} were read before: the run was written anew; read it from offset 0"
            )
        file.seek(offset)
        data = file.read()
    events = []
    for line in data[: data.rfind(b"\n") + 1].splitlines(keepends=True):
        events.append(_decode(line, path, offset))
        offset += len(line)
    return events, offset


def read_runs(folder: str | Path) -> pd.DataFrame:
    """All events of all runs below a folder, one row each, in order of run and time.

    Columns: `run` (the run's folder relative to `folder`; for `folder` itself its name), `kind`, `step`, `rank`,
    `time_s`, `elapsed_s` (since the run's first event), then the keys that any event has, in the table's order.

    Raises:
        DataError: no event file below the folder, or a line is not an event.
    """
    import pandas as pd

    folder = Path(folder)
    rows = []
    for path in sorted(folder.rglob(EVENT_FILES)):
        run = path.parent.relative_to(folder).as_posix() if path.parent != folder else folder.resolve().name
        events, _ = read_events(path)
        rows += [
            {"run": run, **{field: getattr(event, field) for field in _FIELDS}, **event.values}
            for event in events
        ]
    if not rows:
        raise DataError(
            f"{folder}: no events in any {EVENT_FILES} below it; give the folder of a run, or one above"
        )
    table = pd.DataFrame(rows).sort_values(["run", "time_s"], kind="stable", ignore_index=True)
    table["elapsed_s"] = table["time_s"] - table.groupby("run")["time_s"].transform("min")
    first = ["run", *_FIELDS, "elapsed_s"]
    known = [key for key in EVENT_KEYS if key in table]
    return table[first + known + [key for key in table if key not in {*first, *known}]]


def keys_table() -> str:
    """The tables of kinds and keys in Markdown, as they stand in docs/events.md."""
    lines = ["| kind | when |", "|---|---|"]
    lines += [f"| `{kind}` | {when} |" for kind, when in EVENT_KINDS.items()]
    lines += ["", "| key | in | unit | meaning |", "|---|---|---|---|"]
    lines += [
        f"| `{name}` | {', '.join(key.kinds.split())} | {key.unit} | {key.meaning} |"
        for name, key in EVENT_KEYS.items()
    ]
    return "\n".join(lines)


def _encode(event: RunEvent) -> bytes:
    if event.kind not in EVENT_KINDS:
        raise unknown_name("kind of event", event.kind, EVENT_KINDS)
    for key in event.values:
        if key not in EVENT_KEYS and not key.startswith(USER_PREFIX):
            error = unknown_name("event key", key, EVENT_KEYS)
            raise OptionError(f"{error}. Begin keys of your own with {USER_PREFIX!r}.")
    flat = {field: getattr(event, field) for field in _FIELDS}
    flat |= {key: _plain(key, value) for key, value in event.values.items()}
    return json.dumps(flat, allow_nan=False, separators=(",", ":")).encode() + b"\n"


def _plain(key: str, value: Any) -> Any:
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, Mapping):
        return {str(name): _plain(f"{key}.{name}", item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(key, item) for item in value]
    raise TypeError(
        f"event key {key!r}: expected a number, text, true or false, None, or a list or dict of those, "
        f"found {type(value).__name__}; give a tensor's .item(), a path's str()"
    )


def _decode(line: bytes, path: str | Path, offset: int) -> RunEvent:
    try:
        values = json.loads(line, object_hook=_restore)
        kind, step, rank, time_s = [values.pop(field) for field in _FIELDS]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"{path}: the line at byte {offset} is not an event ({error!r}): {line[:80]!r}; "
            "remove that line to read the rest"
        ) from error
    return RunEvent(kind, step, rank, time_s, values)


def _restore(values: dict[str, Any]) -> dict[str, Any]:
    return {
        key: _NON_FINITE.get(value, value) if type(value) is str else value for key, value in values.items()
    }


def _cut_torn_line(path: Path) -> int:
    """Cut off what stands behind the last newline; returns how many bytes that was."""
    if not path.exists() or not (size := path.stat().st_size):
        return 0
    with open(path, "r+b") as file:
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            end = content.rfind(b"\n") + 1
        file.truncate(end)
    return size - end
