"""Facts about this machine and this process that need neither torch nor any library beyond the standard one."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

from mmlab import __version__

_CPUINFO = Path("/proc/cpuinfo")
_MEMORY_LIMITS = (  # of a container: control groups of version 2 and 1
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)
_MEMORY_USED = ("memory.current", "memory.usage_in_bytes")  # beside each of them
GIB = 2**30
SHOWN_LIBRARIES = ("torch", "torchvision", "transformers", "tokenizers", "numpy", "pandas", "pillow", "numba")


def num_usable_cores() -> int:
    """CPU cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def total_memory_bytes() -> int:
    """Memory that this process may use: the machine's, or its container's limit where that is lower."""
    total_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = [path.read_text().strip() for path in _MEMORY_LIMITS if path.exists()]
    return min([total_bytes, *(int(limit) for limit in limits if limit != "max")])


def available_memory_bytes() -> int:
    """Memory that can still be taken without swapping: of the machine, or of its container where that is less.

    Files that the system keeps in memory count as available. Takes 0.1 ms.
    """
    import psutil

    available_bytes = psutil.virtual_memory().available
    for limit, used in zip(_MEMORY_LIMITS, _MEMORY_USED, strict=True):
        if limit.exists() and (text := limit.read_text().strip()) != "max":
            in_use = int(limit.with_name(used).read_text())
            kept = re.search(
                r"^(?:total_)?inactive_file (\d+)$", limit.with_name("memory.stat").read_text(), re.MULTILINE
            )
            available_bytes = min(available_bytes, int(text) - in_use + (int(kept[1]) if kept else 0))
    return max(0, available_bytes)


def process_rss_bytes() -> int:
    """Resident memory of this process; not of its worker processes."""
    try:  # read in every step: unbuffered is fastest
        with open("/proc/self/statm", "rb", buffering=0) as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except FileNotFoundError:
        import psutil

        return psutil.Process().memory_info().rss


def this_process() -> dict[str, Any]:
    """What a `start` event says of the process that writes it, so that others can see whether it is still there."""
    return {"process_id": os.getpid(), "host_name": platform.node()}


def process_runs(process_id: int, host_name: str, since_s: float) -> bool:
    """Whether a process of this machine, seen at `since_s` (seconds since 1970), still runs; True of other machines'.

    A process that began later has only taken over the number.
    """
    if host_name != platform.node():
        return True
    import psutil

    try:
        process = psutil.Process(process_id)
        # the system counts from its own start, known to the second
        return process.status() != psutil.STATUS_ZOMBIE and process.create_time() < since_s + 2
    except psutil.NoSuchProcess:
        return False


def cpu_name() -> str:
    """The processor's own name, as far as the system tells it."""
    if _CPUINFO.exists() and (
        found := re.search(r"^model name\s*: (.+)$", _CPUINFO.read_text(), re.MULTILINE)
    ):
        return found[1]
    return platform.processor() or platform.machine()


def describe_host() -> dict[str, Any]:
    """Operating system, processor and cores, ready for JSON."""
    return {"platform": platform.platform(), "processor": cpu_name(), "cores": num_usable_cores()}


def versions(names: Iterable[str] = SHOWN_LIBRARIES) -> dict[str, str | None]:
    """Versions of Python, mmlab and the libraries named; None for those that are not installed."""
    found: dict[str, str | None] = {"python": platform.python_version(), "mmlab": __version__}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def share_cores() -> None:
    """Let OpenMP's threads sleep while they wait, unless the user says otherwise; call it before torch is loaded.

    By default they spin, and where loader workers or other programs want the same cores, a step that should take a
    tenth of a second was seen to take three.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
