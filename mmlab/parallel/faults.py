"""When a rank ends or hangs, the other ranks name it and its step.

Every rank writes its progress to the process group's store, about once a second and from a thread
(`RankWatch`). When an exchange between ranks breaks off, or has lasted longer than `timeout_s`, the remaining
ranks read there which rank is missing:

- a rank that failed left its error as its last words;
- one that was killed or stopped, or whose machine is cut off, no longer writes;
- one that writes but has entered fewer exchanges than another is stuck.

A broken exchange raises an error in the training loop. Python cannot leave one that never ends, so then the
thread writes the events and ends the process; `torchrun` notices and starts all ranks again, if restarts are
left. This does not rely on the backend: NCCL's own timeout ends a process without naming a rank, and
`monitored_barrier` is for gloo alone.

Costs: an assignment at about ten points of a step, and a small message a second. Cannot tell a slow network from one
that is cut, nor which rank is late inside a reduction that all ranks have entered.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, ClassVar, NamedTuple

from torch import distributed

from mmlab.errors import MmlabError, RunError, first_line
from mmlab.parallel.torch_internals import default_store
from mmlab.training.strategy import SAVES, STARTS, STEP, WAITS

TIMEOUT_S = 600.0  # that a rank may keep the others waiting
_BEAT_S = 1.0
_MAX_WORDS = 600  # characters of an error that the others read
_BROKEN = ("gloo", "NCCL", "Connection", "peer", "Socket")  # in the text of an exchange's error
_REMEDY = "start again with --resume auto, which goes on from the last checkpoint"


class _Sign(NamedTuple):
    """What a rank writes about itself."""

    beat: int = 0  # how often it wrote
    step: int = 0  # optimizer steps done
    doing: str = STARTS
    num_exchanges: int = 0  # entered so far
    process: str = "not yet started"
    words: str | None = None  # its error, once it has ended; empty if it ended well
    failed_ranks: tuple[int, ...] = ()  # ranks because of which it ended


class RankWatch:
    """Tells other ranks how far this one is, and finds out which rank keeps it waiting; a context manager.

    Every rank uses it while there is a process group. If the block raises, the others can read the error. If
    this rank hangs in an exchange, the process ends with exit code 1, because no exception reaches it there;
    the events file states the reason.

    Args:
        write: `RunLog.write`, or anything that takes a kind of event, a step and values, from any thread.
        timeout_s: how long, in seconds, a rank may keep the others waiting.
    """

    # of this process, inside its context; one, like the process group
    current: ClassVar[RankWatch | None] = None

    def __init__(self, write: Callable[..., object], *, timeout_s: float) -> None:
        self._write, self.timeout_s = write, timeout_s
        self.rank, self.world_size = distributed.get_rank(), distributed.get_world_size()
        self._store = distributed.PrefixStore("mmlab/ranks", default_store())  # a key for each rank
        self._beat_s = min(_BEAT_S, timeout_s / 5)
        self._here = (0, STARTS, time.monotonic())  # step, doing, since when: replaced as a whole
        self._own = _Sign(process=f"process {os.getpid()} on {platform.node()}")
        self._num_exchanges = 0
        self._is_explaining = False
        self._lock, self._stop = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="mmlab-rank-watch", daemon=True)

    def __enter__(self) -> RankWatch:
        RankWatch.current = self
        self._beat()
        self._thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        RankWatch.current = None
        self._stop.set()
        self._thread.join(timeout=10)
        if error is not None or not self._own.words:
            self._beat(words="" if error is None else _words(error))

    def note(self, step: int, doing: str) -> None:
        """Record the number of steps that this rank has done and what it does now."""
        self._here = (step, doing, time.monotonic())

    @contextmanager
    def exchange(self) -> Iterator[None]:
        """The context to run a collective in.

        Raises:
            RunError: it failed; the message names the rank at fault.
        """
        before = self._here
        self._num_exchanges += 1
        self._here = (before[0], WAITS, time.monotonic())
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, MmlabError):
                raise
            raise self.explained(error) from error
        finally:
            self._here = before

    def explained(self, error: Exception) -> RunError:
        """The error that names the rank because of which an exchange broke off; takes some seconds.

        The lowest rank that is not at fault also writes it to its events file, as a `warning`.
        """
        self._is_explaining = True
        failed_ranks, message = self._blame(f"the exchange between ranks broke off ({first_line(error)})")
        self._tell(failed_ranks, message)
        return RunError(message)

    def _run(self) -> None:
        while not self._stop.wait(self._beat_s):
            self._beat()
            _, doing, since_s = self._here
            waits = doing in (WAITS, STEP, SAVES) and time.monotonic() - since_s > self.timeout_s
            if waits and not self._is_explaining:
                self._end(*self._blame(f"no progress for longer than timeout_s = {self.timeout_s:g}"))

    def _end(self, failed_ranks: tuple[int, ...], message: str) -> None:
        """End this process, whose training loop hangs in an exchange that Python cannot leave."""
        step = self._here[0]
        self._tell(failed_ranks, message)
        with suppress(Exception):
            self._write("end", step, status="failed", num_steps=step, message=message)
        print(f"mmlab: failed: RunError: {message}", file=sys.stderr, flush=True)
        os._exit(1)

    def _tell(self, failed_ranks: tuple[int, ...], message: str) -> None:
        self._beat(words=_words(RunError(message)), failed_ranks=failed_ranks)
        left = [rank for rank in range(self.world_size) if rank not in failed_ranks]
        if left[:1] == [self.rank]:
            with suppress(Exception):  # the error says the same
                self._write("warning", self._here[0], message=message, source="ranks")

    def _blame(self, what: str) -> tuple[tuple[int, ...], str]:
        """The ranks at fault (failed, else silent, else late) and a message; takes a few beats."""
        try:
            signs, silent = self._observe()
        except RuntimeError as lost:
            what = f"{what}, and the process that connects the ranks does not answer ({first_line(lost)})"
            return (), f"{what}; {_REMEDY}"
        for rank, sign in signs.items():
            if sign.words and sign.failed_ranks:  # it ended because of another rank, which it names
                return tuple(sign.failed_ranks), sign.words.partition(": ")[2]
            if sign.words:
                return (rank,), f"{_place(rank, sign)} and ended with an error of its own: {sign.words}"
        if silent:
            names = [f"rank {rank} ({sign.process}, last seen {sign.doing})" for rank, sign in silent.items()]
            return tuple(silent), (
                f"{', '.join(names)} gives no sign of life since step {self._here[0]}: killed, stopped or cut off; "
                f"look at its last lines and the system's log (out of memory?), and {_REMEDY}"
            )
        # this rank may itself be late: its own step, too, has lasted longer than the limit
        signs = dict(sorted({**signs, self.rank: self._own}.items()))
        most = max(sign.num_exchanges for sign in signs.values())
        late = {rank: sign for rank, sign in signs.items() if sign.num_exchanges < most}
        where = "; ".join(_place(rank, sign) for rank, sign in (late or signs).items())
        if late:
            return tuple(late), (
                f"{what}: {where}; it is alive but keeps the others waiting; see where it hangs (py-spy dump), or raise "
                f"[parallel] timeout_s if it works so long, and {_REMEDY}"
            )
        what = f"{what} although every rank is alive ({where})"
        return (), f"{what}: look at the network between them, and {_REMEDY}"

    def _observe(self) -> tuple[dict[int, _Sign], dict[int, _Sign]]:
        """The last signs of the other ranks, and of those that stay silent until one has failed or some beats are over."""
        first = signs = silent = self._signs()
        deadline_s = time.monotonic() + 3 * self._beat_s + 1
        while silent and not any(sign.words for sign in signs.values()) and time.monotonic() < deadline_s:
            time.sleep(self._beat_s / 10)
            self._beat()  # another rank may be looking for silent ranks, too
            signs = self._signs()
            silent = {rank: sign for rank, sign in signs.items() if sign.beat == first[rank].beat}
        return signs, silent

    def _signs(self) -> dict[int, _Sign]:
        """The last sign of every other rank."""
        found = {}
        for rank in range(self.world_size):
            if rank != self.rank:
                # reading a key that is not there would wait for it
                there = self._store.check([str(rank)])
                found[rank] = _Sign(*json.loads(self._store.get(str(rank)))) if there else _Sign()
        return found

    def _beat(self, words: str | None = None, failed_ranks: tuple[int, ...] = ()) -> None:
        """Write this rank's sign; last words, once set, stay."""
        with self._lock, suppress(RuntimeError):  # the store ends with its process
            step, doing, _ = self._here
            changes: dict[str, Any] = {} if words is None else {"words": words, "failed_ranks": failed_ranks}
            changes |= {"beat": self._own.beat + 1, "num_exchanges": self._num_exchanges}
            self._own = self._own._replace(step=step, doing=doing, **changes)
            self._store.set(str(self.rank), json.dumps(self._own))


def broke_off(error: BaseException) -> bool:
    """Whether an error may come from a broken exchange between ranks, including torch's own exchanges."""
    return isinstance(error, distributed.DistError) or (
        isinstance(error, RuntimeError)
        and not isinstance(error, MmlabError)
        and any(word in str(error) for word in _BROKEN)
    )


def _place(rank: int, sign: _Sign) -> str:
    return f"rank {rank} ({sign.process}) was {sign.doing} in step {sign.step}"


def _words(problem: BaseException) -> str:
    return f"{type(problem).__name__}: {problem}"[:_MAX_WORDS]
