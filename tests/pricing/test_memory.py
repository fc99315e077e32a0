"""The closed form: the largest of the operations' polynomials, fitted from few traces, never falling, safely stored."""

import json
import timeit

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmlab.errors import DataError, OptionError
from mmlab.lab.notebook import draw_sizes
from mmlab.pricing.closed_form import EXPONENTS, fit_rows, held_out_errors
from mmlab.pricing.memory import MemoryModel
from mmlab.schedule.cost import batch_costs
from mmlab.schedule.schedulers import make_scheduler
from mmlab.types import BatchShape, aspect

MIB = 2**20


def draw_shapes(num, *, seed, most_samples, most_tokens, most_side):
    rng = np.random.default_rng(seed)
    sides = 16 * rng.integers(2, most_side // 16 + 1, (2, num))
    return np.stack(
        [rng.integers(1, most_samples + 1, num), rng.integers(3, most_tokens + 1, num), *sides], axis=1
    )


PROBES = draw_shapes(14, seed=1, most_samples=32, most_tokens=128, most_side=288)
UNSEEN = draw_shapes(200, seed=2, most_samples=128, most_tokens=256, most_side=400)


def simulate(shapes, *, seed=0, num_operations=400):
    """(n, E) live bytes of a made-up step: tensors of every kind come and go, each rounded up to 512 bytes."""
    rng = np.random.default_rng(seed)
    at = np.stack([shapes[:, 0], shapes[:, 1], shapes[:, 2] // 16 * (shapes[:, 3] // 16)], axis=1)
    powers = np.array(EXPONENTS)[rng.integers(len(EXPONENTS), size=num_operations // 2)]
    each = rng.choice([4, 256, 3072], len(powers)) / (1 + powers.sum(axis=1) ** 4)
    tensors = 512 * np.ceil((at[:, None].astype(float) ** powers).prod(axis=2) * each / 512)
    born = rng.integers(0, num_operations, len(powers))
    lives = rng.integers(1, num_operations // 2, len(powers))
    alive = np.arange(num_operations) - born[:, None]
    return (50 * MIB + tensors @ ((alive >= 0) & (alive < lives[:, None]))).astype(np.int64)


@pytest.mark.parametrize("seed", range(6))
def test_unseen_shapes_ten_times_larger_are_predicted_from_fourteen_traces(seed):
    rows = fit_rows(PROBES, simulate(PROBES, seed=seed))
    found = simulate(UNSEEN, seed=seed).max(axis=1)
    assert found.max() > 10 * simulate(PROBES, seed=seed).max()
    errors = held_out_errors(batch_costs(rows, UNSEEN), found)
    assert errors["p95_ratio"] <= 0.0025
    assert errors["worst_under_ratio"] <= 0.0025


def test_the_peak_moves_from_one_operation_to_another():
    """What makes a fit of the peaks fail: which operation is the largest depends on the shape."""
    count, text, height, width = PROBES.T.astype(np.int64)
    live = np.stack([MIB + 9000 * count * text, MIB + 30 * count * height * width], axis=1)
    rows = fit_rows(PROBES, live, step_peak_bytes=3 * MIB)
    assert len(rows.coefficients) == 3
    assert rows(BatchShape(1, 1, 16, 16)) == 3 * MIB
    assert rows(BatchShape(64, 500, 16, 16)) == pytest.approx(MIB + 9000 * 64 * 500)
    assert rows(BatchShape(64, 5, 320, 480)) == pytest.approx(MIB + 30 * 64 * 320 * 480)


def test_operations_that_cannot_be_the_largest_are_dropped():
    live = simulate(PROBES)
    rows = fit_rows(PROBES, live)
    assert len(rows.coefficients) <= 20
    again = fit_rows(PROBES, np.concatenate([live, live // 2, live], axis=1))
    assert again.coefficients == pytest.approx(rows.coefficients)


ROWS = fit_rows(PROBES, simulate(PROBES), step_peak_bytes=80 * MIB)
MODEL = MemoryModel(
    rows=ROWS, fingerprint="0123", conditions={"precision": "bf16", "checkpointing": False, "device": "cuda"}
)


@given(*[st.integers(1, most) for most in (1000, 1000, 40, 40)], st.integers(0, 3), st.integers(1, 64))
def test_a_prediction_never_falls_when_a_dimension_grows(count, text, high, wide, grown, more):
    smaller = [count, text, 16 * high, 16 * wide]
    larger = list(smaller)
    larger[grown] += more
    assert MODEL(BatchShape(*larger)) >= MODEL(BatchShape(*smaller)) > 0


def test_noise_does_not_make_a_prediction_fall():
    noisy = simulate(PROBES) + np.random.default_rng(0).integers(0, 4 * MIB, (14, 400))
    assert fit_rows(PROBES, noisy).coefficients.min() >= 0


def test_a_dimension_that_never_varied_has_no_part():
    shapes = PROBES.copy()
    shapes[:, 2:] = 224
    rows = fit_rows(shapes, simulate(shapes))
    assert not rows.exponents[:, 2].any()
    unseen = UNSEEN.copy()
    unseen[:, 2:] = 224
    assert batch_costs(rows, unseen) == pytest.approx(simulate(unseen).max(axis=1), rel=0.0025)


def test_too_few_traces_are_refused():
    with pytest.raises(OptionError, match="12 terms need as many traced shapes, found 9"):
        fit_rows(PROBES[:9], simulate(PROBES[:9]))


@pytest.mark.serial
def test_one_prediction_takes_at_most_twenty_microseconds():
    shape = BatchShape(16, 40, 224, 320)
    assert min(timeit.repeat(lambda: MODEL(shape), number=200, repeat=20)) / 200 < 20e-6


def test_a_saved_model_predicts_the_same(tmp_path):
    MODEL.save(tmp_path / "memory.json")
    loaded = MemoryModel.load(tmp_path / "memory.json", fingerprint="0123", conditions={"precision": "bf16"})
    assert batch_costs(loaded, UNSEEN).tolist() == batch_costs(MODEL, UNSEEN).tolist()
    assert loaded.conditions == MODEL.conditions
    assert loaded.unit == "bytes"


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ({"fingerprint": "4567"}, "model: fitted for 0123, not 4567"),
        ({"conditions": {"precision": "fp32"}}, "precision: fitted for bf16, not fp32"),
        ({"conditions": {"checkpointing": True}}, "checkpointing: fitted for False, not True"),
        ({"conditions": {"attention": "math"}}, "attention: fitted for None, not math"),
    ],
)
def test_a_model_fitted_for_something_else_is_refused_and_says_what(tmp_path, asked, named):
    MODEL.save(tmp_path / "memory.json")
    with pytest.raises(OptionError, match=named):
        MemoryModel.load(tmp_path / "memory.json", **asked)


def test_a_model_of_other_versions_is_refused(tmp_path):
    MODEL.save(tmp_path / "memory.json")
    document = json.loads((tmp_path / "memory.json").read_text())
    document["versions"]["torch"] = "1.0"
    (tmp_path / "memory.json").write_text(json.dumps(document))
    with pytest.raises(OptionError, match=r"torch: fitted for 1\.0, not "):
        MemoryModel.load(tmp_path / "memory.json")


@pytest.mark.parametrize("text", ["", "[]", "3", '"text"', '{"rows": {}}', "{}"])
def test_another_file_is_no_memory_model(tmp_path, text):
    (tmp_path / "other.json").write_text(text)
    with pytest.raises(DataError, match=r"other\.json is not a memory model"):
        MemoryModel.load(tmp_path / "other.json")


def test_a_memory_model_that_is_not_there_or_has_other_parts_is_named(tmp_path):
    with pytest.raises(DataError, match=r"none\.json is not a memory model .*No such file"):
        MemoryModel.load(tmp_path / "none.json")
    MODEL.save(tmp_path / "memory.json")
    document = json.loads((tmp_path / "memory.json").read_text())
    (tmp_path / "memory.json").write_text(json.dumps({**document, "versions": None}))
    with pytest.raises(DataError, match=r"memory\.json is not a memory model"):
        MemoryModel.load(tmp_path / "memory.json")


def test_calibration_raises_but_never_lowers():
    shape = BatchShape(24, 60, 224, 224)
    predicted = MODEL(shape)
    raised = MODEL.calibrated(shape, round(predicted) + MIB)
    assert raised(shape) == pytest.approx(predicted + MIB, abs=1)
    assert raised(BatchShape(1, 5, 16, 16)) == pytest.approx(MODEL(BatchShape(1, 5, 16, 16)) + MIB, abs=1)
    assert raised.offset_bytes == pytest.approx(MIB, abs=1)
    assert MODEL.calibrated(shape, round(predicted) - MIB)(shape) == predicted


@pytest.mark.parametrize("share", [0.9, 1.1])
def test_a_measurement_of_another_step_is_pointed_out(share):
    shape = BatchShape(24, 60, 224, 224)
    with pytest.warns(UserWarning, match=r"10\.0% from the predicted.*is it the same step \(precision bf16"):
        MODEL.calibrated(shape, round(share * MODEL(shape)))


def test_the_memory_scheduler_fills_the_limit_and_never_exceeds_it():
    sizes = draw_sizes(4000).resized(aspect(224**2))
    limit_bytes = 300 * MIB
    plan = make_scheduler("memory", cost=MODEL, budget=limit_bytes).plan(sizes)
    used = batch_costs(MODEL, plan.shape_columns) / limit_bytes
    assert used.max() <= 0.97
    assert used.mean() >= 0.92


def test_the_largest_batch_fits_and_one_more_does_not():
    size = MODEL.max_batch_size(40, 224, 320, limit_bytes=400 * MIB)
    assert MODEL(BatchShape(size, 40, 224, 320)) <= 400 * MIB < MODEL(BatchShape(size + 1, 40, 224, 320))
    assert MODEL.max_batch_size(40, 224, 320, limit_bytes=MIB) == 0
