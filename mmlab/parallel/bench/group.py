"""A process group of all ranks for one turn, and none between turns."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import distributed
from torch.distributed import PrefixStore


class Groups:
    """Makes one group after the other over the store that the launcher keeps; every rank makes as many."""

    def __init__(self, backend: str) -> None:
        self.backend = backend
        self.store, self.rank, self.num_ranks = next(distributed.rendezvous("env://"))
        self._number = 0

    @contextmanager
    def joined(self) -> Iterator[None]:
        """The default group, inside the context; entering waits for all ranks."""
        self._number += 1  # keys of an earlier group lead to ports that are closed
        distributed.init_process_group(
            self.backend,
            store=PrefixStore(f"group {self._number}", self.store),
            rank=self.rank,
            world_size=self.num_ranks,
        )
        try:
            yield
        except Exception as error:
            self.tell(error)  # before the others see this rank go
            raise
        finally:
            distributed.destroy_process_group()

    def tell(self, error: Exception) -> str:
        """Keep what went wrong, unless something did before; returns the first."""
        message = f"rank {self.rank} of {self.num_ranks} failed: {type(error).__name__}: {error}"
        return self.store.compare_set("first failure", "", message).decode()
