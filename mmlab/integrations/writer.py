"""Writes the events of a run by another trainer or by your own loop; views follow it like mmlab's own runs.

The figures of a batch (shape, padding, cost, predicted bytes) come from the plan of its `PlannedSampler`;
tensors are not inspected. Costs about 50 us a step; a GPU is synchronised at each step's end, so that its
time is correct.
"""

from __future__ import annotations

import atexit
import sys
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import distributed

from mmlab.comparison.run import Run
from mmlab.integrations.sampler import PlannedSampler
from mmlab.machine import place_of_process, resolve_device
from mmlab.parallel.process_group import ProcessGroup
from mmlab.runs.events import EVENT_FILES
from mmlab.runs.folders import exclusive_folder, move_earlier_aside
from mmlab.runs.meters import LiveBytes, step_memory
from mmlab.runs.monitor import DeviceMonitor
from mmlab.schedule.metrics import lengths
from mmlab.training.step_meter import clock, padding_values
from mmlab.types import PATCH, CostModel

_open: dict[Path, RunWriter] = {}  # the writers of this process that are not closed, by their folders


class RunWriter(AbstractContextManager["RunWriter"]):
    """A context manager around a run; each optimizer step is one call of `step`.

    ::

        with RunWriter("runs/mine", sampler=sampler, num_steps=len(loader)) as run:
            for batch in loader:
                run.begin_step()
                ...
                run.step(loss=loss.item())
                if run.stopped:  # by `mmlab.runs.control.send(folder, "stop")`, or the live panel
                    break

    Args:
        folder: of the run; events of an earlier run there are moved to `previous-N`, unless this one resumes
            it.
        sampler: whose batches are trained.
        memory: predicts a batch's peak in bytes from its shape; None takes the scheduler's cost, if that is
            in bytes.
        live: measure each step's peak by counting live tensors (12 us an operation); else the peak is that of the
            GPU's allocator, or of the process.
        device: of the model.
        step: steps already done by the run that this one resumes.
        about: keys of a `start` event: `num_steps`, `num_epochs`, `run_name`, ...

    Raises:
        OptionError: a run of another process is active in the folder, there is no such key of a `start` event, or the device
            is not there.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        sampler: PlannedSampler | None = None,
        memory: CostModel | None = None,
        live: bool = False,
        device: str | torch.device = "cpu",
        step: int = 0,
        **about: Any,
    ) -> None:
        self.sampler, self.device, self.stopped = sampler, torch.device(resolve_device(str(device))), False
        rank, self.world_size = place_of_process()
        self._folder = Path(folder).resolve()
        if self._folder in _open:  # of this process: a cell was interrupted, and is run again
            _open[self._folder]._close_at_exit()
        cost = None if sampler is None else sampler.plan.limits.cost
        self._memory = memory if memory is not None or getattr(cost, "unit", "") != "bytes" else cost
        self._live = LiveBytes() if live else None
        self._ended_s = self._left_s = 0.0  # when the last step ended; when a batch last came or was done
        self._waited_s: float | None = None  # for data, since the last step; None: the loop has not told
        self._plan: Any = None  # the plan that `_counts` and `_bytes` were computed from
        about.setdefault("run_name", self._folder.name)
        about.setdefault("scheduler", "" if sampler is None else type(sampler.scheduler).__name__.lower())
        with ExitStack() as opened:  # closed again where the run cannot start
            if rank == 0:
                opened.enter_context(exclusive_folder(self._folder))
            if rank == 0 and step == 0:
                move_earlier_aside(self._folder, (EVENT_FILES,))
            if self.world_size > 1 and distributed.is_initialized():
                distributed.barrier()
            self._run = opened.enter_context(Run(folder, rank=rank))
            opened.enter_context(DeviceMonitor(self._run.emit, device=self.device, rank=rank))
            if self._live is not None:
                opened.enter_context(self._live)
            self._run.start(step, device=str(self.device), world_size=self.world_size, **about)
            self.is_open, self._opened, _open[self._folder] = True, opened.pop_all(), self
        atexit.register(self._close_at_exit)
        self.exclude_time()

    def begin_step(self) -> None:
        """Call this when a batch has arrived: the time since the last step (or `end_batch`) was waiting for data."""
        now = time.perf_counter()
        self._waited_s, self._left_s = (self._waited_s or 0.0) + now - self._left_s, now

    def end_batch(self) -> None:
        """Call this after a micro-batch that others of its step follow, if `begin_step` is called for each."""
        self._left_s = time.perf_counter()

    def exclude_time(self) -> None:
        """Leave the time since the last step or batch (evaluation, a checkpoint) out of the next step."""
        now = time.perf_counter()
        self._ended_s, self._left_s = self._ended_s + now - self._left_s, now
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        if self._live is not None:
            self._live.reset_peak()

    def step(self, num_batches: int = 1, *, start: int | None = None, **values: Any) -> None:
        """Write a step; waits while the run is paused.

        Args:
            num_batches: micro-batches of gradient accumulation.
            start: batches of the epoch before this step; None continues after the last step.
            values: keys of a `step` event, such as `loss`, `lr` and `grad_norm`; `num_samples` where there is no plan.

        Raises:
            OptionError: no such key.
            TypeError: a value is no plain number or text; give a tensor's `.item()`.
        """
        self.write_step({**self.measure(num_batches, start=start), **values})

    def measure(self, num_batches: int = 1, *, start: int | None = None) -> dict[str, Any]:
        """Values of the step that ends now, without its loss: time, memory, plan; begins the next step."""
        step_s = clock(self.device) - self._ended_s
        values = self._planned(num_batches, start) | {"step_s": step_s, "data_wait_s": self._waited_s}
        values |= step_memory(self.device, self._live)
        self._run.step += 1
        self.stopped = self._run.control.wait_if_paused_or_stop(
            agree=ProcessGroup(self.device).largest, emit=lambda kind, found: self._run.write(kind, **found)
        )
        self._left_s, self._waited_s = self._ended_s, None
        self.exclude_time()
        return values

    def write_step(self, values: Mapping[str, Any]) -> None:
        """Write the values of `measure`, and any others, as the event of the last step."""
        speed = {"samples_per_s": values["num_samples"] / values["step_s"]} if "num_samples" in values else {}
        self._run.write("step", **speed, **values)

    def write(self, kind: str, **values: Any) -> None:
        """Write another event, such as `eval`; the time since the last step is left out of the next."""
        self._run.write(kind, **values)
        self.exclude_time()

    def close(self, error: BaseException | None = None) -> None:
        """Write how the run ended: done, stopped, or failed by this error."""
        if self.is_open:
            self.is_open = False
            _open.pop(self._folder, None)
            atexit.unregister(self._close_at_exit)
            kind, trace = (type(error), error.__traceback__) if error else (None, None)
            self._opened.__exit__(kind, error, trace)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.close(error)

    def _close_at_exit(self) -> None:
        self.close(getattr(sys, "last_value", None))

    def _planned(self, num_batches: int, start: int | None) -> dict[str, Any]:
        """The plan's values for the next batches."""
        if self.sampler is None:
            return {"num_batches": num_batches}
        if self._plan is not self.sampler.plan:
            self._plan, self._next = self.sampler.plan, self.sampler.first
            batches = self._plan.columns
            tokens, patches = map(batches.totals, lengths(self.sampler.sizes, PATCH, batches.order))
            number, longest = self._plan.step_shapes()[:, :2].T
            self._counts = np.stack((tokens, patches, number * longest, self._plan.padded_patches()))
            self._bytes = np.zeros(len(number)) if self._memory is None else self._plan.costs(self._memory)
        start = self._next if start is None else start
        self._next = start + num_batches
        shapes = self._plan.shape_columns[start : self._next]
        if not len(shapes):
            return {"num_batches": num_batches}
        counts = self._counts[:, start : self._next].sum(1).tolist()  # without padding, and with it
        peak_bytes = int(self._bytes[start : self._next].max())
        return {
            "epoch": self.sampler.epoch,
            "num_samples": int(shapes[:, 0].sum()),
            "num_batches": num_batches,
            **dict(zip(("num_tokens", "height", "width"), shapes[:, 1:].max(0).tolist(), strict=True)),
            **padding_values(*counts),
            "predicted_cost": float(sum(counts[2:])),
            **({} if self._memory is None else {"predicted_bytes": peak_bytes}),
        }


def planned_sampler(loader: Any) -> PlannedSampler | None:
    """The planned sampler of a DataLoader, if it has one."""
    sampler = getattr(loader, "batch_sampler", None)
    return sampler if isinstance(sampler, PlannedSampler) else None
