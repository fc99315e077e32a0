"""Joining the ranks of a launch of `torchrun`, and knowing that launch again: a run that it starts again goes on.

`torchrun --max-restarts` starts all ranks again with the same command line, `--resume never` or none included. What
tells that from a new launch is a small file in the run's folder, written when the run begins: by which launch. A rank
cannot go by its own count of restarts, because only the agents of failed ranks count one.

For the same reason, and because agents keep their store from one start to the next, ranks first make sure that they
talk to each other and not to what an earlier start left there (`meet`). torch's own `init_process_group` was seen to
hang there, with two agents of which one had counted a restart (torch 2.15).
"""

from __future__ import annotations

import json
import os
import time
import uuid
from datetime import timedelta
from pathlib import Path

from torch import distributed

from mmlab.errors import RunError
from mmlab.machine import describe_process, replace_file
from mmlab.parallel.torch_internals import default_store

LAUNCH = "launch.json"
_POLL_S, _LONGEST_POLL_S = 0.02, 0.5


def join(backend: str, *, timeout_s: float) -> None:
    """`init_process_group` for the ranks that this launch has started now, from the variables that `torchrun` sets.

    Args:
        timeout_s: to find each other, and of each exchange.

    Raises:
        RunError: a rank did not come.
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
    fresh = distributed.PrefixStore(meet(store, rank, world_size, timeout_s=timeout_s), store)
    distributed.init_process_group(backend, store=fresh, rank=rank, world_size=world_size, timeout=timeout)


def meet(store: distributed.Store, rank: int, world_size: int, *, timeout_s: float) -> str:
    """A name that all ranks of this start agree on, whatever earlier ones left in the store.

    Every rank says a new word. Rank 0 waits until all others have repeated its word, then says all words; the others
    wait until theirs is among them.

    Raises:
        RunError: not all have come in time.
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
    """Whether `torchrun` has started any rank of this launch again; asks all ranks where there are several."""
    count = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if not distributed.is_initialized():
        return int(count) > 0
    store = default_store()
    keys = [f"mmlab/restarts/{rank}" for rank in range(distributed.get_world_size())]
    store.set(keys[distributed.get_rank()], count)
    return any(int(told) > 0 for told in store.multi_get(keys))  # waits until all have said


def begun_by_this_launch(path: Path, *, restarted: bool) -> bool:
    """Whether the run that lies here was begun by this launch, before it was started again.

    The agent that started this process tells, or, on a machine where another agent has taken over, the launch's id.

    Args:
        path: what `note_launch` wrote.
        restarted: whether a rank was started again.
    """
    own = _this_launch()
    if own is None or not path.exists():
        return False
    begun = json.loads(path.read_text())
    return begun == own or (restarted and begun["run_id"] == own["run_id"])


def note_launch(path: Path) -> None:
    """Write down by which launch the run is trained; nothing where it is no `torchrun`'s."""
    own = _this_launch()
    if own is not None:
        replace_file(path, json.dumps(own))


def _this_launch() -> dict[str, object] | None:
    """Id of the launch, and the agent that started this process; None without `torchrun`."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    return {"run_id": os.environ["TORCHELASTIC_RUN_ID"], **describe_process(os.getppid())}
