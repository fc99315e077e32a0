"""Join the ranks of a `torchrun` launch, and recognise the launch after a restart, so that the run resumes.

`torchrun --max-restarts` starts all ranks again with the same command line, even if it has `--resume never`
or no `--resume`. A small file in the run's folder, written when the run begins, names the launch and so tells
a restart from a new launch. A rank cannot rely on its own count of restarts, because only the agents of
failed ranks count one.

For the same reason, and because agents keep their store across restarts, ranks first make sure that they talk
to each other and do not read what an earlier start left in the store (`meet`). torch's own
`init_process_group` was seen to hang in this case, with two agents of which one had counted a restart (torch
2.15).
"""

from __future__ import annotations

import json
import os
import signal
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed

from mmlab.errors import RunError
from mmlab.machine import describe_process, place_in_launch, replace_file, resolve_device, signals_held
from mmlab.parallel.faults import TIMEOUT_S
from mmlab.parallel.process_group import ProcessGroup
from mmlab.parallel.torch_internals import default_store

LAUNCH = "launch.json"
_POLL_S, _LONGEST_POLL_S = 0.02, 0.5


@contextmanager
def joined(device: str | None, timeout_s: float) -> Iterator[tuple[int, int, str]]:
    """Rank, number of ranks, and this rank's device; under `torchrun`, joins the process group.

    Args:
        device: as asked for; with a GPU for each rank, "cuda" becomes this rank's.
        timeout_s: for ranks to wait for each other.
    """
    device = resolve_device(device or "auto")
    if device == "cuda" and "LOCAL_RANK" in os.environ:
        device = resolve_device(f"cuda:{os.environ['LOCAL_RANK']}")
        torch.cuda.set_device(device)
    joins = place_in_launch()[1] > 1 and not distributed.is_initialized()
    if joins:
        longest_s = max(timeout_s, TIMEOUT_S) + 60  # the last resort, behind `RankWatch`
        join("nccl" if device.startswith("cuda") else "gloo", timeout_s=longest_s)
    try:
        group = ProcessGroup()
        yield group.rank, group.world_size, device
    finally:
        if joins:
            distributed.destroy_process_group()


def join(backend: str, *, timeout_s: float) -> None:
    """`init_process_group` for the ranks of the current start, from the variables that `torchrun` sets.

    Args:
        timeout_s: limit for the ranks to find each other, and for each exchange.

    Raises:
        RunError: a rank did not join in time.
    """
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    timeout = timedelta(seconds=timeout_s)
    store = distributed.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        world_size,
        is_master=rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True",
        timeout=timeout,
        wait_for_workers=False,
        multi_tenant=True,
    )
    own = distributed.PrefixStore(meet(store, rank, world_size, timeout_s=timeout_s), store)
    # an interrupt ends this rank at once: torch's code would go on waiting for one that the same interrupt has ended
    with signals_held(signal.SIGINT, signal.SIGTERM, handler=signal.SIG_DFL):
        distributed.init_process_group(backend, store=own, rank=rank, world_size=world_size, timeout=timeout)


def meet(store: distributed.Store, rank: int, world_size: int, *, timeout_s: float) -> str:
    """A name that all ranks of this start agree on, whatever earlier starts left in the store.

    Every rank makes a new random word. Rank 0 stores its word, waits until all other ranks have stored that
    word beside their own, and then stores all words; the others wait until theirs is among them.

    Raises:
        RunError: not all ranks joined in time.
    """
    word, deadline_s, poll_s = uuid.uuid4().hex, time.monotonic() + timeout_s, _POLL_S
    if rank == 0:
        store.set("mmlab/first", word)
    while time.monotonic() < deadline_s:
        if rank:
            first = store.get("mmlab/first").decode()
            store.set(f"mmlab/word/{rank}", f"{first} {word}")
            if store.check(["mmlab/all"]) and word in (said := store.get("mmlab/all").decode().split()):
                return said[0]
        else:
            keys = [f"mmlab/word/{other}" for other in range(1, world_size)]
            pairs = [text.decode().split() for text in store.multi_get(keys)] if store.check(keys) else []
            if len(pairs) == len(keys) and all(first == word for first, _ in pairs):
                store.set("mmlab/all", " ".join([word, *(own for _, own in pairs)]))
                return word
        time.sleep(poll_s)
        poll_s = min(_LONGEST_POLL_S, 1.3 * poll_s)
    raise RunError(
        f"rank {rank} waited {timeout_s:.0f} s for the other {world_size - 1}; see whether all of them were started"
    )


def was_restarted() -> bool:
    """Whether `torchrun` has restarted any rank of this launch; asks all ranks if there are several."""
    count = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if not distributed.is_initialized():
        return int(count) > 0
    store = default_store()
    keys = [f"mmlab/restarts/{rank}" for rank in range(distributed.get_world_size())]
    store.set(keys[distributed.get_rank()], count)
    return any(int(told) > 0 for told in store.multi_get(keys))  # waits until all ranks have set theirs


def begun_by_this_launch(path: Path, *, restarted: bool) -> bool:
    """Whether this launch, before a restart, began the run in this folder.

    The launch's id and the agent that started this process must both match; after a restart, when another
    agent may have taken over, the id is enough.

    Args:
        path: the file that `note_launch` wrote.
        restarted: whether a rank was restarted.
    """
    own = _this_launch()
    if own is None or not path.exists():
        return False
    begun = json.loads(path.read_text())
    return begun == own or (restarted and begun["run_id"] == own["run_id"])


def note_launch(path: Path) -> None:
    """Record which launch trains the run; does nothing without `torchrun`."""
    own = _this_launch()
    if own is not None:
        replace_file(path, json.dumps(own))


def _this_launch() -> dict[str, object] | None:
    """Id of the launch, and the agent that started this process; None without `torchrun`."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    return {"run_id": os.environ["TORCHELASTIC_RUN_ID"], **describe_process(os.getppid())}
