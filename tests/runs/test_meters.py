"""Readings name their source and never fail; live bytes are exact where they can be counted by hand."""

from __future__ import annotations

import copy
import time
from itertools import accumulate
from types import SimpleNamespace

import pynvml
import pytest
import torch
from torch import nn

from mmlab.machine import process_rss_bytes
from mmlab.runs.event_keys import EVENT_KEYS
from mmlab.runs.meters import DeviceMeter, LiveBytes, read_device
from mmlab.runs.nvml import Gpu

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def test_a_cpu_reading_is_of_the_process_and_says_so() -> None:
    block = torch.ones(64 * 2**20, dtype=torch.uint8)  # touched, so resident
    reading = read_device("cpu")
    assert (reading.memory_source, reading.utilization_source) == ("process RSS", "process CPU")
    assert block.numel() < reading.memory_bytes < reading.memory_total_bytes
    assert reading.allocated_bytes is reading.reserved_bytes is None
    assert reading.notes == ()


def test_resident_memory_agrees_with_psutil() -> None:
    import psutil

    assert process_rss_bytes() == pytest.approx(psutil.Process().memory_info().rss, rel=0.05)


def test_cpu_use_is_that_of_the_interval_since_the_reading_before() -> None:
    with DeviceMeter("cpu") as meter:
        started = time.process_time()
        while time.process_time() - started < 0.2:
            pass
        busy = meter.read().utilization_ratio
        time.sleep(0.3)
        idle = meter.read().utilization_ratio
    assert 0 <= idle < busy <= 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_the_next_source_answers_and_the_reasons_are_kept() -> None:
    with DeviceMeter("cuda") as meter:
        reading = meter.read()
    assert (reading.memory_source, reading.utilization_source) == ("process RSS", "process CPU")
    assert [note.split(":")[0] for note in reading.notes] == [
        "memory not from NVML",
        "memory not from torch allocator",
        "utilization not from NVML",
    ]


class _Driver:
    """Stands where NVIDIA's bindings stand: answers what it is told to, then is lost, as a GPU off its bus."""

    NVML_ERROR_NOT_SUPPORTED = pynvml.NVML_ERROR_NOT_SUPPORTED
    NVML_TEMPERATURE_GPU, NVML_CLOCK_SM = range(2)

    def __init__(self, **answers: object) -> None:
        memory, rates = SimpleNamespace(used=3 * 2**30, total=8 * 2**30), SimpleNamespace(gpu=75, memory=40)
        self.answers = {"MemoryInfo": memory, "UtilizationRates": rates, **answers}
        self.lost, self.asked = False, []

    def __getattr__(self, name: str) -> object:
        return lambda *arguments: self._answer(name.removeprefix("nvmlDeviceGet"), arguments)

    def _answer(self, name: str, arguments: tuple) -> object:
        self.asked.append(name)
        if self.lost:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
        if name.startswith("nvml") or name == "HandleByUUID":
            return None
        answer = self.answers.get(name, pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED))
        if isinstance(answer, Exception):
            raise answer
        return answer[arguments[1]] if isinstance(answer, dict) else answer


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_gpu_that_disappears_and_comes_back() -> None:
    driver = _Driver()
    with DeviceMeter("cuda") as meter:
        meter._gpu = Gpu("GPU-0", driver)
        reading = meter.read()
        assert (reading.memory_bytes, reading.memory_total_bytes) == (3 * 2**30, 8 * 2**30)
        assert (reading.memory_source, reading.utilization_ratio) == ("NVML", 0.75)
        driver.lost = True
        reading = meter.read()
        assert (reading.memory_source, reading.utilization_source) == ("process RSS", "process CPU")
        assert reading.notes[0] == "memory not from NVML: NVMLError_GpuIsLost: GPU is lost"
        assert reading.details == {}
        driver.lost = False
        assert meter.read().memory_source == "NVML"
    assert driver.asked[-1] == "nvmlShutdown"


def test_what_the_driver_refuses_is_left_out_with_its_reason_and_not_asked_again() -> None:
    driver = _Driver(
        PowerUsage=312_500,
        Temperature=61,
        ComputeRunningProcesses=pynvml.NVMLError(pynvml.NVML_ERROR_NO_PERMISSION),
    )
    gpu = Gpu("GPU-0", driver)
    values, missing = gpu.details(7)
    assert values == {"power_w": 312.5, "temperature_c": 61}
    assert "no process_bytes from NVML: NVMLError_NoPermission: Insufficient Permissions" in missing
    assert any("no sm_clock_mhz from NVML: NVMLError_NotSupported" in note for note in missing)
    driver.asked.clear()
    assert gpu.details(7) == (values, missing)
    assert "ClockInfo" not in driver.asked
    assert "ComputeRunningProcesses" in driver.asked, "a permission may be given later"


# As an H100 answers under load, in the form that the bindings give; written down, not read from a device here.
RECORDED = {
    "PowerUsage": 643_211,
    "Temperature": 68,
    "ClockInfo": {_Driver.NVML_CLOCK_SM: 1755},
    "ComputeRunningProcesses": [
        SimpleNamespace(pid=4021, usedGpuMemory=61 * 2**30),
        SimpleNamespace(pid=99, usedGpuMemory=2**30),
    ],
}


