"""Seconds of a step: recovered from timings, robust to noise, summed over a plan, and refused where they do not hold."""

import json
import math
from dataclasses import replace
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch

from mmlab.data.collate import collate
from mmlab.data.dataset import MultimodalDataset
from mmlab.errors import BOUNDS, DataError, OptionError
from mmlab.lab.notebook import draw_sizes
from mmlab.machine import num_usable_cores
from mmlab.model.presets import build_model
from mmlab.pricing import timing
from mmlab.pricing.fingerprint import fingerprint
from mmlab.pricing.memory import MemoryModel
from mmlab.pricing.plan_prices import PlanPrices
from mmlab.pricing.time_model import TIME_EXPONENTS, TimeModel, fit_polynomial, fit_seconds
from mmlab.pricing.timing import (
    fit_time,
    loading_seconds,
    low_seconds,
    probe_shapes,
    time_conditions,
    timed_trainer,
)
from mmlab.schedule.cost import FREE, MaxPolynomial, PaddedTokens, batch_costs
from mmlab.schedule.plan import BatchPlan
from mmlab.schedule.preview import preview
from mmlab.schedule.schedulers import make_scheduler
from mmlab.training.loop import FusionTrainer
from mmlab.training.noise import noise_batch, noise_sample
from mmlab.types import BatchShape, SampleSizes, aspect, square
from tests.loading.loaders import Slow
from tests.pricing.priced_models import MODELS

SIZES = draw_sizes(2000).resized(aspect(96 * 96))
TRUE = MaxPolynomial([[0.03, 9e-4, 2e-5, 5e-5, 1e-8, 7e-8, 1e-6]], list(TIME_EXPONENTS), unit="seconds")
SHAPES = probe_shapes(SIZES, 24, PaddedTokens(), 4096)
PROBES, UNSEEN = SHAPES[:16], SHAPES[16:]
MODEL = TimeModel(
    rows=TRUE, fingerprint="0123", conditions={"device": "some CPU", "precision": "fp32"}, spread_ratio=0.02
)


def test_exact_timings_are_recovered():
    fitted = fit_polynomial(PROBES, batch_costs(TRUE, PROBES))
    assert fitted.coefficients == pytest.approx(TRUE.coefficients, rel=1e-6)
    assert fitted.unit == "seconds"
    fitted = fit_seconds(PROBES, batch_costs(TRUE, PROBES))  # with fewer terms
    assert batch_costs(fitted, UNSEEN) == pytest.approx(batch_costs(TRUE, UNSEEN), rel=0.03)


def test_terms_that_grow_faster_are_taken_where_they_are_needed():
    sizes = draw_sizes(400).resized(aspect(512 * 512))
    shapes = probe_shapes(sizes, 24, PaddedTokens(), 40_000)
    attention = MaxPolynomial(
        [[0.05, 1e-3, 2e-5, 2e-5, 4e-8]], [*TIME_EXPONENTS[:4], (1, 0, 2)], unit="seconds"
    )
    noise = np.random.default_rng(0).lognormal(sigma=0.03, size=24)
    fitted = fit_seconds(shapes[:16], noise[:16] * batch_costs(attention, shapes[:16]))
    assert (1, 0, 2) in map(tuple, fitted.exponents.tolist())
    assert batch_costs(fitted, shapes[16:]) == pytest.approx(batch_costs(attention, shapes[16:]), rel=0.1)


@pytest.mark.parametrize("seed", range(6))
def test_noise_hardly_changes_the_epoch_that_the_fastest_plan_takes(seed):
    """Noise of 15 %, as a virtual machine has it; with all terms the worst of these epochs takes 7 % longer."""
    sizes = draw_sizes(400).resized(aspect(80 * 80))
    shapes = probe_shapes(sizes, 16, PaddedTokens(), 4096)
    true = MaxPolynomial([[0.033, 9e-4, 1.7e-5, 2.1e-5]], TIME_EXPONENTS[:4], unit="seconds")
    noise = 1 + np.abs(np.random.default_rng(seed).normal(0, 0.15, 16))
    epochs = [
        make_scheduler("fastest", budget=4096, time=time).plan(sizes).costs(true).sum()
        for time in (true, fit_seconds(shapes, noise * batch_costs(true, shapes)))
    ]
    assert epochs[1] <= 1.02 * epochs[0]


