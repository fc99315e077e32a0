"""The helper that starts ranks for tests: failures are told, and no process is left behind."""

from __future__ import annotations

import os
import signal
import time

import psutil
import pytest
from torch import distributed

from tests.ranks import run_ranks, started_ranks


def summed() -> tuple[int, int]:
    found: list[int] = [0] * distributed.get_world_size()
    distributed.all_gather_object(found, distributed.get_rank())
    return distributed.get_rank(), sum(found)


def fails_on_rank_1() -> None:
    assert distributed.get_rank() != 1, "no such luck"
    time.sleep(3600)


def sleeps_for_ever() -> None:
    time.sleep(3600)


def sigint() -> bool:
    return signal.getsignal(signal.SIGINT) is signal.default_int_handler


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_ranks_have_a_group_and_return_what_they_found() -> None:
    assert run_ranks(summed, 3) == [(0, 3), (1, 3), (2, 3)]


def test_a_failure_is_told_with_its_rank_and_all_are_killed() -> None:
    with started_ranks(fails_on_rank_1, 2) as ranks:
        with pytest.raises(AssertionError, match=r"rank 1: [\s\S]*no such luck"):
            ranks.results()
        left = [process.pid for process in ranks.processes]
    assert not any(psutil.pid_exists(pid) for pid in left)


def test_a_rank_that_hangs_or_is_killed_fails_the_test_in_time() -> None:
    with pytest.raises(AssertionError, match=r"rank 0: was not ready in time\nrank 1: was not ready"):
        run_ranks(sleeps_for_ever, 2, timeout_s=0.5)
    with pytest.raises(AssertionError, match="rank 0: ended with code -9"):
        run_ranks(killed, 1, joins=False)


def test_ranks_can_be_interrupted_where_the_tests_ignore_it() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        assert run_ranks(sigint, 1, joins=False) == [True]
    finally:
        signal.signal(signal.SIGINT, before)
