"""Look at a machine before a run: what it has, how fast it reads and decodes, what is missing and how to get it.

Takes about four seconds, most of them for importing torch and torchvision. Reads at most 256 MiB of the user's files
and drops those from the system's cache first; writes one scratch file of 64 MiB where no path is given.
Does not: change anything, nor reach the network.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import sys
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from mmlab.errors import DataError
from mmlab.machine import GIB, cpu_name, num_usable_cores, total_memory_bytes, versions

LIBRARIES = {  # what mmlab needs, with the oldest version that will do; as in pyproject.toml
    "torch": "2.11",
    "torchvision": "0.26",
    "transformers": "4.57",
    "tokenizers": "0.21",
    "numpy": "2.0",
    "numba": "0.61",
    "pandas": "2.2",
    "pyarrow": "17",
    "pillow": "11",
    "simplejpeg": "1.9",
    "safetensors": "0.5",
    "fsspec": "2024.6",
    "einops": "0.8",
    "psutil": "6",
    "nvidia-ml-py": "12.535",
    "orjson": "3.10",
    "jupyterlab": "4.4",
    "ipywidgets": "8.1",
    "anywidget": "0.9.18",
    "matplotlib": "3.9",
    "jinja2": "3.1",
    "tqdm": "4.66",
    "rich": "13.7",
    "xxhash": "3.4",
}
_SLOW_MIB_PER_S = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One thing that was looked at."""

    name: str
    status: str  # ok; warn: it works, but worse than it could; missing: something will not work
    detail: str  # what was found
    remedy: str = ""  # what to do about it; empty when all is well
    values: dict[str, Any] = field(default_factory=dict)  # the figures behind the detail, units in the names


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """What `diagnose` found; printing it gives one line a check, and one for each remedy."""

    checks: tuple[Check, ...]

    @property
    def ok(self) -> bool:
        """Nothing is missing; there may be warnings."""
        return all(check.status != "missing" for check in self.checks)

    def __getitem__(self, name: str) -> Check:
        return {check.name: check for check in self.checks}[name]

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


def diagnose(path: str | Path | None = None) -> Diagnosis:
    """Look at this machine.

    Args:
        path: a file or folder of data; its disk is measured by reading it. None measures the working folder's disk with
            a scratch file.

    Raises:
        DataError: there is nothing to read at `path`.
    """
    where = None if path is None else Path(path)
    if where is not None and not where.exists():
        raise DataError(f"{where}: no such file or folder; give a path to data that exists")
    python = f"{platform.python_version()} ({sys.executable}) on {platform.platform()}"
    checks = [Check(name="python", status="ok", detail=python), *_libraries(), *_torch()]
    checks += [_cores(), _memory(), *_shared_memory(), _free_disk(where or Path())]
    missing = {check.name for check in checks if check.status == "missing"}
    if missing.isdisjoint({"numpy", "pillow", "simplejpeg"}):
        checks.append(_reading(where))
        if missing.isdisjoint({"torch", "import torch"}):
            checks.append(_decoding())
    return Diagnosis(checks=tuple(checks))


def _libraries() -> Iterator[Check]:
    found = versions(LIBRARIES)
    for name, oldest in LIBRARIES.items():
        version = found[name]
        remedy = f"pip install '{name}>={oldest}'"
        if version is None:
            yield Check(name=name, status="missing", detail="not installed", remedy=remedy)
        elif _numbers(version) < _numbers(oldest):
            yield Check(name=name, status="missing", detail=f"{version}, too old", remedy=remedy)
        else:
            yield Check(name=name, status="ok", detail=version)
    if "pynvml" in {distribution.name for distribution in metadata.distributions()}:
        yield Check(
            name="pynvml",
            status="warn",
            detail="this deprecated distribution may hide nvidia-ml-py, whose module has the same name",
            remedy="pip uninstall pynvml && pip install --force-reinstall nvidia-ml-py",
        )