@pytest.mark.parametrize("seed", range(6))
def test_a_machine_that_is_slower_with_large_batches_only_while_it_is_measured_still_gives_a_fast_plan(seed):
    """With a term for pairs in the batch, the worst of these epochs takes 21 % longer."""
    sizes = draw_sizes(400).resized(aspect(80 * 80))
    shapes = probe_shapes(sizes, 12, PaddedTokens(), 4096)
    true = MaxPolynomial([[0.012, 5e-5, 2e-5, 3.4e-5]], TIME_EXPONENTS[:4], unit="seconds")
    seconds, rng = batch_costs(true, shapes), np.random.default_rng(seed)
    largest = np.argsort(seconds)[-4:]
    seconds *= 1 + np.abs(rng.normal(0, 0.03, 12))
    seconds[largest] *= 1 + np.abs(rng.normal(0, 0.5, 4))
    epochs = [
        make_scheduler("fastest", budget=4096, time=time).plan(sizes).costs(true).sum()
        for time in (true, fit_seconds(shapes, seconds))
    ]
    assert epochs[1] <= 1.03 * epochs[0]


def test_a_fit_without_a_constant_does_not_plan_single_samples():
    sizes = draw_sizes(16, captions_per_image=2).resized(aspect(224 * 224))
    shapes = probe_shapes(sizes, 12, PaddedTokens(), 4096)
    seconds = batch_costs(MaxPolynomial([[4.4e-5]], [(1, 0, 1)], unit="seconds"), shapes)
    fitted = fit_seconds(shapes, seconds)
    assert fitted.coefficients[0, 0] == pytest.approx(0.1 * seconds.min())
    plan = make_scheduler("fastest", budget=4096, time=fitted).plan(sizes)
    assert max(map(len, plan)) > 1


@pytest.mark.filterwarnings("ignore:repeats of one step")
@pytest.mark.parametrize("seed", range(5))
def test_other_work_on_the_machine_does_not_spoil_the_fit(seed):
    """Other work adds up to half of a step to some repeats; a low quantile leaves most of it out."""
    rng = np.random.default_rng(seed)
    busy = rng.random((24, 8)) < 0.4
    times = batch_costs(TRUE, SHAPES)[:, None] * (
        1 + 0.01 * rng.random((24, 8)) + 0.5 * busy * rng.random((24, 8))
    )
    low_s, spread_ratio = low_seconds(times)
    fitted = fit_seconds(PROBES, low_s[:16])
    errors = np.abs(batch_costs(fitted, UNSEEN) / batch_costs(TRUE, UNSEEN) - 1)
    assert fitted.coefficients.min() >= 0
    assert np.median(errors) <= 0.05
    assert spread_ratio > 0.01


def test_a_noisy_machine_is_not_passed_over():
    times = np.full((24, 8), 0.1)
    times[:, :4] = 0.13
    with pytest.warns(UserWarning, match=r"repeats of one step vary by 30%.*nothing else runs"):
        low_seconds(times)


def test_a_dimension_that_never_varied_has_no_part():
    shapes = SHAPES.copy()
    shapes[:, 2:] = 96
    fitted = fit_polynomial(shapes, batch_costs(TRUE, shapes))
    assert not fitted.exponents[:, 2].any()
    assert batch_costs(fitted, shapes) == pytest.approx(batch_costs(TRUE, shapes), rel=1e-6)


