"""Where a plan gets its batches from: independent blocks of an epoch.

A block can be built without its neighbours, so that an epoch of any length starts at once, iterates in the memory of
one block, and resumes from a few integers. Small epochs keep the blocks they have built.
"""

from __future__ import annotations

import re
import signal
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from mmlab.errors import DataError, OptionError
from mmlab.machine import signals_held
from mmlab.schedule.columns import NO_LIMITS, Block, Ints, Limits, Position, images_apart
from mmlab.schedule.order import derive_key, permute
from mmlab.schedule.ranks import split_evenly
from mmlab.types import SIZE_COLUMNS, SampleSizes

if TYPE_CHECKING:
    from mmlab.schedule.base import Scheduler

_CHECKSUMS = {"options": "other scheduler options", "checksum": "other samples, or other sizes of them"}
_KEPT_SAMPLES = 2**20  # epochs up to this long keep their blocks in memory (8 MiB)
Taken = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class FixedBatches:
    """Batches that were made elsewhere."""

    block: Block
    limits: Limits = NO_LIMITS
    num_blocks: int = 1
    world_size: int = 1  # of an `EpochBlocks`, every block has a multiple of this many batches

    def build(self, block: int) -> Block:
        return self.block

    def state(self, position: Position) -> dict[str, Any]:
        return position._asdict()

    def locate(self, state: Mapping[str, Any]) -> Position:
        if state.keys() != {"block", "batch"}:
            raise DataError("not the state of a plan of given batches; give what its state_dict() returned")
        return Position(state["block"], state["batch"])


