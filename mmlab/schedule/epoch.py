"""Where a plan gets its batches from: independent blocks of an epoch.

A block can be built without its neighbours, so that an epoch of any length starts at once, iterates in the memory of
one block, and resumes from a few integers. Small epochs keep the blocks they have built.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from mmlab.errors import DataError, OptionError
from mmlab.schedule.columns import Block, Limits, Position
from mmlab.schedule.order import derive_key, permute
from mmlab.schedule.ranks import split_evenly

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from mmlab.schedule.base import Scheduler
    from mmlab.types import SampleSizes

_KEPT_SAMPLES = 2**20  # epochs up to this long keep their blocks in memory (8 MiB)


class BlockSource(Protocol):
    """Where a plan gets its batches from. Pure: the same block always has the same batches."""

    @property
    def num_blocks(self) -> int: ...

    def build(self, block: int) -> Block: ...

    def state(self, position: Position) -> dict[str, Any]: ...

    def locate(self, state: Mapping[str, Any]) -> Position: ...


@dataclass(frozen=True, slots=True)
class GivenBlock:
    """Batches that were made elsewhere."""

    block: Block
    num_blocks: int = 1

    def build(self, block: int) -> Block:
        return self.block

    def state(self, position: Position) -> dict[str, Any]:
        return position._asdict()

    def locate(self, state: Mapping[str, Any]) -> Position:
        return Position(state["block"], state["batch"])


@dataclass(frozen=True)
class EpochBlocks:
    """One epoch of a scheduler, or what is left of it.

    `first` is where it starts; `taken` says what earlier plans, each for its own number of ranks, took from that block:
    pairs (world_size, number of batches). What they left comes first, cut anew for this scheduler's `world_size`.
    """

    scheduler: Scheduler
    sizes: SampleSizes
    epoch: int
    limits: Limits
    first: int = 0
    taken: tuple[tuple[int, int], ...] = ()
    _built: dict[int, Block] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def num_blocks(self) -> int:
        if not self.taken:
            return self._in_epoch - self.first
        return 1 + self._in_epoch - self._left_over[1]

    def build(self, block: int) -> Block:
        """The batches of a block, in the order of training."""
        if block not in self._built:
            if len(self.sizes) > _KEPT_SAMPLES:
                self._built.clear()
            self._built[block] = self._build(block)
        return self._built[block]

    def state(self, position: Position) -> dict[str, Any]:
        """The integers from which `resume` finds this position again."""
        taken = [*self.taken, (self.scheduler.world_size, position.batch)]
        block = self.first
        if position.block or not self.taken:
            block, taken = self._block_in_epoch(position.block), taken[-1:]
        return {
            "seed": self.scheduler.seed,
            "epoch": self.epoch,
            "num_samples": len(self.sizes),
            "options": _fingerprint(self.scheduler),
            "block": block,
            "taken": [list(pair) for pair in taken],
        }

    def locate(self, state: Mapping[str, Any]) -> Position:
        """Where a state of this very plan stands."""
        rest, (_, batch) = self.resumed(state)
        if (rest.epoch, rest.first, rest.taken) == (self.epoch, self.first, self.taken):
            return Position(0, batch)
        block = rest.first - self._block_in_epoch(0)
        if rest.epoch != self.epoch or rest.taken or block < bool(self.taken):
            raise OptionError(
                "this state is of another plan of the data; give it to the scheduler's resume()"
            )
        return Position(block, batch)

    def resumed(self, state: Mapping[str, Any]) -> tuple[EpochBlocks, Position]:
        """The blocks that are left after `state`, and where to start in them.

        Raises:
            DataError: the state is of another data set, seed or configuration.
        """
        expected = {
            "num_samples": len(self.sizes),
            "seed": self.scheduler.seed,
            "options": _fingerprint(self.scheduler),
        }
        for name, value in expected.items():
            if state[name] != value:
                raise DataError(
                    f"cannot resume: the state was saved with {name} {state[name]}, this plan has {value}; "
                    "resume with the same data, seed and scheduler options (world_size may differ)"
                )
        taken = tuple((world_size, count) for world_size, count in state["taken"] if count)
        batch = 0
        if taken and taken[-1][0] == self.scheduler.world_size:
            batch, taken = taken[-1][1], taken[:-1]
        return replace(self, epoch=state["epoch"], first=state["block"], taken=taken), Position(0, batch)

    def next_epoch(self) -> EpochBlocks:
        """The same from the start of the following epoch."""
        return replace(self, epoch=self.epoch + 1, first=0, taken=())

    @cached_property
    def _in_epoch(self) -> int:
        return -(-len(self.sizes) // max(1, self.scheduler.block_size(len(self.sizes))))

    def _block_in_epoch(self, block: int) -> int:
        return self._left_over[1] + block - 1 if self.taken else self.first + block

    def _build(self, block: int) -> Block:
        if self.taken and not block:
            rows, _ = self._left_over
            return self._cut(rows, self.scheduler.world_size, self.first, len(self.taken))
        number = self._block_in_epoch(block)
        return self._cut(self._rows(number), self.scheduler.world_size, number, 0)

    def _rows(self, number: int) -> NDArray[np.int64]:
        """The samples of a block of the epoch, in random order."""
        num_samples = len(self.sizes)
        start, end = (num_samples * edge // self._in_epoch for edge in (number, number + 1))
        return permute(np.arange(start, end), num_samples, derive_key(self.scheduler.seed, self.epoch))

    def _cut(self, rows: NDArray[np.int64], world_size: int, number: int, turn: int) -> Block:
        scheduler, limits = self.scheduler, self.limits
        if world_size != scheduler.world_size:
            scheduler = replace(scheduler, world_size=world_size)
            limits = scheduler.limits(self.sizes)
        key = derive_key(scheduler.seed, self.epoch, number, turn)
        rng = np.random.Generator(np.random.Philox(key))
        batches = scheduler.make_batches(self.sizes, rows, rng, limits)
        return scheduler.order_batches(self.sizes, split_evenly(batches, world_size), rng)

    @cached_property
    def _left_over(self) -> tuple[NDArray[np.int64], int]:
        """Samples that earlier plans left of the first block, and the number of the next untouched block.

        Where fewer are left than there are ranks, the next block joins them.
        """
        rows, following = self._rows(self.first), self.first + 1
        world_sizes = [*(world_size for world_size, _ in self.taken[1:]), self.scheduler.world_size]
        for turn, ((world_size, count), next_world_size) in enumerate(
            zip(self.taken, world_sizes, strict=True)
        ):
            batches = self._cut(rows, world_size, self.first, turn)
            rows = batches.order[batches.ends[count - 1] :]
            if len(rows) < next_world_size and following < self._in_epoch:
                rows, following = np.concatenate((rows, self._rows(following))), following + 1
        return rows, following


def _fingerprint(scheduler: Scheduler) -> int:
    """A number that tells apart schedulers whose plans differ for another reason than seed or world size."""
    options = [
        (item.name, getattr(scheduler, item.name))
        for item in fields(scheduler)
        if item.repr and item.name not in ("seed", "world_size")
    ]
    text = re.sub(r" at 0x[0-9a-f]+", "", repr((type(scheduler).__qualname__, options)))
    return zlib.crc32(text.encode())