def test_probes_span_the_data_within_the_budget():
    assert (probe_shapes(SIZES, 24, PaddedTokens(), 4096) == SHAPES).all()
    assert batch_costs(PaddedTokens(), SHAPES).max() <= 4096
    size, tokens, *_ = PROBES.T
    assert size.min() >= 2
    assert size.max() >= 10 * size.min()
    assert tokens.max() >= 2 * tokens.min()
    logs = np.log([size, tokens, PROBES[:, 2] * PROBES[:, 3]])
    assert np.abs(np.corrcoef(logs) - np.eye(3)).max() < 0.7


def test_steps_that_take_far_longer_than_allowed_are_left_to_extrapolation(monkeypatch):
    """As of photographs in all the memory of a machine without a GPU: its largest steps take minutes each."""
    trainer = timing.timed_trainer(build_model("tiny", vocab_size=100), device="cpu")
    second = batch_costs(PaddedTokens(), SHAPES).sum() / 10  # tokens that a step computes in a second

    def slow(_, batch):
        return PaddedTokens()(batch.shape) / second

    monkeypatch.setattr(timing, "timed_step", slow)
    given = trainer, SIZES, len(SHAPES), PaddedTokens()
    assert (timing._affordable_shapes(*given, 4096, seconds=16) == SHAPES).all(), "three rounds take 30 s"
    shapes = timing._affordable_shapes(*given, 4096, seconds=5)
    assert 3 * batch_costs(PaddedTokens(), shapes).sum() / second <= 10
    assert len(shapes) == len(SHAPES)
    two = timing._affordable_shapes(*given, 4096, seconds=1e-6)
    assert batch_costs(PaddedTokens(), two).max() < 1024, (
        "two of the largest samples are measured all the same"
    )


def test_a_budget_below_two_of_the_largest_samples_is_refused():
    with pytest.raises(
        OptionError,
        match=r"two samples can cost \d+ padded tokens, and a batch may cost 20; give a budget \(or memory_gb\)",
    ):
        probe_shapes(SIZES, 8, PaddedTokens(), 20)


def test_data_of_one_size_can_be_timed():
    same = SampleSizes(num_tokens=[7] * 4, height=[64] * 4, width=[64] * 4, group=range(4))
    shapes = probe_shapes(same, 8, PaddedTokens(), 1000)
    assert (shapes[:, 1:] == (7, 64, 64)).all()
    assert len(np.unique(shapes[:, 0])) > 4


def test_a_batch_has_the_shape_asked_for_and_padding():
    batch = noise_batch(BatchShape(5, 9, 48, 64), num_ids=16, ragged=True)
    assert batch.shape == (5, 9, 48, 64)
    assert not batch.attention_mask.all()
    assert not batch.pixel_mask.all()
    assert noise_batch(BatchShape(2, 1, 16, 16), num_ids=16, ragged=True).shape == (2, 1, 16, 16)


def test_an_epoch_is_the_sum_of_its_steps():
    plan = make_scheduler("random", batch_size=16).plan(SIZES)
    seconds = [MODEL(shape) for shape in plan.shapes]
    assert MODEL.epoch_s(plan) == pytest.approx(sum(seconds))
    pairs = [seconds[start : start + 3] for start in range(0, len(seconds), 3)]
    assert MODEL.epoch_s(plan, num_ranks=3) == pytest.approx(sum(map(max, pairs)))


@pytest.mark.parametrize(("name", "other"), [("precision", "bf16"), ("checkpointing", True)])
def test_time_and_memory_of_different_steps_are_refused(name, other):
    time = replace(MODEL, conditions={"precision": "fp32", "checkpointing": False})
    memory = MemoryModel(rows=FREE, fingerprint="0123", conditions={**time.conditions, name: other})
    with pytest.raises(
        OptionError, match=f"time is of {name} {time.conditions[name]}, cost of {name} {other}"
    ):
        make_scheduler("fastest", time=time, cost=memory, budget=1e9)
    with pytest.raises(OptionError, match="time is of model 0123, cost of model 4567"):
        make_scheduler("fastest", time=time, cost=replace(memory, fingerprint="4567"), budget=1e9)


