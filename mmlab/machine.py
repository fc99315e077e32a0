"""Facts about this machine and this process. Importing this module does not load torch."""

from __future__ import annotations

import errno
import fcntl
import math
import os
import platform
import re
import signal
import stat
import sys
import threading
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from mmlab import __version__
from mmlab.errors import OptionError, check_numbers, first_line

if TYPE_CHECKING:
    import torch
    from tqdm import tqdm

_CPUINFO = Path("/proc/cpuinfo")
_MEMORY_LIMITS = {  # of a container: control groups of version 2 and 1, and beside each what is in use
    Path("/sys/fs/cgroup/memory.max"): "memory.current",
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"): "memory.usage_in_bytes",
}
_CPU_QUOTAS = (  # of a container: quota and period, in one file or in two
    (Path("/sys/fs/cgroup/cpu.max"),),
    (Path("/sys/fs/cgroup/cpu/cpu.cfs_quota_us"), Path("/sys/fs/cgroup/cpu/cpu.cfs_period_us")),
)
GIB = 2**30
IDENTITY = ("process_id", "host_name", "boot_id", "process_start_s")  # of a process, see `describe_process`
SHOWN_LIBRARIES = ("torch", "torchvision", "transformers", "tokenizers", "numpy", "pandas", "pillow", "numba")


def num_usable_cores() -> int:
    """CPU cores that this process may run on, at most as many as its container's quota of CPU time allows."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for paths in _CPU_QUOTAS:
        if all(path.exists() for path in paths):
            quota, period = " ".join(path.read_text() for path in paths).split()
            if quota not in ("max", "-1"):  # else there is no limit
                cores = min(cores, max(1, math.ceil(int(quota) / int(period))))
    return cores


def total_memory_bytes() -> int:
    """Memory that this process may use: the machine's, or its container's limit where that is lower."""
    limits = [path.read_text().strip() for path in _MEMORY_LIMITS if path.exists()]
    return min([psutil.virtual_memory().total, *(int(limit) for limit in limits if limit != "max")])


def available_memory_bytes() -> int:
    """Memory that can still be taken without swapping: the machine's, or its container's where that is less.

    Files that the system keeps in memory count as available. Takes 0.1 ms.
    """
    available_bytes = psutil.virtual_memory().available
    for limit, used in _MEMORY_LIMITS.items():
        if limit.exists() and (text := limit.read_text().strip()) != "max":
            in_use = int(limit.with_name(used).read_text())
            figures = limit.with_name("memory.stat").read_text()
            kept = re.search(r"^(?:total_)?inactive_file (\d+)$", figures, re.MULTILINE)
            available_bytes = min(available_bytes, int(text) - in_use + (int(kept[1]) if kept else 0))
    return max(0, available_bytes)


def process_rss_bytes() -> int:
    """Resident memory of this process; not of its worker processes."""
    return psutil.Process().memory_info().rss


def this_process() -> dict[str, Any]:
    """The identity of this process, see `describe_process`."""
    return describe_process(os.getpid())


def describe_process(process_id: int) -> dict[str, Any]:
    """The identity of a process of this machine: host, boot of the system, process number and start time.

    A process number alone is no identity: other machines use the same numbers, and the system reuses them.
    """
    return {
        "process_id": process_id,
        "host_name": platform.node(),
        "boot_id": _boot_id(),
        "process_start_s": _process_start_s(process_id),
    }


def end_with_parent(number: int) -> None:
    """Wait until the process at the other end of standard input is gone, then send this process a signal."""
    os.read(0, 1)  # the other end writes nothing more, so this returns when the pipe breaks
    os.kill(os.getpid(), number)


def find_process(identity: Mapping[str, Any]) -> psutil.Process | None:
    """The process with this identity; None if it has ended or belongs to another machine."""
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(identity["process_id"])
        ours = describe_process(process.pid).items() <= identity.items()
        return process if ours and process.status() != psutil.STATUS_ZOMBIE else None
    return None


def process_runs(identity: Mapping[str, Any]) -> bool:
    """Whether a process still runs; True for one of another machine, which cannot be checked from here."""
    return identity["host_name"] != platform.node() or find_process(identity) is not None


def _boot_id() -> str:
    """A value that changes with every boot of the system."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except FileNotFoundError:  # not Linux
        return f"{psutil.boot_time():.0f}"