def test_the_drivers_answers_are_given_in_the_units_of_the_key_table() -> None:
    gpu = Gpu("GPU-0", _Driver(**RECORDED))
    found, missing = gpu.details(4021)
    assert found == {
        "power_w": pytest.approx(643.211),
        "temperature_c": 68,
        "sm_clock_mhz": 1755,
        "process_bytes": 61 * 2**30,
    }
    assert missing == []
    assert all("device" in EVENT_KEYS[key].kinds for key in found)
    other, _ = gpu.details(1)
    assert found.keys() - other.keys() == {"process_bytes"}


@pytest.mark.parametrize("device", ["mps", "xpu"])
def test_other_devices_that_this_torch_cannot_read_fall_back_with_a_reason(device: str) -> None:
    if getattr(torch, device).is_available():
        pytest.skip(f"there is a device {device}")
    with DeviceMeter(device) as meter:
        reading = meter.read()
    assert (reading.memory_source, reading.utilization_source) == ("process RSS", "process CPU")
    assert [note.split(":")[0] for note in reading.notes] == [
        "memory not from torch accelerator",
        "utilization not from torch",
    ]


@needs_cuda
def test_nvml_and_torch_agree_on_a_known_allocation() -> None:
    with DeviceMeter("cuda") as meter:
        before = meter.read()
        block = torch.ones(2**28, dtype=torch.uint8, device="cuda")
        torch.cuda.synchronize()
        after = meter.read()
    assert before.memory_source == after.memory_source == "NVML"
    assert after.memory_bytes - before.memory_bytes >= block.numel()
    assert (after.allocated_bytes or 0) - (before.allocated_bytes or 0) == block.numel()


def test_a_chain_of_operations_is_counted_to_the_byte() -> None:
    a = torch.zeros(1000)  # 4,000 bytes
    with LiveBytes().add(a) as live:
        assert live.current_bytes == 4000
        b = a.double()
        assert live.current_bytes == 4000 + 8000
        view = b[10:20].reshape(2, 5).t()
        assert live.current_bytes == 12000, "views own nothing"
        del b
        assert live.current_bytes == 12000, "a view keeps its storage"
        del view
        assert live.current_bytes == 4000
        (a + 1).add_(1)
    assert (live.current_bytes, live.peak_bytes) == (4000, 12000)
    live.reset_peak()
    assert live.peak_bytes == 4000
    del a
    assert live.current_bytes == 0, "what is freed after the context counts as freed"


def test_what_the_graph_saves_lives_until_backward() -> None:
    x = torch.zeros(100, requires_grad=True)
    with LiveBytes().add(x) as live:
        y = x.exp()  # saves its result
        z = y.sum()
        del y
        assert live.current_bytes == 400 + 400 + 4
        z.backward()
        assert live.current_bytes == 400 + 4 + 400, "the saved result has gone, the gradient has come"
    assert live.peak_bytes == 400 + 400 + 4 + 4 + 400  # x, y, z, the gradient of z, that of x


def test_a_training_step_ends_with_weights_gradients_and_moments() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(50, 200), nn.ReLU(), nn.Linear(200, 10))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    num_weight_bytes = sum(4 * weight.numel() for weight in model.parameters())
    inputs = torch.randn(64, 50)
    with LiveBytes().add(model, inputs) as live:
        assert live.current_bytes == num_weight_bytes + 64 * 50 * 4
        model(inputs).square().mean().backward()
        optimizer.step()
    counters = 4 * 4  # AdamW's step number of each of four parameters
    assert live.current_bytes == 4 * num_weight_bytes + counters + 64 * 50 * 4
    hidden = 64 * 200 * 4
    assert live.peak_bytes > live.current_bytes - 2 * num_weight_bytes + hidden
    again = LiveBytes().add(model, optimizer, inputs)
    assert again.current_bytes == live.current_bytes, "what exists already can be counted at any time"


def test_counting_changes_no_result() -> None:
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
    twin = copy.deepcopy(model)
    inputs = torch.randn(2, 5, 16)

    def gradients(module: nn.Module) -> list[torch.Tensor]:
        torch.manual_seed(1)
        module(inputs).sum().backward()
        return [weight.grad for weight in module.parameters() if weight.grad is not None]

    plain = gradients(model)
    with LiveBytes().add(twin):
        counted = gradients(twin)
    assert all(torch.equal(a, b) for a, b in zip(plain, counted, strict=True))


def test_a_resized_storage_is_counted_at_its_new_size() -> None:
    out = torch.empty(0)
    with LiveBytes().add(out) as live:
        torch.add(torch.ones(100), 1, out=out)
        assert live.current_bytes == 400


def test_a_whole_step_agrees_with_what_the_allocator_recorded() -> None:
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(64, 4, 256, batch_first=True)
    optimizer = torch.optim.AdamW(model.parameters())
    inputs = torch.randn(8, 32, 64)

    def step() -> None:
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    held_bytes = LiveBytes().add(model, optimizer, inputs).current_bytes
    with LiveBytes().add(model, optimizer, inputs) as live:
        step()
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        step()
    assert profile.profiler is not None
    changes = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    recorded = list(
        accumulate(event.nbytes() for event in sorted(changes, key=lambda event: event.start_ns()))
    )
    assert live.peak_bytes == pytest.approx(held_bytes + max(recorded), rel=0.001)
    assert live.current_bytes - held_bytes == recorded[-1] == 0