def test_slow_data_count_where_they_take_longer_than_the_step():
    plan = BatchPlan.from_batches([range(40), [40]], SIZES)
    slow = TimeModel(rows=TRUE, fingerprint="0123", conditions={}, data_s_per_sample=0.01)
    assert slow.batch_s(plan) == pytest.approx([0.4, MODEL(plan.shapes[1])])


def test_loading_on_the_same_cores_makes_every_step_longer():
    plan = BatchPlan.from_batches([range(40), [40]], SIZES)
    shared = replace(MODEL, shared_s_per_sample=0.002, data_s_per_sample=0.001)
    assert shared.batch_s(plan) == pytest.approx(
        [MODEL(plan.shapes[0]) + 0.08, MODEL(plan.shapes[1]) + 0.002]
    )


def test_loading_is_measured_as_the_loader_will_do_it(records, monkeypatch):
    dataset = MultimodalDataset(records, image_policy=aspect(96 * 96))
    model = build_model("tiny", vocab_size=len(dataset.tokenizer))
    trainer = timing.timed_trainer(model, device="cpu")
    alone = loading_seconds(dataset, trainer, num_workers=0)
    assert alone["data_s_per_sample"] == 0  # between two steps
    assert 1e-5 < alone["shared_s_per_sample"] < 0.1
    ticks = count()
    monkeypatch.setattr(timing.time, "thread_time", lambda: float(next(ticks)))  # each batch takes a second
    with monkeypatch.context() as patched:
        patched.setattr(timing.torch, "get_num_threads", lambda: 0)  # the steps leave cores free
        one, two = (loading_seconds(dataset, trainer, num_workers=number) for number in (1, 2))
    assert one["shared_s_per_sample"] == two["shared_s_per_sample"] == 0
    share = min(2, num_usable_cores())
    assert one["data_s_per_sample"] == share * two["data_s_per_sample"] > 0
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(num_usable_cores())
        found = loading_seconds(dataset, trainer, num_workers=1, augment=Slow(0.02))
        assert found["shared_s_per_sample"] > 0.016, (
            "a slower loader makes a step longer, by its half at least"
        )
    finally:
        torch.set_num_threads(threads)


def test_the_first_batch_of_a_shape_takes_longer():
    same = SampleSizes(num_tokens=[9] * 12, height=[64] * 12, width=[48] * 12, group=range(12))
    plan = BatchPlan.from_batches([range(5), range(5, 10), [10, 11]], same)
    model = TimeModel(rows=TRUE, fingerprint="0123", conditions={}, new_shape_s=0.5)
    assert model.batch_s(plan) - MODEL.batch_s(plan) == pytest.approx([0.5, 0, 0.5])


def test_only_new_numbers_and_sizes_of_images_take_longer():
    sizes = SampleSizes(
        num_tokens=[9, 9, 7, 7, 7, 7], height=[64] * 4 + [80] * 2, width=[48] * 6, group=range(6)
    )
    plan = BatchPlan.from_batches([[0, 1], [2, 3], [4, 5]], sizes)
    model = replace(MODEL, new_shape_s=0.5)
    assert model.batch_s(plan) - MODEL.batch_s(plan) == pytest.approx([0.5, 0, 0.5])


def test_a_batch_of_one_image_takes_no_step_where_the_loss_is_contrastive_alone():
    """As in the trainer, whose step over such a batch is left out."""
    sizes = SampleSizes(num_tokens=[9] * 6, height=[64] * 6, width=[48] * 6, group=[0, 0, 1, 2, -1, -1])
    plan = BatchPlan.from_batches([[0, 1], [2, 3], [4, 5]], sizes)
    objectives = ("contrastive", "contrastive + matching")
    alone, both = (replace(MODEL, conditions={"objectives": names}) for names in objectives)
    assert (alone.batch_s(plan) > 0).tolist() == [False, True, True], "an unknown image is one of its own"
    assert both.batch_s(plan) == pytest.approx(MODEL.batch_s(plan))
    loaded = replace(alone, shared_s_per_sample=0.01).batch_s(plan)
    assert loaded[0] == pytest.approx(0.02), "its samples are loaded all the same"
    trainer = FusionTrainer(build_model("tiny", vocab_size=100), device="cpu")
    assert time_conditions(trainer)["objectives"] == objectives[0]
    generator, calls = torch.Generator().manual_seed(0), []
    trainer.model.register_forward_hook(lambda *call: calls.append(call))
    for batch in plan:
        samples = [
            noise_sample(int(sizes.group[row]), (9, 64, 48), num_ids=100, generator=generator)
            for row in batch
        ]
        trainer.train_step([collate(samples)])
    assert len(calls) == 2


