"""Checks a machine before a run: what it has, how fast it reads, what is missing and how to get it.

Takes about four seconds, most of them for importing torch and torchvision. Reads at most 256 MiB of the user's files
and drops those from the system's cache first; writes one scratch file of 64 MiB where no path is given.
Changes nothing else, and does not use the network.
"""

from __future__ import annotations

import os
import platform
import shutil
import sys
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from mmlab.errors import DataError, first_line
from mmlab.machine import GIB, cpu_name, num_usable_cores, total_memory_bytes, versions

_SLOW_MIB_PER_S = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """The result of one check."""

    name: str
    status: str  # ok; warn: it works, but worse than it could; missing: something will not work
    detail: str  # what was found
    remedy: str = ""  # what to do about it; empty when all is well
    values: dict[str, Any] = field(default_factory=dict)  # the figures behind the detail, units in the names


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """The result of `diagnose`; printing it gives one line per check, and one per remedy."""

    checks: tuple[Check, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing is missing; there may be warnings."""
        return all(check.status != "missing" for check in self.checks)

    def as_dict(self) -> dict[str, Any]:
        """For JSON: `ok`, and every check with its figures."""
        return {"ok": self.ok, "checks": [asdict(check) for check in self.checks]}

    def __str__(self) -> str:
        width = max(len(check.name) for check in self.checks)
        lines = []
        for check in self.checks:
            lines.append(f"{check.status:<8}{check.name:<{width}}  {check.detail}")
            if check.remedy:
                lines.append(f"{'':<{8 + width}}  -> {check.remedy}")
        return "\n".join(lines)


def _judged(name: str, detail: str, remedy: str, *, bad: bool, **values: Any) -> Check:
    """A check that is ok, or a warning with its remedy."""
    status, remedy = ("warn", remedy) if bad else ("ok", "")
    return Check(name=name, status=status, detail=detail, remedy=remedy, values=values)


def diagnose(*, data: Annotated[str | Path | None, "measure the disk that holds this"] = None) -> Diagnosis:
    """Say what this machine has, how fast it reads, and what is missing."""
    where = None if data is None else Path(data)
    if where is not None and not where.exists():
        raise DataError(f"{where}: no such file or folder; give a path to data that exists")
    python = f"{platform.python_version()} ({sys.executable}) on {platform.platform()}"
    checks = [_judged("python", python, "", bad=False), *_libraries(), *_torch(), _cores(), _memory()]
    # workers pass batches through it; a container gives 64 MB by default, and workers die when it is full
    if (shared := Path("/dev/shm")).is_dir():
        remedy = "start the container with --shm-size=8g or --ipc=host, or load with num_workers=0"
        checks.append(_space("shared memory", shared, 1, remedy))
    remedy = "free some space: caches, checkpoints and runs need it"
    checks.append(_space("free disk", (where or Path()).resolve(), 2, remedy))
    missing = {check.name for check in checks if check.status == "missing"}
    if missing.isdisjoint({"numpy", "pillow", "simplejpeg"}):
        checks.append(_reading(where))
    return Diagnosis(checks=tuple(checks))


def needed_libraries() -> dict[str, SpecifierSet]:
    """The libraries that mmlab requires, with the versions allowed; empty where mmlab is not installed."""
    try:
        needed = map(Requirement, metadata.requires("mmlab") or [])
    except metadata.PackageNotFoundError:
        return {}
    return {item.name: item.specifier for item in needed if item.marker is None or item.marker.evaluate()}


def _libraries() -> Iterator[Check]:
    needed = needed_libraries()
    found = {name: version for name, version in versions(needed).items() if version and name in needed}
    good = {name for name, version in found.items() if needed[name].contains(version, prereleases=True)}
    if needed:
        shown = [f"{name} {found[name]}" for name in ("torch", "torchvision", "transformers") if name in good]
        detail = ", ".join([f"{len(good)} of {len(needed)} have a version that is allowed", *shown])
        yield _judged("libraries", detail, "", bad=False, **dict.fromkeys(needed, "not installed") | found)
    else:
        detail = "not installed (run from its source), so the libraries it needs are not known"
        yield _judged("mmlab", detail, "pip install .", bad=True)
    for name, wanted in needed.items():
        if name not in good:
            detail = f"{found[name]}, too old or too new" if name in found else "not installed"
            yield Check(name=name, status="missing", detail=detail, remedy=f"pip install '{name}{wanted}'")
    if "pynvml" in {distribution.name for distribution in metadata.distributions()}:
        detail = "this deprecated distribution may hide nvidia-ml-py, whose module has the same name"
        remedy = "pip uninstall pynvml && pip install --force-reinstall nvidia-ml-py"
        yield _judged("pynvml", detail, remedy, bad=True)


def _torch() -> Iterator[Check]:
    """Whether torch and torchvision can be imported and match, and the devices that torch sees."""
    try:
        import torch
    except (ImportError, OSError) as error:  # not installed, or a shared library of it is missing
        remedy = "pip install --force-reinstall torch torchvision"
        yield Check(name="import torch", status="missing", detail=first_line(error), remedy=remedy)
        return
    try:
        import torchvision

        # one of the operators that torchvision compiles
        torchvision.ops.nms(torch.zeros(1, 4), torch.zeros(1), 0.5)
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        detail = f"incompatible versions: {first_line(error)}"
        remedy = "pip install --upgrade torch torchvision, both from the same index"
        yield Check(name="torch and torchvision", status="missing", detail=detail, remedy=remedy)
    yield from _devices()


def _devices() -> Iterator[Check]:
    """One check for each GPU, or one that says why there is none."""
    import torch

    with warnings.catch_warnings(record=True) as caught:  # torch warns when a driver is too old or broken
        warnings.simplefilter("always")
        num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    yield from map(_gpu, range(num_gpus))
    if num_gpus:
        return
    driver = _driver_version()
    detail = "no GPU that torch can use"
    remedy = "mmlab runs on the CPU; to use a GPU, run where `nvidia-smi` lists one"
    if caught:
        detail, remedy = f"{detail}: {first_line(caught[0].message)}", "update the NVIDIA driver"
    elif driver is not None:
        detail += f": NVIDIA driver {driver} is there, torch {torch.__version__} sees no device"
        remedy = "install a CUDA build of torch, and check CUDA_VISIBLE_DEVICES and `nvidia-smi`"
    elif torch.accelerator.is_available():
        detail = f"{torch.accelerator.current_accelerator()}; memory by torch's allocator where it counts"
    yield _judged("device", detail, remedy, bad=driver is not None or not torch.accelerator.is_available())


def _gpu(index: int) -> Check:
    import torch

    from mmlab.runs.meters import read_device

    name = f"cuda:{index}"
    properties = torch.cuda.get_device_properties(index)
    free_bytes, total_bytes = torch.cuda.mem_get_info(index)
    reading = read_device(name)
    sources = {key: getattr(reading, key) for key in ("memory_source", "utilization_source")}
    detail = (
        f"{properties.name}, {free_bytes / GIB:.1f} of {total_bytes / GIB:.1f} GiB free, compute capability "
        f"{properties.major}.{properties.minor}, driver {_driver_version() or 'unknown'}, CUDA {torch.version.cuda}, "
        f"read by {' and '.join(sources.values())}"
    )
    values = {"free_bytes": free_bytes, "total_bytes": total_bytes, **sources}
    remedy = "pip install nvidia-ml-py, and check that `nvidia-smi` works for this user"
    notes = f" ({'; '.join(reading.notes)})" if reading.notes else ""
    return _judged(name, detail + notes, remedy, bad=bool(reading.notes), **values)


def _driver_version() -> str | None:
    """The NVIDIA driver's version, or None where NVML does not answer."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # no library or no driver: in both cases there is no version
        return None
    try:
        return pynvml.nvmlSystemGetDriverVersion()
    finally:
        pynvml.nvmlShutdown()


def _cores() -> Check:
    usable, total = num_usable_cores(), os.cpu_count() or 1
    remedy = "data loading and training share one core; give the process more (taskset, container or job)"
    detail = f"{usable} usable of {total}, {cpu_name()}"
    return _judged("cores", detail, remedy, bad=usable == 1, num_usable=usable, num_total=total)


def _memory() -> Check:
    num_bytes = total_memory_bytes()
    remedy = "use few workers and small models, or give the process more memory"
    detail = f"{num_bytes / GIB:.1f} GiB"
    return _judged("memory", detail, remedy, bad=num_bytes < 4 * GIB, total_bytes=num_bytes)


def _space(name: str, folder: Path, least_gib: int, remedy: str) -> Check:
    usage = shutil.disk_usage(folder)
    detail = f"{usage.free / GIB:.2f} of {usage.total / GIB:.2f} GiB free at {folder}"
    bad = usage.free < least_gib * GIB
    return _judged(name, detail, remedy, bad=bad, free_bytes=usage.free, total_bytes=usage.total)


def _reading(where: Path | None) -> Check:
    from mmlab.loading.speeds import read_rates

    try:
        rates = read_rates(where)
    except OSError as error:  # a scratch file needs room, and leave to write
        remedy = "give --data, or go to a folder that 64 MiB can be written into"
        return _judged("reading", f"not measured: {error.strerror}", remedy, bad=True)
    mib = rates.num_bytes / 2**20
    size = f"{rates.num_files} files, {mib:.0f} MiB"
    detail = f"{rates.what}: {size}; warm {mib / rates.warm_s:.0f} MiB/s, cold "
    values = {**asdict(rates), "warm_bytes_per_s": rates.num_bytes / rates.warm_s}
    if rates.cold_s is None:
        return Check(name="reading", status="ok", detail=f"{detail}not measurable here", values=values)
    cold_mib_per_s, cold_files_per_s = mib / rates.cold_s, rates.num_files / rates.cold_s
    values |= {"cold_bytes_per_s": rates.num_bytes / rates.cold_s, "cold_files_per_s": cold_files_per_s}
    detail += f"{cold_mib_per_s:.0f} MiB/s and {cold_files_per_s:.0f} files/s"
    if not rates.really_cold:
        detail += " (alike: the disk is in memory, or its cache could not be dropped)"
    remedy = "the first epoch waits for this disk: copy the data to a local one, or pack them into tar shards"
    slow = rates.really_cold and cold_mib_per_s < _SLOW_MIB_PER_S
    return _judged("reading", detail, remedy, bad=slow, **values)