def _process_start_s(process_id: int) -> float:
    """When a process started: seconds since boot (Linux), which setting the clock does not change.

    Raises:
        psutil.NoSuchProcess: it has ended.
    """
    try:
        fields = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()
        return int(fields[19]) / os.sysconf("SC_CLK_TCK")
    except (FileNotFoundError, ProcessLookupError):  # ended, or not Linux
        return psutil.Process(process_id).create_time()


def cpu_name() -> str:
    """The processor's name, as the system gives it."""
    text = _CPUINFO.read_text() if _CPUINFO.exists() else ""
    if found := re.search(r"^model name\s*: (.+)$", text, re.MULTILINE):
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


def place_in_launch() -> tuple[int, int]:
    """Rank of this process and number of ranks that `torchrun` has started; 0 and 1 without it."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def place_of_process() -> tuple[int, int]:
    """Rank of this process and number of ranks: those of torch's process group, or of `torchrun`, else 0 and 1."""
    from torch import distributed

    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return place_in_launch()


def share_cores() -> None:
    """Let OpenMP's threads soon sleep while they wait, unless the user says otherwise; call it before torch is loaded.

    By default they spin long: where others need the cores, a step takes several times as long. If they never
    spin, a step that has the machine for itself takes 1.3 to 1.7 times as long (`benchmarks/openmp.py`).
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ |= {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "10000"}  # GNU's obeys the second


CONTEXT_BYTES = {  # by type of device; stated, not measured on the device at hand
    # the driver's context, with the kernels of cuBLAS, cuDNN and torch as they load: NVML reports 0.4-0.6 GiB with CUDA
    # 12 and 13 on GPUs since Ampere
    "cuda": 600 * 2**20,
    "cpu": 1024 * 2**20,  # Python, torch, transformers and their threads
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLimit:
    """Memory of a device, and how much of it training may use.

    >>> print(MemoryLimit(device="cuda", total_bytes=16 * GIB, others_bytes=2 * GIB, context_bytes=GIB))
    cuda: 13 GiB for training (16 GiB, less 2 in use by others, less 1 for the context)
    """

    device: str
    total_bytes: int  # of the device, or as given
    others_bytes: int = 0  # in use now, not by this process
    context_bytes: int  # what this process needs besides tensors

    def __post_init__(self) -> None:
        if self.usable_bytes <= 0:
            raise OptionError(f"too little memory: {self}; give more memory, or free the device")

    @property
    def usable_bytes(self) -> int:
        """The most that a step's live tensors may take."""
        return self.total_bytes - self.others_bytes - self.context_bytes

    def __str__(self) -> str:
        sizes = (max(0, self.usable_bytes), self.total_bytes, self.others_bytes, self.context_bytes)
        usable, total, others, context = (size / GIB for size in sizes)
        parts = f"{total:.3g} GiB, less {others:.3g} in use by others, less {context:.3g} for the context"
        return f"{self.device}: {usable:.3g} GiB for training ({parts})"


def memory_limit(device: torch.device | str, *, memory_gb: float | None = None) -> MemoryLimit:
    """Ask a device how much memory training may use now.

    Args:
        memory_gb: plan for so many GiB (2**30 bytes) instead of the device's own. If the device is present
            and has less free, that still limits; an absent device counts as empty, so that a run can be
            planned for it.

    Raises:
        OptionError: no such device, the device is absent and `memory_gb` is not given, or nothing is left for
            training.
    """
    import torch

    try:
        device = torch.device(device)
    except RuntimeError as error:
        raise OptionError(f"{device!r} is no device; known: {', '.join(CONTEXT_BYTES)}") from error
    if device.type not in CONTEXT_BYTES:
        raise OptionError(f"memory of a {device.type} device is not known; known: {', '.join(CONTEXT_BYTES)}")
    check_numbers({"memory_gb": memory_gb})
    given = None if memory_gb is None else round(memory_gb * GIB)
    if device.type == "cpu":
        total = total_memory_bytes()
        others = max(0, total - available_memory_bytes() - process_rss_bytes())
    elif torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info(device)
        # only its stated size separates this process's own context from the memory of others
        others = max(0, total - free - torch.cuda.memory_reserved(device) - CONTEXT_BYTES["cuda"])
    elif given is None:
        raise OptionError(f"no {device} device here; give the memory to plan for (memory_gb, --memory-gb)")
    else:
        total, others = given, 0
    if given is not None and given < total:
        # others are assumed to use the part beyond `given` first
        others = max(0, others - (total - given))
        total = given
    context = CONTEXT_BYTES[device.type]
    return MemoryLimit(device=str(device), total_bytes=total, others_bytes=others, context_bytes=context)