def test_a_plan_without_a_step_has_no_seconds_and_is_not_called_the_fastest():
    """Three images, each alone in its batch under `sorted`: nothing is trained, which is not fast."""
    sizes = SampleSizes(num_tokens=[9] * 3, height=[64] * 3, width=[48] * 3, group=[0, 1, 2])
    prices = PlanPrices(
        memory=MemoryModel(rows=replace(TRUE, unit="bytes"), fingerprint="0123", conditions={}),
        time=replace(MODEL, conditions={"objectives": "contrastive"}),
        limit_bytes=1.0,
        price_per_hour=2.0,
    )
    planners = {name: make_scheduler(name, batch_size=size) for name, size in (("random", 3), ("sorted", 1))}
    found = preview(sizes, planners, prices=prices.figures)
    assert found.figures["sorted"]["epoch_s"] is None
    assert found.figures["sorted"]["epoch_price"] is None
    epoch_s = found.figures["random"]["epoch_s"]
    assert epoch_s == pytest.approx(MODEL(BatchShape(3, 9, 64, 48)))
    assert found.figures["random"]["epoch_price"] == pytest.approx(epoch_s / 3600 * 2.0)
    assert found.headline == ""


def test_a_packed_plan_counts_samples_without_padding():
    same = SampleSizes(num_tokens=[9] * 300, height=[64] * 300, width=[48] * 300, group=range(300))
    packed = make_scheduler("packed", budget=512).plan(same)
    assert packed.limits.streams is not None
    assert MODEL.batch_s(packed) == pytest.approx(batch_costs(MODEL, packed.shape_columns))
    mixed = make_scheduler("packed", budget=512).plan(SIZES)
    assert (MODEL.batch_s(mixed) <= batch_costs(MODEL, mixed.shape_columns) + 1e-12).all()


def test_a_saved_model_predicts_the_same(tmp_path):
    MODEL.save(tmp_path / "time.json")
    loaded = TimeModel.load(tmp_path / "time.json", fingerprint="0123", conditions={"precision": "fp32"})
    assert batch_costs(loaded, UNSEEN).tolist() == batch_costs(MODEL, UNSEEN).tolist()
    assert (loaded.conditions, loaded.spread_ratio, loaded.unit) == (MODEL.conditions, 0.02, "seconds")


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ({"fingerprint": "4567"}, "model: fitted for 0123, not 4567"),
        ({"conditions": {"device": "H100"}}, "device: fitted for some CPU, not H100"),
    ],
)
def test_a_time_model_of_another_model_or_machine_is_refused(tmp_path, asked, named):
    MODEL.save(tmp_path / "time.json")
    with pytest.raises(OptionError, match=f"{named}.*fit the time model again"):
        TimeModel.load(tmp_path / "time.json", **asked)


@pytest.mark.filterwarnings("ignore:repeats of one step")
def test_seconds_kept_from_another_machine_are_measured_anew(tmp_path):
    kept, model = tmp_path / "time_model.json", MODELS["tiny"]()

    def load_or_fit() -> TimeModel:
        return TimeModel.load_or_fit(
            kept,
            lambda: fit_time(
                model, SIZES, device="cpu", num_held_out=0, repeats=2, budget=300, progress=False
            ),
            fingerprint=fingerprint(model),
            conditions=lambda: timing.time_conditions(timing.timed_trainer(model, device="cpu")),
        )

    found, written = load_or_fit(), kept.read_text()
    load_or_fit()
    assert kept.read_text() == written
    other = {"device": "another CPU", "precision": "fp16", "num_threads": 99}
    replace(found, conditions={**found.conditions, **other}).save(kept)
    with pytest.warns(
        UserWarning, match="fit the time model again: fitted again, so plans may differ"
    ) as said:
        anew = load_or_fit()
    for name, value in other.items():
        assert f"{name}: fitted for {value}, not {found.conditions[name]}" in " ".join(
            str(warning.message) for warning in said
        )
    assert anew.conditions == found.conditions == TimeModel.load(kept).conditions