@dataclass(frozen=True)
class EpochBlocks:
    """One epoch of a scheduler, or what is left of it. Pure: the same block always has the same batches.

    An epoch is a random order of places, cut into blocks of consecutive ones. When it is resumed on another
    number of ranks, the block that was begun is finished first: `first` is its number, and `taken` says what
    earlier plans, each for its own number of ranks, took from it, as pairs (world_size, number of batches).
    What they left is block 0 of the resumed plan, cut again for this scheduler's `world_size`; the untouched
    blocks follow.
    """

    scheduler: Scheduler
    sizes: SampleSizes  # of the samples of the epoch, n; a place is a row of these
    epoch: int
    limits: Limits
    drawn: Ints | None = None  # (n,) the sample at each place; None where places are samples
    first: int = 0
    taken: Taken = ()
    _built: dict[int, Block] = field(default_factory=dict, init=False, repr=False, compare=False)

    @classmethod
    def of(cls, scheduler: Scheduler, sizes: SampleSizes, epoch: int) -> EpochBlocks:
        """A whole epoch of the data with these sizes."""
        drawn = scheduler.draw(sizes, epoch)
        if drawn is not None:  # one that is drawn twice is of one image, whether its group is known or not
            sizes = replace(sizes, group=images_apart(sizes.group)).take(drawn)
        return cls(scheduler, sizes, epoch, scheduler.limits(sizes), drawn)

    def next_epoch(self, sizes: SampleSizes) -> EpochBlocks:
        """The whole next epoch of the data with these sizes."""
        if self.drawn is None:
            return replace(self, epoch=self.epoch + 1, first=0, taken=())
        return EpochBlocks.of(self.scheduler, sizes, self.epoch + 1)

    @property
    def world_size(self) -> int:
        """Every block has a multiple of this many batches."""
        return self.scheduler.world_size

    @property
    def num_blocks(self) -> int:
        """Number of blocks in what is left of the epoch."""
        return self._in_epoch - self._block_in_epoch(0)

    def build(self, block: int) -> Block:
        """The batches of a block, in the order of training."""
        if block not in self._built:
            if len(self.sizes) > _KEPT_SAMPLES:
                self._built.clear()
            if self.taken and block == 0:
                batches = self._cut(self._left_over[0], self.world_size, self.first, len(self.taken))
            else:
                number = self._block_in_epoch(block)
                batches = self._cut(self._places(number), self.world_size, number, 0)
            if self.drawn is not None:
                batches = Block(self.drawn[batches.order], batches.ends)
            self._built[block] = batches
        return self._built[block]

    def state(self, position: Position) -> dict[str, Any]:
        """The integers from which `resumed` finds this position again."""
        taken = [*self.taken, (self.world_size, position.batch)]
        block = self.first
        if position.block or not self.taken:
            block, taken = self._block_in_epoch(position.block), taken[-1:]
        return {**self._identity, "epoch": self.epoch, "block": block, "taken": list(map(list, taken))}

    def locate(self, state: Mapping[str, Any]) -> Position:
        """The position of a state of this same plan."""
        rest, (_, batch) = self.resumed(state)
        if (rest.epoch, rest.first, rest.taken) == (self.epoch, self.first, self.taken):
            return Position(0, batch)
        block = rest.first - self._block_in_epoch(0)
        if rest.epoch != self.epoch or rest.taken or block < (1 if self.taken else 0):
            raise OptionError("this state is of another plan; give it to the scheduler's resume()")
        return Position(block, batch)

    def resumed(self, state: Mapping[str, Any]) -> tuple[EpochBlocks, Position]:
        """The blocks that are left after `state`, and where to start in them.

        Raises:
            DataError: the state is of another data set, seed or configuration, or of no scheduler's plan.
        """
        if not state.keys() >= {"epoch", "block", "taken"}:
            raise DataError("this is not the state of a plan; give what a plan's state_dict() returned")
        for name, value in self._identity.items():
            if state.get(name, value) != value:
                saved = _CHECKSUMS.get(name, f"{name} {state[name]}, this plan has {value}")
                raise DataError(
                    f"cannot resume: the state was saved with {saved}; keep data, seed "
                    "and scheduler options; world_size may differ, but memory and fastest under ddp on several ranks go on only as that"
                )
        taken = tuple((world_size, count) for world_size, count in state["taken"] if count)
        batch = 0
        if taken and taken[-1][0] == self.world_size:
            batch, taken = taken[-1][1], taken[:-1]
        return replace(self, epoch=state["epoch"], first=state["block"], taken=taken), Position(0, batch)

    @cached_property
    def _identity(self) -> dict[str, int]:
        """What must be the same for a state to fit; the checksum is of 100,000 samples at most, in even steps."""
        options, checksum = _fingerprint(self.scheduler), 0
        step = -(-len(self.sizes) // 100_000) or 1
        columns = [getattr(self.sizes, name) for name in SIZE_COLUMNS]
        for column in columns if self.drawn is None else [*columns, self.drawn]:
            checksum = zlib.crc32(np.ascontiguousarray(column[::step]), checksum)
        about = {"num_samples": len(self.sizes), "seed": self.scheduler.seed, "options": options}
        return {**about, "checksum": checksum}

    @cached_property
    def _in_epoch(self) -> int:
        return -(-len(self.sizes) // max(1, self.scheduler.block_size(len(self.sizes))))

    def _block_in_epoch(self, block: int) -> int:
        return self._left_over[1] + block - 1 if self.taken else self.first + block

    def _places(self, number: int) -> Ints:
        """The places of a block of the epoch, in random order."""
        num_places = len(self.sizes)
        start, end = (num_places * edge // self._in_epoch for edge in (number, number + 1))
        return permute(np.arange(start, end), num_places, derive_key(self.scheduler.seed, self.epoch))

    def _cut(self, places: Ints, world_size: int, number: int, turn: int) -> Block:
        """Batches of these places for a number of ranks; `number` and `turn` seed what is random in them."""
        scheduler, limits = self.scheduler, self.limits
        if world_size != self.world_size:
            scheduler = replace(scheduler, world_size=world_size)
            limits = scheduler.limits(self.sizes)
        rng = np.random.Generator(np.random.Philox(derive_key(scheduler.seed, self.epoch, number, turn)))
        with signals_held(signal.SIGINT, signal.SIGTERM):  # within numba they would become a SystemError
            batches = scheduler.make_batches(self.sizes, places, rng, limits)
            return scheduler.order_batches(self.sizes, split_evenly(batches, world_size), rng)

    @cached_property
    def _left_over(self) -> tuple[Ints, int]:
        """Places that earlier plans left of the first block, and the number of the next untouched block."""
        return self._left_by(self.taken, self.world_size)

    def _left_by(self, taken: Taken, next_world_size: int) -> tuple[Ints, int]:
        """The same after some of the plans, for the ranks of the next one.

        Each plan is rebuilt as it was: from what the plans before it had left, for its own ranks. A plan
        needs at least one sample per rank, so if fewer are left, the next block is added to them.
        """
        if not taken:
            return self._places(self.first), self.first + 1
        *earlier, (world_size, count) = taken
        places, following = self._left_by(tuple(earlier), world_size)
        batches = self._cut(places, world_size, self.first, len(earlier))
        places = batches.order[batches.ends[count - 1] :]
        if len(places) < next_world_size and following < self._in_epoch:
            places, following = np.concatenate((places, self._places(following))), following + 1
        return places, following


def _fingerprint(scheduler: Scheduler) -> int:
    """A number that tells apart schedulers whose plans differ for a reason other than seed or world size."""
    options = [
        (item.name, getattr(scheduler, item.name))
        for item in fields(scheduler)
        if item.repr and item.name not in ("seed", "world_size")
    ]
    return zlib.crc32(re.sub(r" at 0x[0-9a-f]+", "", repr((type(scheduler).__qualname__, options))).encode())
