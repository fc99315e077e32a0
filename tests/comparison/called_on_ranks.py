"""What ranks of tests do; they import little for it."""

from __future__ import annotations

import os
import signal
import sys
import time

import torch
from torch import distributed

from mmlab.errors import DataError


def summed(number: int) -> tuple[int, float]:
    """What a rank adds, and what all of them have."""
    distributed.init_process_group("gloo")
    rank = distributed.get_rank()
    total = torch.tensor(float(number + rank))
    distributed.all_reduce(total)
    distributed.destroy_process_group()
    print(f"rank {rank} was here")
    return rank, total.item()


def fails_on(rank: int, how: str) -> None:
    """One rank fails, the others wait for ever."""
    if int(os.environ["RANK"]) == rank:
        if how == "killed":
            print("my last words", file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        raise DataError("row 7 has no image") if how == "data" else KeyError("seven")
    time.sleep(600)