def test_a_damaged_file_is_fitted_anew_and_said(tmp_path):
    kept, whole = tmp_path / "time.json", replace(MODEL, spread_ratio=0.01)
    whole.save(kept)
    kept.write_text(kept.read_text()[:-200])
    asked = {"fingerprint": MODEL.fingerprint, "conditions": lambda: MODEL.conditions}
    with pytest.warns(
        UserWarning, match="time.json is not a time model that mmlab saved.*: fitted again, so"
    ):
        assert TimeModel.load_or_fit(kept, lambda: MODEL, **asked) is MODEL
    assert TimeModel.load_or_fit(kept, lambda: whole, **asked).spread_ratio == MODEL.spread_ratio


def test_a_memory_model_is_no_time_model(tmp_path):
    MemoryModel(rows=FREE, fingerprint="0123", conditions={}).save(tmp_path / "memory.json")
    with pytest.raises(DataError, match=r"memory\.json is not a time model"):
        TimeModel.load(tmp_path / "memory.json")
    document = json.loads((tmp_path / "memory.json").read_text())
    assert document["offset_bytes"] == 0


@pytest.mark.filterwarnings("ignore:repeats of one step")
@pytest.mark.parametrize("name", ["tiny", "clip"])
def test_real_steps_are_measured_on_a_copy(name):
    model = MODELS[name]()
    sizes = SIZES if name == "tiny" else draw_sizes(200).resized(square(64))  # CLIP takes one image size
    before = {key: value.clone() for key, value in model.state_dict().items()}
    torch.manual_seed(3)
    state = torch.get_rng_state()
    fitted = fit_time(
        model, sizes, device="cpu", budget=600, num_probes=8, num_held_out=2, repeats=2, progress=False
    )
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert all(weight.grad is None for weight in model.parameters())
    assert fitted.conditions["method"] == "measured"
    assert fitted.conditions["precision"] == "fp32"
    assert fitted.held_out["num_shapes"] == 2
    small, large = (BatchShape(size, 20, 64, 64) for size in (2, 24))
    assert 0 < fitted(small) <= fitted(large) < 5


def test_a_model_without_weights_cannot_be_measured():
    with torch.device("meta"):
        model = MODELS["tiny"]()
    with pytest.raises(OptionError, match=r"no weights to measure a step with.*predict"):
        fit_time(model, SIZES, device="cpu")


def test_the_least_number_of_probes_is_that_of_the_terms() -> None:
    assert BOUNDS["num_probes"][0] == len(TIME_EXPONENTS)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_probes": 4}, "num_probes must be at least 7, found 4"),
        ({"num_held_out": -1}, "num_held_out must be at least 0, found -1"),
        ({"repeats": 0}, "repeats must be at least 1, found 0"),
        ({"budget": math.inf}, "budget must be finite, found inf"),  # its batches would never be small enough
        ({"budget": math.nan}, "budget must be above 0, found nan"),
        ({"budget": 10}, "that holds two of the largest"),
    ],
)
def test_what_no_fit_can_be_made_of_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        fit_time(MODELS["tiny"](), SIZES, **{"device": "cpu", "progress": False, **options})


def test_the_trainers_own_options_may_be_given_whole() -> None:
    trainer = timed_trainer(MODELS["tiny"](), device="cpu", lr=0.1, on_out_of_memory="split")
    assert trainer.options.lr == 0.0
