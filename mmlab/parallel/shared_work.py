"""Blocks of work shared out among the ranks of a job while it is done, with one report at the end.

Built on the key-value store that every job of `torchrun` has, whose counters are atomic; no process group is needed,
and one that exists is left alone. Every rank begins with a contiguous stretch of the blocks, so that files which lie in
order are read by few ranks, and helps the others when it is through with its own. A block costs a message to the store,
some 0.1 ms.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from itertools import count
from typing import Any

from torch import distributed

from mmlab.errors import RunError
from mmlab.parallel.launches import connect

_LOOK_EVERY_S = 0.05
_JOIN_S, _LEAVE_S = 600.0, 60.0
_job_number = count()  # every rank counts alike: all make the same calls


class SharedWork:
    """One rank's hold on work that all ranks of a job share. For one piece of work; not thread-safe.

    Args:
        store: the job's own; its keys are taken to be free, so give a `PrefixStore` where they are not.
        silence_s: how long to wait for ranks that tell nothing, before they are taken for dead.
    """

    def __init__(
        self, store: distributed.Store, rank: int, world_size: int, *, silence_s: float = 600.0
    ) -> None:
        self.rank, self.world_size = rank, world_size
        self._store, self._silence_s = store, silence_s
        self._round = 0

    @classmethod
    def of_this_job(cls) -> SharedWork | None:
        """The work of the job that `torchrun` started this process in; None for a process by itself.

        All ranks call it equally often.
        """
        if int(os.environ.get("WORLD_SIZE", "1")) == 1:
            return None
        # not the variables' store as it is: what an earlier start of this job left there would count
        store, rank, world_size = connect(timeout_s=_JOIN_S)
        return cls(distributed.PrefixStore(f"mmlab/{next(_job_number)}", store), rank, world_size)

    def blocks(self, num_blocks: int) -> Iterator[int]:
        """Numbers below `num_blocks` that fall to this rank: those of its own stretch, then what others have left."""
        for distance in range(self.world_size):
            owner = (self.rank + distance) % self.world_size
            first, end = (num_blocks * (owner + step) // self.world_size for step in (0, 1))
            while (number := first + self._store.add(f"taken/{owner}", 1) - 1) < end:
                yield number

    def count(self, number: int) -> int:
        """Add to what has been done; returns the sum over all ranks."""
        return self._store.add("done", number)

    def fail(self, error: BaseException) -> None:
        """Let the other ranks know that this one gives up, and why."""
        self._store.set(f"failed/{self.rank}", f"{type(error).__name__}: {error}")

    def gather(self, outcome: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        """What every rank gave, which must be fit for JSON, by rank; waits for all. May be called again.

        Raises:
            RunError: a rank has given up, or has told nothing for `silence_s`.
        """
        self._round += 1
        self._store.set(f"{self._round}/{self.rank}", json.dumps(outcome))
        self._wait()
        found = [json.loads(self._store.get(f"{self._round}/{rank}")) for rank in range(self.world_size)]
        self._leave()
        return found

    def _wait(self) -> None:
        """Until all ranks have come to this round."""
        heard_s, num_done, missing = time.monotonic(), -1, list(range(self.world_size))
        while missing := [rank for rank in missing if not self._store.check([f"{self._round}/{rank}"])]:
            for rank in missing:
                if self._store.check([f"failed/{rank}"]):
                    reason = self._store.get(f"failed/{rank}").decode()
                    raise RunError(f"rank {rank} has given up its part: {reason}")
            if (now_done := self.count(0)) != num_done:
                heard_s, num_done = time.monotonic(), now_done
            if time.monotonic() - heard_s > self._silence_s:
                names = ", ".join(str(rank) for rank in missing)
                raise RunError(
                    f"rank {names} has told nothing for {self._silence_s:g} s; start the job again: what is done is "
                    "kept"
                )
            time.sleep(_LOOK_EVERY_S)

    def _leave(self) -> None:
        """Rank 0 goes last: where no `torchrun` keeps the store, it is in that process."""
        key, until_s = f"{self._round}/left", time.monotonic() + _LEAVE_S
        num_left = self._store.add(key, 1)
        while self.rank == 0 and num_left < self.world_size and time.monotonic() < until_s:
            time.sleep(_LOOK_EVERY_S)
            num_left = self._store.add(key, 0)
