"""A rank that ends or hangs is named by the others, in bounded time.

Every rank tells the process group's store how far it is, about once a second, from a thread of its own (`RankWatch`).
Whoever waits for the others in an exchange, or finds it broken off, looks there who is missing:

- a rank that ended says why with its last words: an error of its own, a sample that does not fit into memory;
- one that was killed or stopped, or whose machine is cut off, does not say anything any more;
- one that says something but comes no further is stuck.

A broken exchange is an error in the training loop. One that never ends cannot be left in Python: then the thread writes
the events and ends the process, so that `torchrun` sees it and starts all ranks again, where it may.

Costs: an assignment at each of some ten points of a step, and one small message a second. Does not: tell a slow network
from one that is cut, nor who is late inside a gradient exchange that all ranks have begun.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass

from torch import distributed

from mmlab.errors import MmlabError, OptionError, RunError

TIMEOUT_S = 600.0  # that a rank may keep the others waiting, while it lives
SILENT_S = 20.0  # after which a rank that says nothing is given up, in the midst of steps
START_S = 600.0  # the least of both before the first step is done: data are read, kernels compiled
# what a rank may be doing, as the others are told
STARTS, DATA, STEP, WAITS = "starting", "waiting for data", "computing", "waiting for the others"
EVALUATES, SAVES = "evaluating", "saving a checkpoint"
_BEAT_S = 1.0
_LOOK_S = 0.1  # between two looks at the others once something is known to be wrong
_WORDS = 600  # characters of an error that the others are told
_BROKEN = ("gloo", "NCCL", "Connection", "peer", "Socket")  # in the text of an exchange's error
_REMEDY = "start again with --resume auto, which goes on from the last checkpoint"

Write = Callable[..., object]  # `RunLog.write`: kind, step, **values


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sign:
    """What a rank says of itself."""

    beat: int  # signs of life so far
    step: int  # optimizer steps done
    first_step: int  # the same when it began
    doing: str
    num_exchanges: int  # entered so far
    process: str
    words: str | None = None  # its last, once it has ended; empty if it ended well
    guilty: tuple[int, ...] = ()  # ranks that it ended because of


_NOTHING = _Sign(beat=0, step=0, first_step=0, doing=STARTS, num_exchanges=0, process="not yet heard of")
_Seen = dict[int, tuple[_Sign, float]]  # by rank: its last new sign, and when that came
_Blame = tuple[tuple[int, ...], str]  # ranks, and a message


class RankWatch:
    """Tells the other ranks how far this one is, and finds out who keeps it waiting; a context manager.

    Use it while a process group is there, on every rank. What an exception in its block says is told to the others.
    One that hangs in an exchange while another rank is silent or stuck ends its process with exit code 1, because no
    exception reaches it there; the events file has the reason.

    Args:
        write: `RunLog.write`, or anything that takes a kind of event, a step and values, from any thread.
        timeout_s: that a rank which lives may keep the others waiting, in seconds. One that gives no sign of life in
            the midst of steps is given up after 20 s, or this if it is less. Until the first step is done neither is
            less than 600 s.

    Raises:
        OptionError: `timeout_s` is not above 0.
    """

    def __init__(self, write: Write | None = None, *, timeout_s: float = TIMEOUT_S) -> None:
        if not timeout_s > 0:
            raise OptionError(f"[parallel] timeout_s must be above 0, found {timeout_s}")
        self.timeout_s = timeout_s
        self.rank, self.world_size = distributed.get_rank(), distributed.get_world_size()
        self._write = write or (lambda kind, step, **values: None)
        self._process = f"process {os.getpid()} on {platform.node()}"
        # a connection of its own: the group's is held while it waits for a key
        self._store = distributed.distributed_c10d._get_default_store().clone()
        self._beat_s = min(_BEAT_S, timeout_s / 5)
        self._here = (0, STARTS, time.monotonic())  # step, doing, since when: replaced in one piece
        self._first_step: int | None = None
        self._num_exchanges = self._beat = 0
        self._is_explaining = False
        self._seen: _Seen = {}  # the thread's own
        self._words: str | None = None
        self._guilty: tuple[int, ...] = ()
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="mmlab-rank-watch", daemon=True)

    def __enter__(self) -> RankWatch:
        global _watch
        _watch = self
        self._say()
        self._thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        global _watch
        _watch = None
        self._stop.set()
        self._thread.join(timeout=10)
        if error is not None:
            self.say(error)
        elif not self._words:
            self._words = ""
            with suppress(RuntimeError):  # the store may be gone with its process
                self._say()

    def note(self, step: int, doing: str) -> None:
        """This rank has done so many steps and now does something."""
        if self._first_step is None:
            self._first_step = step
        self._here = (step, doing, time.monotonic())

    @contextmanager
    def exchange(self) -> Iterator[None]:
        """Around a collective: whoever comes late or not at all is to blame if it fails.

        Raises:
            RunError: it failed; the rank is named.
        """
        step, doing, since_s = self._here
        self._num_exchanges += 1
        self._here = (step, WAITS, time.monotonic())
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, MmlabError):
                raise
            raise self.explained(error) from error
        finally:
            self._here = (step, doing, since_s)

    def say(self, problem: BaseException) -> None:
        """Tell the others what went wrong here, before they know that something did."""
        self._words = f"{type(problem).__name__}: {problem}"[:_WORDS]
        with suppress(RuntimeError):  # the store may be gone with its process
            self._say()

    def words_of(self, rank: int) -> str:
        """What a rank said went wrong; empty where it said nothing."""
        with suppress(RuntimeError):
            return self._signs([rank])[rank].words or ""
        return ""

    def explained(self, error: Exception) -> RunError:
        """The error that names the rank because of which an exchange broke off; takes some seconds, for the silent.

        It is written into the events file too, as a `warning`, by the lowest rank that is left.
        """
        self._is_explaining = True
        try:
            guilty, message = self._blame(patience_s=3 * self._beat_s + 1)
        except RuntimeError as lost:
            guilty, message = (), f"the process that connects the ranks answers no more ({_first_line(lost)})"
        finally:
            self._is_explaining = False
        if not guilty:
            message += f": {_first_line(error)}; look at the network between the machines, and {_REMEDY}"
        self._tell(guilty, message)
        return RunError(message)

    # --- what the thread does

    def _run(self) -> None:
        while not self._stop.wait(self._beat_s):
            self._say_and_look()

    def _say_and_look(self) -> None:
        try:
            self._say()
            if self._is_explaining or self._waits_s() < 2 * self._beat_s:
                self._seen = {}
                return
            found = self._verdict()
        except RuntimeError as error:  # the store is gone, with its process
            if self._stop.is_set() or self._is_explaining or self._waits_s() < self.timeout_s:
                return
            found = (
                (),
                f"the process that connects the ranks answers no more: {_first_line(error)}; {_REMEDY}",
            )
        if found is not None:
            self._end(*found)

    def _verdict(self) -> _Blame | None:
        """Who keeps this rank waiting for too long, and the message; None while all is well."""
        (step, doing, _), waits_s, now_s = self._here, self._waits_s(), time.monotonic()
        silent, late = {}, {}
        for rank, (sign, since_s) in self._look(self._seen).items():
            if sign.words and waits_s >= min(
                self.timeout_s, SILENT_S
            ):  # else the exchange breaks off by itself
                return _of_words(rank, sign)
            if sign.words is None and now_s - since_s >= self._limit_s(sign):
                silent[rank] = sign
            elif sign.num_exchanges < self._num_exchanges:
                late[rank] = sign
        if silent:
            return _of_silent(silent, step)
        has_begun = self._first_step is not None and step > self._first_step
        if doing != WAITS or waits_s < (self.timeout_s if has_begun else max(self.timeout_s, START_S)):
            return None
        gone = {rank: sign for rank, sign in late.items() if now_s - self._seen[rank][1] >= 3 * self._beat_s}
        if gone:  # with a timeout as short as that for silence
            return _of_silent(gone, step)
        for_s = f"for {waits_s:.0f} s, longer than [parallel] timeout_s = {self.timeout_s:g}"
        if not late:
            return (), (
                f"all ranks have been in one exchange of step {step} {for_s}: the network between them hangs; look at "
                f"it, and {_REMEDY}"
            )
        return tuple(late), (
            f"{_places(late)}; it lives and has kept rank {self.rank} waiting {for_s}; see where it hangs "
            f"(py-spy dump), or raise timeout_s if it works so long, and {_REMEDY}"
        )

    def _end(self, guilty: tuple[int, ...], message: str) -> None:
        """End this process, whose training loop hangs in an exchange that Python cannot leave."""
        step = self._here[0]
        self._tell(guilty, message)
        with suppress(Exception):
            self._write("end", step, status="failed", num_steps=step, message=message)
        self.say(RunError(message))
        print(f"mmlab: failed: RunError: {message}", file=sys.stderr, flush=True)
        os._exit(1)

    def _tell(self, guilty: tuple[int, ...], message: str) -> None:
        self._guilty = guilty
        left = [rank for rank in range(self.world_size) if rank not in guilty]
        if left[:1] == [self.rank]:
            with suppress(Exception):  # the error says the same
                self._write("warning", self._here[0], message=message, source="ranks")

    # --- finding out

    def _blame(self, *, patience_s: float) -> _Blame:
        """Ranks that ended or are silent, and a message; waits so long for a sign of life of every other."""
        seen: _Seen = {}
        first = {rank: sign for rank, (sign, _) in self._look(seen).items()}
        deadline_s = time.monotonic() + patience_s
        while True:
            signs = {rank: sign for rank, (sign, _) in self._look(seen).items()}
            for rank, sign in signs.items():
                if sign.words:
                    return _of_words(rank, sign)
            silent = {rank: sign for rank, sign in signs.items() if sign.beat == first[rank].beat}
            if silent and time.monotonic() >= deadline_s:
                return _of_silent(silent, self._here[0])
            if not silent:
                return (), f"the exchange between ranks broke off though every rank lives: {_places(signs)}"
            time.sleep(_LOOK_S)

    def _waits_s(self) -> float:
        """How long this rank has been in an exchange, or in a step that may have one inside."""
        _, doing, since_s = self._here
        return time.monotonic() - since_s if doing in (WAITS, STEP) else 0.0

    def _limit_s(self, sign: _Sign) -> float:
        """How long a rank may be silent: while it starts or saves, one call may hold up all its threads."""
        if sign.step == sign.first_step:
            return max(self.timeout_s, START_S)
        return min(self.timeout_s, SILENT_S) if sign.doing in (WAITS, STEP, DATA) else self.timeout_s

    # --- the store

    def _look(self, seen: _Seen) -> _Seen:
        """The last sign of every other rank, and when it was new to this one."""
        others = [rank for rank in range(self.world_size) if rank != self.rank]
        for rank, sign in self._signs(others).items():
            if rank not in seen or seen[rank][0].beat != sign.beat:
                seen[rank] = (sign, time.monotonic())
        return seen

    def _signs(self, ranks: Sequence[int]) -> dict[int, _Sign]:
        there = ranks
        if not self._store.check(
            [_key(rank) for rank in ranks]
        ):  # to read what is not there would wait for it
            there = [rank for rank in ranks if self._store.check([_key(rank)])]
        texts = self._store.multi_get([_key(rank) for rank in there]) if there else []
        found = {rank: _Sign(**json.loads(text)) for rank, text in zip(there, texts, strict=True)}
        return {rank: found.get(rank, _NOTHING) for rank in ranks}

    def _say(self) -> None:
        with self._lock:
            self._beat += 1
            step, doing, _ = self._here
            sign = _Sign(
                beat=self._beat,
                step=step,
                first_step=step if self._first_step is None else self._first_step,
                doing=doing,
                num_exchanges=self._num_exchanges,
                process=self._process,
                words=self._words,
                guilty=self._guilty,
            )
            self._store.set(_key(self.rank), json.dumps(asdict(sign)))


_watch: RankWatch | None = None  # of this process, as the process group is


def current_watch() -> RankWatch | None:
    """The watch that is on in this process."""
    return _watch


def broke_off(error: BaseException) -> bool:
    """Whether an error may be that of an exchange between ranks, of torch's own too."""
    return isinstance(error, distributed.DistError) or (
        isinstance(error, RuntimeError)
        and not isinstance(error, MmlabError)
        and any(word in str(error) for word in _BROKEN)
    )


def _of_words(rank: int, sign: _Sign) -> _Blame:
    words = str(sign.words)
    if sign.guilty:  # it ended because of another, and says of which
        return tuple(sign.guilty), words.partition(": ")[2]
    return (rank,), f"{_places({rank: sign})} and ended with an error of its own: {words}"


def _of_silent(signs: Mapping[int, _Sign], step: int) -> _Blame:
    no_more = ", ".join(
        f"rank {rank} ({sign.process}, last heard of {sign.doing})" for rank, sign in signs.items()
    )
    return tuple(signs), (
        f"{no_more} gives no sign of life since step {step}: killed, stopped or cut off; look at its last lines and "
        f"the system's log (out of memory?), and {_REMEDY}"
    )


def _places(signs: Mapping[int, _Sign]) -> str:
    return "; ".join(
        f"rank {rank} ({sign.process}) was {sign.doing} in step {sign.step}" for rank, sign in signs.items()
    )


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


def _key(rank: int) -> str:
    return f"mmlab/ranks/{rank}"