def _torch() -> Iterator[Check]:
    """torch and torchvision import and fit each other, and the devices that torch sees."""
    try:
        import torch
    except (ImportError, OSError) as error:  # not installed, or a shared library of it is missing
        remedy = "pip install --force-reinstall torch torchvision"
        yield Check(name="import torch", status="missing", detail=_first_line(error), remedy=remedy)
        return
    try:
        import torchvision

        torchvision.ops.nms(
            torch.zeros(1, 4), torch.zeros(1), 0.5
        )  # one of the operators that torchvision compiles
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        detail = f"they do not fit each other: {_first_line(error)}"
        remedy = "pip install --upgrade torch torchvision, both from the same index"
        yield Check(name="torch and torchvision", status="missing", detail=detail, remedy=remedy)
    yield from _devices()


def _devices() -> Iterator[Check]:
    """One check for each GPU, or one that says why there is none."""
    import torch

    with warnings.catch_warnings(record=True) as caught:  # torch warns when a driver is too old or broken
        warnings.simplefilter("always")
        num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for index in range(num_gpus):
        yield _gpu(index)
    if num_gpus:
        return
    remedy = "mmlab runs on the CPU; to use a GPU, run where `nvidia-smi` lists one"
    detail = "no GPU that torch can use"
    driver = _driver_version()
    if caught:
        detail, remedy = f"{detail}: {_first_line(caught[0].message)}", "update the NVIDIA driver"
    elif driver is not None and torch.version.cuda is None:
        detail = (
            f"{detail}: NVIDIA driver {driver} is there, but torch {torch.__version__} is a build for the CPU"
        )
        remedy = "install a CUDA build of torch"
    elif driver is not None:
        detail = f"{detail}: NVIDIA driver {driver} is there, but torch sees no device"
        remedy = "check CUDA_VISIBLE_DEVICES and `nvidia-smi`"
    elif torch.accelerator.is_available():
        accelerator = torch.accelerator.current_accelerator()
        yield Check(
            name="device", status="ok", detail=f"{accelerator}; memory by torch's allocator where it counts"
        )
        return
    yield Check(name="device", status="warn", detail=detail, remedy=remedy)


def _gpu(index: int) -> Check:
    import torch

    from mmlab.runs.meters import read_device

    name = f"cuda:{index}"
    properties = torch.cuda.get_device_properties(index)
    free_bytes, total_bytes = torch.cuda.mem_get_info(index)
    reading = read_device(name)
    detail = (
        f"{properties.name}, {free_bytes / GIB:.1f} of {total_bytes / GIB:.1f} GiB free, compute capability "
        f"{properties.major}.{properties.minor}, driver {_driver_version() or 'unknown'}, CUDA {torch.version.cuda}, "
        f"read by {reading.memory_source} and {reading.utilization_source}"
    )
    values = {
        "free_bytes": free_bytes,
        "total_bytes": total_bytes,
        "multiprocessors": properties.multi_processor_count,
        "memory_source": reading.memory_source,
        "utilization_source": reading.utilization_source,
    }
    if reading.notes:
        detail += f" ({'; '.join(reading.notes)})"
        remedy = "pip install nvidia-ml-py, and check that `nvidia-smi` works for this user"
        return Check(name=name, status="warn", detail=detail, remedy=remedy, values=values)
    return Check(name=name, status="ok", detail=detail, values=values)


