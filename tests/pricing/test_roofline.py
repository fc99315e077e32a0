"""Work of traced operations, rooflines of named devices, and the seconds predicted from both."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from mmlab.errors import OptionError
from mmlab.lab.notebook import draw_sizes
from mmlab.pricing.devices import DEVICES, Device, find_device
from mmlab.pricing.roofline import predict_time
from mmlab.pricing.timing import probe_shapes
from mmlab.pricing.trace import StepTracer
from mmlab.pricing.work import NOTHING, Work, work_of
from mmlab.schedule.cost import PaddedTokens, batch_costs
from mmlab.schedule.plan import BatchPlan
from mmlab.training.loop import FusionTrainer
from mmlab.training.noise import noise_batch
from mmlab.types import BatchShape, aspect, square
from tests.pricing.priced_models import MODELS

ATEN = torch.ops.aten
SIZES = draw_sizes(200).resized(aspect(96 * 96))
SIMPLE = Device(
    name="simple",
    flops_per_s={"fp32": 1e9, "fp16": 4e9},
    bytes_per_s=1e8,
    launch_s=1e-3,
    memory_bytes=10**9,
    source="made up",
)


@pytest.fixture(scope="module")
def traces():
    tracer = StepTracer(MODELS["tiny"](), device="cpu")
    return [tracer(BatchShape(*shape)) for shape in probe_shapes(SIZES, 6, PaddedTokens(), 2000).tolist()]


def test_a_matrix_product_has_its_flops_and_bytes():
    a, b = torch.ones(3, 5), torch.ones(5, 7)
    assert work_of(ATEN.mm.default, (a, b), {}, a @ b) == Work(2 * 3 * 5 * 7, 4 * (15 + 35 + 21), "fp32")
    half = a.bfloat16()
    assert work_of(ATEN.add.Tensor, (half, half), {}, half + half) == Work(0, 2 * 3 * 15, "bf16")


def test_views_and_memory_without_values_take_no_time():
    a = torch.ones(3, 5)
    assert work_of(ATEN.t.default, (a,), {}, a.t()) == NOTHING
    assert work_of(ATEN.empty.memory_format, ([3, 5],), {}, torch.empty(3, 5)) == NOTHING


def test_what_is_written_in_place_counts_as_read_and_written():
    a, b = torch.ones(6), torch.ones(1).expand(6)
    assert work_of(ATEN.add_.Tensor, (a, b), {}, a) == Work(0, 4 * (6 + 1 + 6), "fp32")
    groups = ([a], [a.clone()], [a.clone()], [a.clone()], [], [torch.ones(())])
    written = (
        4 * (4 * 6 + 1) + 4 * 4 * 6 + 4
    )  # the gradients may be unscaled in place, the steps may be counted up
    assert work_of(ATEN._fused_adamw_.default, groups, {}, None).num_bytes == pytest.approx(written, abs=8)


def test_a_lookup_reads_the_rows_that_it_gives():
    table, rows = torch.ones(1000, 4), torch.tensor([1, 2])
    assert work_of(ATEN.embedding.default, (table, rows), {}, table[rows]).num_bytes == 2 * 2 * 4 * 4


def test_a_traced_step_has_the_flops_of_a_real_one():
    shape = BatchShape(4, 9, 48, 64)
    model = MODELS["tiny"]()
    traced = StepTracer(model, device="cpu")(shape)
    trainer = FusionTrainer(model, device="cpu")
    with FlopCounterMode(display=False) as counter:
        trainer.train_step([noise_batch(shape, num_ids=16, ragged=True)])
    assert sum(work.flops for work in traced.work) == pytest.approx(counter.get_total_flops(), rel=0.01)
    assert len(traced.work) == len(traced.operations)


@pytest.mark.parametrize(
    ("work", "seconds"),
    [
        (Work(10**9, 10**6, "fp32"), 1.0),  # arithmetic takes longest
        (Work(10**9, 10**6, "fp16"), 0.25),
        (Work(10**6, 10**8, "fp32"), 1.0),  # bytes
        (Work(10, 10, "fp32"), 1e-3),  # starting it
    ],
)
def test_an_operation_takes_as_long_as_what_limits_it(traces, work, seconds):
    once = replace(traces[0], work=(work, NOTHING))
    twice = replace(traces[0], work=(work, work))
    step_s = 700 * SIMPLE.launch_s  # of a step on a GPU, besides its operations
    assert SIMPLE.seconds(once) - step_s == pytest.approx(seconds)
    assert SIMPLE.seconds(twice) - step_s == pytest.approx(2 * seconds)
    work_s = seconds if seconds > SIMPLE.launch_s else 0.0
    assert replace(SIMPLE, kind="cpu").seconds(once) == pytest.approx(work_s + SIMPLE.launch_s, rel=1e-3)


def test_calibration_finds_the_rates_that_explain_measured_steps(traces):
    assumed = Device(
        name="some CPU", kind="cpu", flops_per_s={"fp32": 2e11}, bytes_per_s=5e10, launch_s=2e-5,
        memory_bytes=10**10, source="assumed",
    )  # fmt: skip
    true = replace(assumed, flops_per_s={"fp32": 8e10}, launch_s=9e-5)
    found = assumed.calibrated(traces[:4], [true.seconds(trace) for trace in traces[:4]])
    unseen = [found.seconds(trace) / true.seconds(trace) for trace in traces[4:]]
    # arithmetic was assumed 2.5 times too fast, and calibration holds rates to what was assumed
    assert unseen == pytest.approx(np.ones(2), abs=0.1)
    assert "calibrated by 4 measured steps" in found.source
    from_one = assumed.calibrated(traces[:1], [true.seconds(traces[0])])
    assert from_one.seconds(traces[0]) == pytest.approx(true.seconds(traces[0]), rel=0.1)


@pytest.mark.parametrize("name", ["A100", "a100-80gb", "NVIDIA A100 80GB"])
def test_a_device_is_found_by_any_spelling(name):
    assert find_device(name).name == "A100 80GB"


def test_an_unknown_device_is_refused_with_those_that_are_known():
    with pytest.raises(OptionError, match=r"unknown device 'H10'.*Known: A100 80GB, H100 SXM, H200, L4"):
        find_device("H10")


def test_every_device_states_its_source_and_has_sound_rates():
    for device in DEVICES:
        assert device.source.startswith("https://")
        assert device.flops_per_s["fp16"] > device.flops_per_s["fp32"] > 1e12
        assert 1e11 < device.bytes_per_s < 1e13
        assert find_device(device.name) is device


def test_a_precision_that_a_device_lacks_is_refused():
    with pytest.raises(OptionError, match="T4 does not support bf16, only fp32, fp16"):
        predict_time(MODELS["tiny"](), SIZES, "T4", precision="bf16")


def test_a_model_with_a_loss_of_its_own_takes_a_step_also_on_a_batch_of_one_sample():
    sizes = draw_sizes(20).resized(square(64))
    time = predict_time(MODELS["clip"](), sizes, "A100", progress=False)
    plan = BatchPlan.from_batches([[0], [1, 2]], sizes)
    assert time.batch_s(plan) == pytest.approx(batch_costs(time, plan.shape_columns))


def test_seconds_on_a_named_device_are_a_prediction_and_say_so():
    with torch.device("meta"):
        model = MODELS["tiny"]()
    models = {
        name: predict_time(model, SIZES, name, precision="fp16", progress=False) for name in ("T4", "H100")
    }
    shape, larger = BatchShape(500, 16, 96, 96), BatchShape(900, 16, 96, 96)
    for name, found in models.items():
        assert found.conditions["method"] == "predicted, not measured"
        assert found.conditions["device"].startswith(name)
        assert found.held_out["p50_ratio"] < 0.1
        assert found(larger) > found(shape)
    assert models["T4"](shape) > 2 * models["H100"](shape)
