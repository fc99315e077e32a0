"""The loader: a plan decides which samples form a batch, a backend reads, decodes and pads them ahead of training.

The order comes from the plan alone and each sample from (seed, epoch, record id): batches are bit for bit the
same whatever the backend, the number of workers, or where an epoch was resumed. The loader itself keeps the
state of an epoch: position, bad samples and reports.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, closing
from dataclasses import asdict
from functools import cached_property, partial
from time import perf_counter
from typing import Any, Literal
from zlib import crc32

import numpy as np
import torch
from numpy.typing import NDArray

from mmlab.data.conversation_dataset import ConversationBatch
from mmlab.errors import DataError, RunError, check_is, check_name, check_numbers, check_state
from mmlab.loading.backends import Backend, Copier, Setting, ThreadBackend
from mmlab.loading.batches import Augmentation, BadSample, BatchRequest, LoadedBatch, SampleLoader
from mmlab.loading.cache.store import SampleCache
from mmlab.loading.stages import StageReport
from mmlab.loading.tuning import Tuner, Tuning
from mmlab.loading.workers import ProcessBackend
from mmlab.machine import num_usable_cores, place_of_process, total_memory_bytes
from mmlab.runs.events import RunEvent, warn
from mmlab.schedule.base import Scheduler
from mmlab.schedule.plan import BatchPlan
from mmlab.types import Batch

BACKENDS = ("threads", "torch")
_REPORT_S = 1.0  # between two reports of the stages


def default_num_workers() -> int:
    """Workers to start when none are asked for: one per core that this process may use, at most 8."""
    return min(8, num_usable_cores())


class PlannedLoader(AbstractContextManager["PlannedLoader"]):
    """Iterates over the batches of one epoch's plan; `set_epoch` plans the next.

    Args:
        dataset: what to load: a `MultimodalDataset` or a `ConversationDataset`.
        scheduler: plans each epoch from `dataset.sizes`. The plan is read only as far ahead as `prefetch`, so a
            scheduler that has `observe` (`mmlab.ResourceAwareScheduler`) may replan the rest of the epoch.
        backend: `threads` in this process; `torch` for worker processes, faster where Python code (an augmentation of
            your own, say) does the work and holds the interpreter's lock.
        num_workers: threads or processes that decode; 0 decodes in the caller's thread; None takes
            `default_num_workers()`; `auto` starts from that and searches while training waits (see `tuning`).
        prefetch: batches prepared ahead; None takes two per worker, and changes with the workers under
            `auto`.
        pin_memory: page-locked batches for fast copies to a GPU; None pins when one is there.
        device: copy batches there ahead of training; None leaves them in host memory.
        cache: keeps what is decoded for later epochs and runs; becomes `dataset.cache`.
        augment: changes decoded images at random, by (the scheduler's seed, epoch, record id). Crops of
            `mmlab.Augment` are cut from the stored image and resized once; with a cache, they are the same
            part of the cached image, which is faster but less sharp.
        on_bad_sample: what to do when an image cannot be read during a run: `raise` a DataError, or `skip` the
            sample. Each emits a `bad_sample` event.
        max_bad_samples: more than this in an epoch raise a RunError.
        max_ram_gb: limit on the memory of batches under way, in GiB; a quarter of the machine's unless given.
        emit: takes each `RunEvent` (`stage`, `bad_sample`, `warning`), for example `RunLog(folder).emit`. Without it,
            bad samples and dead workers are Python warnings.

    Attributes:
        num_done: batches of the epoch that were delivered, or of which no sample could be read.

    Raises:
        OptionError: an unknown backend, policy or device, a number out of range, or a data set without `sizes`.
    """

    weights: NDArray[np.float64] | None = None  # (N,) of each sample's loss; batches carry them where given

    def __init__(
        self,
        dataset: Any,
        scheduler: Scheduler,
        *,
        backend: str = "threads",
        num_workers: int | Literal["auto"] | None = None,
        prefetch: int | None = None,
        pin_memory: bool | None = None,
        device: torch.device | str | None = None,
        cache: SampleCache | None = None,
        augment: Augmentation | None = None,
        on_bad_sample: str = "raise",
        max_bad_samples: int = 100,
        max_ram_gb: float | None = None,
        emit: Callable[[RunEvent], object] | None = None,
    ) -> None:
        check_name("backend", backend, BACKENDS)
        check_name("policy on bad samples", on_bad_sample, ("raise", "skip"))
        workers = num_workers if isinstance(num_workers, int) else default_num_workers()
        ahead = max(1, 2 * workers) if prefetch is None else prefetch
        check_numbers({"num_workers": num_workers, "prefetch": ahead, "max_ram_gb": max_ram_gb})
        check_numbers({"max_bad_samples": max_bad_samples})
        if pin_memory and not torch.cuda.is_available():
            warnings.warn("pin_memory=True has no effect: no GPU is available", stacklevel=2)
        check_is("dataset", dataset, "records", "a MultimodalDataset, for a part of records.select(rows)")
        check_is("scheduler", scheduler, "plan", "a scheduler, as make_scheduler() gives")
        check_is("cache", cache, "stats", "a SampleCache(folder, key=cache_key(dataset))", optional=True)
        check_is("augment", augment, "__call__", "an Augment() or a function", optional=True)
        if cache is not None:
            dataset.cache = cache
        self.dataset, self.scheduler = dataset, scheduler
        self._is_closed = False
        self.on_bad_sample, self.max_bad_samples, self._emit = on_bad_sample, max_bad_samples, emit
        self.bad_samples: list[BadSample] = []  # of the last iteration, as far as delivered
        max_bytes = total_memory_bytes() // 4 if max_ram_gb is None else int(max_ram_gb * 2**30)
        self._loader = SampleLoader(dataset=dataset, augment=augment, seed=getattr(scheduler, "seed", 0))
        self._copier = Copier(pin=torch.cuda.is_available() and pin_memory is not False, device=device)
        kind: Any = ThreadBackend
        if backend == "torch" and workers:
            kind = partial(ProcessBackend, warn=partial(warn, emit, source="loader"))
        start = Setting(workers, ahead)
        self._backend: Backend = kind(self._loader, start, copier=self._copier, max_bytes=max_bytes)
        self._tuner: Tuner | None = None
        if num_workers == "auto":
            keeps_prefetch = prefetch is not None
            self._tuner = Tuner(start, self._backend.ram_bytes, max_bytes, keeps_prefetch=keeps_prefetch)
        self._begin(0)

    def _begin(self, epoch: int, plan: BatchPlan | None = None, num_before: int = 0) -> None:
        """Go to the start of an epoch, or of what is left of it after batches for another number of ranks."""
        self.epoch = epoch
        self.plan = self.plan_of(epoch) if plan is None else self._share(plan)
        self._num_before = self.num_done = num_before
        self._num_bad = 0  # bad samples of the epoch, those before a resume included
        self._plan_state: Mapping[str, Any] | None = None  # of the plan's iterator after the last batch done
        self._resumes = False  # whether the next iteration begins there

    def plan_of(self, epoch: int) -> BatchPlan:
        """This rank's batches of a whole epoch."""
        return self._share(self.scheduler.plan(self._loader.sizes, epoch=epoch))

    @staticmethod
    def _share(plan: BatchPlan) -> BatchPlan:
        """This rank's batches of a plan for several ranks; a plan that follows memory use has only those."""
        return plan.shard(*place_of_process()) if getattr(plan, "ranks_in_step", 1) > 1 else plan

    @property
    def start_batch(self) -> int:
        """How many batches of the epoch the next iteration leaves out, because a loaded state says they are done."""
        return self.num_done if self._resumes else 0

    def set_epoch(self, epoch: int) -> None:
        """Plan the given epoch; takes effect at the next iteration."""
        if epoch != self.epoch:
            self._begin(epoch)

    def observe(self, values: Mapping[str, Any]) -> None:
        """Pass a step's measurements to the scheduler's `observe`, if any; it may replan the epoch's rest."""
        if hasattr(self.scheduler, "observe"):
            self.scheduler.observe(values)

    def __len__(self) -> int:
        return self._num_before + len(self.plan)

    @property
    def whole_epoch(self) -> int:
        """Number of batches of a whole epoch on the present number of ranks."""
        return len(self.plan_of(self.epoch)) if self._num_before else len(self)

    def __iter__(self) -> Iterator[Batch]:
        self._check_open()
        return self._deliver()

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all threads and workers now, even in mid-epoch; a wait for a batch then raises a RunError."""
        self._is_closed = True
        self._backend.close()

    def state_dict(self) -> dict[str, Any]:
        """The position in the epoch after the last batch delivered; a few integers, for `load_state_dict`."""
        state: Any = {"epoch": self.epoch, "num_batches": self.num_done, "num_bad_samples": self._num_bad}
        state |= self._identity | {"num_left": len(self) - self.num_done, "num_before": self._num_before}
        if self._plan_state is not None:
            state["plan"] = self._plan_state
        if hasattr(self.scheduler, "state_dict"):
            state["scheduler"] = self.scheduler.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next iteration begin with the batch that would have come next; nothing is decoded again.

        The backend, the number of workers and the number of ranks may differ from before. With another
        number of ranks, the samples that are left of the epoch are replanned, and `len` is the number of
        batches that this rank has done plus the number left.

        Raises:
            DataError: the state is of other data, another seed or other scheduler options; or only one of
                the two plans follows memory use.
        """
        check_state("loader", state, "epoch", "num_batches", "num_left", "num_bad_samples", *self._identity)
        if ("scheduler" in state) != hasattr(self.scheduler, "load_state_dict"):
            raise DataError(
                "cannot resume: a plan that follows memory use goes on only as such, in a single process; use the same "
                "number of ranks, or plan without following from the start"
            )
        if state["vocabulary"] != self.vocabulary:
            raise DataError(
                "cannot resume: the vocabulary differs, so token ids would stand for other words; use the tokenizer "
                "saved with that run: its folder tokenizer/, put back if it is gone, or named as the tokenizer here"
            )
        epoch, num_batches, num_left = state["epoch"], state["num_batches"], state["num_left"]
        world_size = getattr(self.scheduler, "world_size", 1)
        saved = state.get("plan")  # None before the first batch, and where the plan follows memory use
        if "scheduler" in state:
            self.scheduler.load_state_dict(state["scheduler"])  # type: ignore[attr-defined]
        if saved is None:
            self._begin(epoch)
        elif state["rows"] != self._identity["rows"]:
            if num_left:
                raise DataError(
                    "cannot resume within an epoch: the samples, their order or their sizes are not those of the saved state; "
                    "resume with the same data, the same limit and the same image policy"
                )
            self._begin(epoch)
            saved, num_batches = None, len(self)  # the epoch is over, however many batches it would have now
            message = "the samples or their sizes are not those of the saved state: what is held out of them now may have been trained on"
            warn(self._emit, message, source="loader")
        elif state["num_before"] or any(ranks != world_size for ranks, _ in saved.get("taken", ())):
            sizes = self._loader.sizes
            whole = self.scheduler.plan(sizes, epoch=epoch)
            rest = self.scheduler.resume(sizes, saved) if num_left else whole.skip(len(whole))
            self._begin(epoch, rest, num_batches)
        else:
            self._begin(epoch)
            if num_left:
                iter(self.plan).load_state_dict(saved)  # refuses another seed or other options at once
        self.num_done, self._num_bad = num_batches, state["num_bad_samples"]
        self._plan_state, self._resumes = saved, True

    @cached_property
    def vocabulary(self) -> int:
        """Checksum of the vocabulary: where two differ, token ids stand for other words."""
        words = sorted(getattr(self._loader.dataset.tokenizer, "get_vocab", dict)().items())
        return crc32(json.dumps(words).encode())

    @cached_property
    def _identity(self) -> dict[str, int]:
        """Checksums of the vocabulary, and of the rows' ids and sizes."""
        dataset, sizes = self._loader.dataset, self._loader.sizes
        rows = crc32(json.dumps(list(dataset.records.ids)).encode())
        for column in (sizes.num_tokens, sizes.height, sizes.width):
            rows = crc32(np.ascontiguousarray(column), rows)
        return {"vocabulary": self.vocabulary, "rows": rows}

    def stage_report(self) -> StageReport:
        """How busy each stage was in the current or last epoch, and which one is the bottleneck."""
        return self._backend.meter.report()

    @property
    def tuning(self) -> Tuning:
        """The settings that were tried for `num_workers="auto"`, in order."""
        return Tuning() if self._tuner is None else self._tuner.trials

    def _check_open(self) -> None:
        if self._is_closed:
            raise RunError("this loader is closed; `load_state_dict` of a new one goes on where it stood")

    def _deliver(self) -> Iterator[Batch]:
        requests = self._requests()
        if self._tuner is not None:
            self._tuner.begin_epoch(len(self.plan))
        try:
            with closing(self._backend.run(requests)) as loaded_batches:
                while (loaded := self._take(loaded_batches)) is not None:
                    if loaded.batch is not None:
                        yield self._complete(loaded.batch, loaded.rows)
                    elif getattr(self.scheduler, "world_size", 1) > 1:
                        raise RunError(
                            f"no sample of a batch could be read ({', '.join(bad.record_id for bad in loaded.bad_samples)}), and without "
                            "it this rank would be a step behind the others; mend or remove the files"
                        )
                self._report_stages(min_s=0)
        except GeneratorExit:  # the iteration was abandoned; workers may stay for another epoch
            raise
        except BaseException:
            self._backend.close()
            raise

    def _take(self, loaded_batches: Iterator[LoadedBatch]) -> LoadedBatch | None:
        """The next batch; records its wait, bad samples and position, and lets the tuner act."""
        self._check_open()
        started = perf_counter()
        if (loaded := next(loaded_batches, None)) is None:
            return None
        wait_s = perf_counter() - started
        num_samples = len(loaded.request.rows)
        self._backend.meter.deliver(num_samples, wait_s, loaded.num_hits)
        self._take_bad_samples(loaded)
        self.num_done, self._plan_state = loaded.request.number + 1, loaded.request.place
        self._report_stages(min_s=_REPORT_S)
        if self._tuner is not None and (setting := self._tuner.observe(num_samples, wait_s)):
            self._backend.resize(setting)
        return loaded

    def _requests(self) -> Iterator[BatchRequest]:
        """The batches that are left of the epoch, drawn from the plan one by one."""
        if not self._resumes:
            self._begin(self.epoch, None if self._num_before else self.plan)
        self._resumes, self.bad_samples = False, []
        batches: Any = iter(self.plan)
        number, epoch = self.num_done, self.epoch
        if number > self._num_before:  # resumed from a state of this same plan
            if self._plan_state is None:
                batches = iter(self.plan.skip(number - self._num_before))
            else:
                batches.load_state_dict(self._plan_state)
        for rows in batches:
            place = batches.state_dict() if hasattr(batches, "state_dict") else None
            yield BatchRequest(number, epoch, list(rows), place)
            number += 1

    def _complete(self, batch: Batch, rows: list[int]) -> Batch:
        self._copier.wait_for_copies(batch)
        if isinstance(batch, ConversationBatch):
            batch.dataset = self.dataset
        if self.weights is not None:
            batch.weights = torch.from_numpy(self.weights[rows]).float().to(batch.pixel_values.device)
        return batch

    def _take_bad_samples(self, loaded: LoadedBatch) -> None:
        for bad in loaded.bad_samples:
            self.bad_samples.append(bad)
            self._num_bad += 1
            if self._emit is not None:
                self._emit(RunEvent.now("bad_sample", -1, asdict(bad)))
            if self.on_bad_sample == "raise":
                raise DataError(bad.message)
            if self._emit is None:
                warnings.warn(f"{bad.message} (left out)", RuntimeWarning, stacklevel=4)
            if self._num_bad > self.max_bad_samples:
                raise RunError(
                    f"{self._num_bad} samples of epoch {self.epoch} could not be read, and max_bad_samples "
                    f"is {self.max_bad_samples}; the last: {bad.message}"
                )

    def _report_stages(self, min_s: float) -> None:
        if self._emit is None or (report := self._backend.meter.since_last(min_s=min_s)) is None:
            return
        for row in report.rows:
            if row["stage"] == "read" and self.dataset.cache is not None:
                row["cache_hit_ratio"] = report.cache_hit_ratio
                row["cache_bytes"] = self.dataset.cache.stats().cache_bytes
            self._emit(RunEvent.now("stage", -1, row))