@contextmanager
def signals_held(*numbers: int, handler: Any = None) -> Iterator[list[int]]:
    """Hold back the first of these signals until the block is done; a second one is delivered at once.

    Python handles signals in the main thread only: in any other thread, and for ignored signals, nothing is
    held.

    Args:
        handler: what the signals do instead, until the block is done. `signal.SIG_DFL` ends the process at once, also
            where it waits in code that lets no handler of Python's run.

    Returns:
        A list, empty until a signal has come: check it to end the block early.
    """
    received: list[int] = []
    with ExitStack() as put_back:

        def note(number: int, frame: object) -> None:
            received.append(number)
            put_back.close()

        chosen = note if handler is None else handler
        if threading.current_thread() is threading.main_thread():
            for number in numbers:
                if signal.getsignal(number) not in (signal.SIG_IGN, None):
                    put_back.callback(signal.signal, number, signal.signal(number, chosen))
        yield received
    if received:
        signal.raise_signal(received[0])


def resolve_device(name: str) -> str:
    """`auto` is the GPU where there is one, else the CPU.

    Raises:
        OptionError: not a device of this machine.
    """
    import torch

    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(1, device=name).cpu()  # a `meta` tensor can be made, but not read
    except (RuntimeError, AssertionError) as error:
        reason = first_line(error)
        raise OptionError(f"device {name!r} cannot be used here ({reason}); cpu always can") from error
    return name


def progress_bar(
    items: Iterable[Any] | None = None,
    name: str | None = None,
    total: int | None = None,
    *,
    show: bool = True,
    **options: Any,
) -> tqdm[Any]:
    """A bar of tqdm on a terminal or in a notebook; elsewhere, as in the log of a batch job, a line every 30 s.

    Args:
        show: whether to print anything.
    """
    from tqdm import asyncio, auto

    if auto.tqdm is asyncio.tqdm_asyncio and not sys.stderr.isatty():  # auto has another class for notebooks
        options |= {"file": _Lines(), "position": 0}
    return auto.tqdm(items, name, total, disable=not show, **options)


class _Lines:
    """Standard error for a bar that stays: its state on a line of its own, at most every half minute."""

    def __init__(self) -> None:
        self._last_s = time.monotonic()

    def write(self, text: str) -> None:
        if text.strip() and time.monotonic() - self._last_s >= 30:
            self._last_s = time.monotonic()
            print(text.strip(), file=sys.stderr, flush=True)


def lock(file: int, *, wait: bool) -> None:
    """Lock an open file or folder until it is closed; does nothing where locks are not supported.

    Raises:
        BlockingIOError: another process holds it, and `wait` is False.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:  # a file system without such locks
        pass


def replace_file(path: Path, content: str | bytes) -> None:
    """Replace a small file in one operation: a reader finds the old content or the new one, never a part."""
    new = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        new.write_bytes(content if isinstance(content, bytes) else content.encode(errors="backslashreplace"))
        new.replace(path)
    except OSError as error:  # it names the new file, or none
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        with suppress(OSError):
            new.unlink()


def regular(path: str, flags: int) -> int:
    """An `opener` for `open` that refuses pipes and devices, where a reader could wait for ever. Costs 3 us.

    Raises:
        OSError: it is no regular file.
    """
    return open_regular(path, flags)[0]


def open_regular(path: str, flags: int) -> tuple[int, int]:
    """A descriptor of a regular file, and its size in bytes; raises the errors of `regular`."""
    number = os.open(path, flags | os.O_NONBLOCK)  # so that a pipe opens at once, too
    found = os.fstat(number)
    if not stat.S_ISREG(found.st_mode):
        os.close(number)
        raise OSError(errno.EINVAL, "not a regular file", path)
    return number, found.st_size
