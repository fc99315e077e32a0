"""Which launch of `torchrun` this process belongs to: started again by it, a run goes on and never begins anew.

`torchrun --max-restarts` starts all ranks again with the same command line, `--resume never` or none included. What
tells that from a new launch is a small file in the run's folder, written when the run begins: by which launch. A rank
cannot go by its own count of restarts, because only the agents of failed ranks count one.
"""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path

from torch import distributed

from mmlab.control import replace_file

LAUNCH = "launch.json"


def was_restarted() -> bool:
    """Whether `torchrun` has started any rank of this launch again; asks all ranks where there are several."""
    count = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if not distributed.is_initialized():
        return int(count) > 0
    store = distributed.distributed_c10d._get_default_store().clone()
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
    import psutil

    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    agent = psutil.Process(os.getppid())
    return {
        "run_id": os.environ["TORCHELASTIC_RUN_ID"],
        "host_name": platform.node(),
        "agent_id": agent.pid,
        "agent_since_s": round(agent.create_time()),
    }
