"""What training may use: a device's memory or the given one, less others' use, less what is no tensor."""

import os

import pytest
import torch

from mmlab import machine
from mmlab.errors import OptionError
from mmlab.machine import CONTEXT_BYTES, GIB, MemoryLimit, memory_limit, total_memory_bytes


def test_the_cpus_limit_leaves_room_for_others_and_for_python():
    limit = memory_limit("cpu")
    assert limit.total_bytes == total_memory_bytes()
    assert limit.context_bytes == CONTEXT_BYTES["cpu"]
    assert 0 < limit.usable_bytes <= limit.total_bytes - limit.context_bytes


def test_a_given_limit_is_kept_where_there_is_more():
    limit = memory_limit("cpu", memory_gb=2)
    assert limit.total_bytes == 2 * GIB
    assert limit.others_bytes == 0
    assert limit.usable_bytes == 2 * GIB - CONTEXT_BYTES["cpu"]


def test_a_given_limit_does_not_make_a_device_larger():
    assert memory_limit("cpu", memory_gb=9e5).total_bytes == total_memory_bytes()


@pytest.mark.skipif(torch.cuda.is_available(), reason="here is a CUDA device")
def test_a_device_that_is_not_here_can_be_planned_for_but_not_asked():
    assert memory_limit("cuda", memory_gb=16).usable_bytes == 16 * GIB - CONTEXT_BYTES["cuda"]
    with pytest.raises(OptionError, match="no cuda device here; give the memory to plan for"):
        memory_limit("cuda")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_cuda_devices_limit_can_be_allocated():
    limit = memory_limit("cuda")
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    assert limit.total_bytes == total_bytes
    assert limit.usable_bytes <= free_bytes + torch.cuda.memory_reserved() + CONTEXT_BYTES["cuda"]
    half = memory_limit("cuda", memory_gb=total_bytes / GIB / 2)
    assert half.total_bytes == pytest.approx(total_bytes / 2, abs=1)


def test_too_little_is_refused_with_the_sum():
    with pytest.raises(
        OptionError,
        match=r"too little memory: cpu: 0 GiB for training \(0\.5 GiB, .*1 for the context\); give more",
    ):
        memory_limit("cpu", memory_gb=0.5)


@pytest.mark.parametrize("memory_gb", [0, -3.0, float("nan"), float("inf")])
def test_a_limit_that_is_no_amount_is_refused(memory_gb):
    with pytest.raises(OptionError, match=f"memory_gb must be (above 0|finite), found {memory_gb}"):
        memory_limit("cpu", memory_gb=memory_gb)


def test_what_is_no_device_is_refused():
    with pytest.raises(OptionError, match="'tpu' is no device; known: cuda, cpu"):
        memory_limit("tpu", memory_gb=16)


def test_an_unknown_kind_of_device_is_refused():
    with pytest.raises(OptionError, match="memory of a mps device is not known; known: cuda, cpu"):
        memory_limit("mps", memory_gb=16)


def test_the_parts_add_up():
    limit = MemoryLimit(device="cuda", total_bytes=10 * GIB, others_bytes=3 * GIB, context_bytes=GIB)
    assert limit.usable_bytes == 6 * GIB


@pytest.fixture
def cgroup(tmp_path, monkeypatch):
    """A folder of control groups, of versions 2 and 1, on a machine of eight cores."""
    (tmp_path / "cpu").mkdir()
    v1 = tmp_path / "cpu/cpu.cfs_quota_us", tmp_path / "cpu/cpu.cfs_period_us"
    monkeypatch.setattr(machine, "_CPU_QUOTAS", ((tmp_path / "cpu.max",), v1))
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)), raising=False)
    return tmp_path


@pytest.mark.parametrize(
    ("quota", "cores"),
    [("max", 8), ("50000", 1), ("100000", 1), ("150000", 2), ("200000", 2), ("1600000", 8)],
)
@pytest.mark.parametrize("version", [1, 2])
def test_usable_cores_heed_the_containers_quota(cgroup, version, quota, cores):
    if version == 2:
        (cgroup / "cpu.max").write_text(f"{quota} 100000\n")
    else:
        (cgroup / "cpu/cpu.cfs_quota_us").write_text("-1\n" if quota == "max" else f"{quota}\n")
        (cgroup / "cpu/cpu.cfs_period_us").write_text("100000\n")
    assert machine.num_usable_cores() == cores


def test_without_a_quota_all_cores_are_usable(cgroup):
    assert machine.num_usable_cores() == 8