def _driver_version() -> str | None:
    """The NVIDIA driver's version, or None where NVML does not answer."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # no library or no driver: each means that there is no version to tell
        return None
    try:
        return pynvml.nvmlSystemGetDriverVersion()
    finally:
        pynvml.nvmlShutdown()


def _cores() -> Check:
    usable, total = num_usable_cores(), os.cpu_count() or 1
    detail = f"{usable} usable of {total}, {cpu_name()}"
    values = {"num_usable": usable, "num_total": total}
    if usable == 1:
        remedy = "data loading and training share one core; give the process more (taskset, container or job settings)"
        return Check(name="cores", status="warn", detail=detail, remedy=remedy, values=values)
    return Check(name="cores", status="ok", detail=detail, values=values)


def _memory() -> Check:
    total_bytes = total_memory_bytes()
    values = {"total_bytes": total_bytes}
    detail = f"{total_bytes / GIB:.1f} GiB"
    if total_bytes < 4 * GIB:
        remedy = "use few workers and small models, or give the process more memory"
        return Check(name="memory", status="warn", detail=detail, remedy=remedy, values=values)
    return Check(name="memory", status="ok", detail=detail, values=values)


def _shared_memory() -> Iterator[Check]:
    """Workers hand batches over in /dev/shm; a container gives 64 MB by default, and workers die when it is full."""
    folder = Path("/dev/shm")
    if not folder.is_dir():
        return
    usage = shutil.disk_usage(folder)
    detail = (
        f"{usage.free / GIB:.2f} of {usage.total / GIB:.2f} GiB free in {folder}, for batches from workers"
    )
    values = {"free_bytes": usage.free, "total_bytes": usage.total}
    if usage.free < GIB:
        remedy = "start the container with --shm-size=8g or --ipc=host, or load with num_workers=0"
        yield Check(name="shared memory", status="warn", detail=detail, remedy=remedy, values=values)
    else:
        yield Check(name="shared memory", status="ok", detail=detail, values=values)


def _free_disk(where: Path) -> Check:
    usage = shutil.disk_usage(where)
    detail = f"{usage.free / GIB:.1f} of {usage.total / GIB:.1f} GiB free at {where.resolve()}"
    values = {"free_bytes": usage.free, "total_bytes": usage.total}
    if usage.free < 2 * GIB:
        remedy = "free some space: caches, checkpoints and runs need it"
        return Check(name="free disk", status="warn", detail=detail, remedy=remedy, values=values)
    return Check(name="free disk", status="ok", detail=detail, values=values)


def _reading(where: Path | None) -> Check:
    from mmlab.loading.speeds import read_rates

    rates = read_rates(where)
    mib, random_mib = rates.num_bytes / 2**20, rates.random_bytes / 2**20
    detail = (
        f"{rates.what}, files: {rates.num_files}, {mib:.0f} MiB; warm {mib / rates.warm_s:.0f} MiB/s, cold "
    )
    values = {**asdict(rates), "warm_bytes_per_s": rates.num_bytes / rates.warm_s}
    if rates.cold_s is None or rates.random_cold_s is None:
        return Check(name="reading", status="ok", detail=f"{detail}not measurable here", values=values)
    cold_mib_per_s, cold_files_per_s = mib / rates.cold_s, rates.num_files / rates.cold_s
    values |= {"cold_bytes_per_s": rates.num_bytes / rates.cold_s, "cold_files_per_s": cold_files_per_s}
    detail += (
        f"{cold_mib_per_s:.0f} MiB/s and {cold_files_per_s:.0f} files/s, "
        f"at random places {random_mib / rates.random_cold_s:.0f} MiB/s"
    )
    if not rates.really_cold:
        detail += " (alike: the disk is in memory, or its cache could not be dropped)"
    elif cold_mib_per_s < _SLOW_MIB_PER_S:
        remedy = "the first epoch will wait for this disk: copy the data to a local one, or pack them into tar shards"
        return Check(name="reading", status="warn", detail=detail, remedy=remedy, values=values)
    return Check(name="reading", status="ok", detail=detail, values=values)


def _decoding() -> Check:
    from mmlab.loading.speeds import decode_rate

    images_per_s, num_bytes = decode_rate()
    detail = f"{images_per_s:.0f} images/s a core: JPEG 640 x 480 ({num_bytes / 1000:.0f} kB) to 224 x 224"
    return Check(name="decoding", status="ok", detail=detail, values={"images_per_s_per_core": images_per_s})


def _numbers(version: str) -> tuple[int, ...]:
    """The release numbers of a version: 2.11.0+cu130 -> (2, 11, 0)."""
    return tuple(int(number) for number in re.findall(r"\d+", version.split("+")[0])[:3])


def _first_line(error: object) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]
