"""A batch sampler for any torch DataLoader: mmlab's plans for each epoch and rank, the same number of batches in every epoch.

Other trainers assume that every epoch has as many batches as the first, and derive steps, learning rates and
resume positions from that. A plan's number varies a little from epoch to epoch, so batches of each epoch are
split (never merged, so every budget holds, and no sample is dropped or repeated) until there are as many as
in the longest epoch. Cost: every epoch is planned once when the sampler is made, about a microsecond per
sample and epoch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from torch.utils.data import Sampler

from mmlab.data.dataset import MultimodalDataset
from mmlab.errors import DataError, OptionError, check_is
from mmlab.machine import place_of_process
from mmlab.schedule.base import Scheduler, sizes_of
from mmlab.schedule.plan import BatchPlan
from mmlab.schedule.ranks import split_steps
from mmlab.types import Samples, SampleSizes


def sample_sizes(
    num_tokens: ArrayLike, height: ArrayLike = 0, width: ArrayLike = 0, *, group: ArrayLike | None = None
) -> SampleSizes:
    """Sizes from arrays, each (N,) or one number for all: tokens, and pixels of the image (0: no image).

    >>> len(sample_sizes([12, 40, 7], height=224, width=224))
    3

    Args:
        group: (N,) numbers or names; samples with equal values share an image (default: no sample shares one).

    Raises:
        ValueError: arrays of different length, or a size that is not a whole number from 0 to 2^31 - 1.
    """
    columns = np.broadcast_arrays(np.asarray(num_tokens), height, width)
    groups = np.arange(len(columns[0])) if group is None else np.asarray(group)
    if groups.dtype.kind not in "iu":  # such as names of images
        groups = np.unique(groups, return_inverse=True)[1]
    return SampleSizes(num_tokens=columns[0], height=columns[1], width=columns[2], group=groups)


class PlannedSampler(Sampler[list[int]]):
    """The batches of one rank, epoch by epoch: `DataLoader(dataset, batch_sampler=PlannedSampler(...), collate_fn=...)`.

    `set_epoch` chooses the epoch. A StatefulDataLoader saves and resumes the sampler in mid-epoch; with a plain
    DataLoader, pass the number of batches trained to `state_dict(num_batches)`.

    >>> from mmlab.schedule import make_scheduler
    >>> sampler = PlannedSampler(sample_sizes([3, 9, 4, 8]), make_scheduler("sorted", batch_size=2))
    >>> sorted(sorted(batch) for batch in sampler)
    [[0, 2], [1, 3]]

    Args:
        sizes: of all samples, in the order of the data set: `SampleSizes`, records, or a `MultimodalDataset`.
        scheduler: `mmlab.make_scheduler(...)`; it plans for `world_size` ranks.
        num_epochs: epochs to train, which all get the same number of batches. None leaves each epoch its own
            number, for loops that call `len` in every epoch.
        rank, world_size: of this process; None takes those of torch's process group, or of `torchrun`, else 0
            and 1.

    Raises:
        OptionError: the scheduler changes its plan in mid-epoch, or a sample fits no batch.
    """

    follow_until = 0  # before this epoch, the state of an epoch's end is followed by the next epoch

    def __init__(
        self,
        sizes: Samples | MultimodalDataset,
        scheduler: Scheduler,
        *,
        num_epochs: int | None = None,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        wanted = "one of mmlab.make_scheduler(...), whose plan of an epoch is fixed, for trainers to follow"
        check_is("scheduler", scheduler, Scheduler, wanted)
        check_is("num_epochs", num_epochs, "__index__", "a whole number", optional=True)
        here, ranks = place_of_process()
        self.rank = here if rank is None else rank
        self.world_size = ranks if world_size is None else world_size
        self.scheduler = replace(scheduler, world_size=self.world_size)
        self.num_epochs = num_epochs
        self.sizes = sizes_of(sizes)  # type: ignore[arg-type]
        self._most = max((len(self._plan(epoch)) for epoch in range(num_epochs or 0)), default=None)
        self._chosen = self._start = 0  # epoch of the last `set_epoch`; batches that the next iteration skips
        self._begin(0)

    def __len__(self) -> int:
        return len(self.plan)

    def __iter__(self) -> Iterator[list[int]]:
        self.first = self._start
        return _Batches(self, self._start)

    def set_epoch(self, epoch: int) -> None:
        """Plan this epoch; takes effect at the next iteration.

        Raises:
            OptionError: an epoch beyond `num_epochs` needs more batches than those epochs have.
        """
        self._chosen = epoch
        if epoch != self.epoch:
            self._begin(epoch)

    def state_dict(self, num_batches: int | None = None) -> dict[str, Any]:
        """Epoch and batches done, for `load_state_dict`.

        Args:
            num_batches: trained in this epoch; None takes those drawn, which are more where workers load
                ahead.
        """
        done = self.num_drawn if num_batches is None else num_batches
        place = {"epoch": self.epoch, "num_batches": done, "of_batches": len(self)}
        return {**place, "world_size": self.world_size, "plan": self._plan(self.epoch).state_dict(0)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Start the next iteration after the batches that are done.

        Raises:
            DataError: the state belongs to other data, another seed, other options, another number of ranks, or in
                mid-epoch to another number of epochs.
        """
        self._begin(state["epoch"])
        plan = self._plan(self.epoch).state_dict(0)
        if (state["world_size"], {**plan, **state["plan"]}) != (self.world_size, plan):
            raise DataError(
                f"cannot resume: the state is of other data, seed, scheduler options or ranks ({state['world_size']}, "
                f"here {self.world_size}); resume with the same"
            )
        if state["num_batches"] and state["of_batches"] != len(self):
            raise DataError(
                f"cannot resume: the epoch was cut into {state['of_batches']} batches and is now cut into {len(self)}, because "
                "num_epochs differs; resume with the same num_epochs"
            )
        self._start = self.num_drawn = self.first = state["num_batches"]

    @property
    def sampler(self) -> PlannedSampler:
        """Itself: accelerate and Lightning look for `set_epoch` on the `sampler` of a batch sampler."""
        return self

    @property
    def batch_size(self) -> None:
        """None: it varies. Trainers ask for it to divide the batches among ranks, which is done already.

        Raises:
            OptionError: there are several ranks.
        """
        if self.world_size > 1:
            raise OptionError(
                f"these batches are rank {self.rank}'s of {self.world_size} already and must not be shared out again: "
                "with accelerate use mmlab.integrations.prepare_loader(accelerator, loader), "
                "with Lightning Trainer(use_distributed_sampler=False)"
            )

    def _begin(self, epoch: int) -> None:
        whole = self._plan(epoch)
        if self._most is not None and len(whole) != self._most:
            if len(whole) > self._most:
                raise OptionError(
                    f"epoch {epoch} has {len(whole)} batches, the {self.num_epochs} epochs before at most {self._most}; "
                    f"give num_epochs={epoch + 1} or more"
                )
            batches = split_steps(whole.columns, self._most // self.world_size, self.world_size)
            starts = [order.tolist() for order in np.split(batches.order, batches.ends[:-1])]
            whole = BatchPlan.from_batches(starts, self.sizes, whole.limits)
        self.epoch, self._start = epoch, 0
        self.first = self.num_drawn = 0  # batches that the last iteration skipped; batches drawn so far
        self.plan = whole.shard(self.rank, self.world_size)  # of this rank, with the shapes of its batches

    def _plan(self, epoch: int) -> BatchPlan:
        return self.scheduler.plan(self.sizes, epoch=epoch)


class _Batches(Iterator[list[int]]):
    """Iterates over an epoch; a `Stateful` iterator in torchdata's sense."""

    _next_start = 0  # batches that the iteration after this one skips

    def __init__(self, sampler: PlannedSampler, start: int) -> None:
        self._sampler = sampler
        self._walk(start)

    def __next__(self) -> list[int]:
        # not when it was made: a DataLoader with workers makes two iterators and draws from one
        self._sampler._start = self._next_start
        batch = next(self._left)
        self._num += 1
        if self._sampler.epoch == self._epoch:
            self._sampler.num_drawn = self._num
        return batch

    def state_dict(self) -> dict[str, Any]:
        return self._sampler.state_dict(self._num)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        sampler = self._sampler
        sampler.load_state_dict(state)
        if sampler._start == len(sampler):  # the epoch is over: a later one that was chosen begins
            follows = sampler.epoch + 1 < sampler.follow_until
            sampler.set_epoch(max(sampler._chosen, sampler.epoch + follows))
            # a StatefulDataLoader iterates once more where its own state says that the epoch is over
            self._next_start = sampler._start
        self._walk(sampler._start)

    def _walk(self, start: int) -> None:
        self._epoch, self._num = self._sampler.epoch, start
        self._left = iter(self._sampler.plan.skip(start))
