"""Difficult samples count for more, by exactly as much as is said, and for no more where that is corrected."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from mmlab.data.dataset import MultimodalDataset
from mmlab.data.records import Records
from mmlab.errors import OptionError
from mmlab.loading.adaptive import AdaptiveDataLoader, difficulty
from mmlab.model.huggingface import LossModel
from mmlab.model.presets import build_model
from mmlab.pricing.resource_aware import ResourceAwareScheduler
from mmlab.schedule.schedulers import make_scheduler
from mmlab.training.loop import FusionTrainer
from mmlab.training.losses.contrastive import Contrastive, Matching
from mmlab.training.losses.names import OwnLoss
from mmlab.types import Aspect, Batch
from tests.batches import make_batch


@pytest.fixture(scope="module")
def dataset(records: Records) -> MultimodalDataset:
    return MultimodalDataset(records, image_policy=Aspect(32 * 32, 16))


def in_process(dataset: MultimodalDataset, **options: object) -> AdaptiveDataLoader:
    return AdaptiveDataLoader(dataset, num_workers=0, progress=False, **options)


def drawn(loader: AdaptiveDataLoader, epoch: int) -> np.ndarray:
    return loader.scheduler.plan(loader.dataset.sizes, epoch=epoch).columns.order


def test_the_articles_call_trains(dataset: MultimodalDataset) -> None:
    loader = AdaptiveDataLoader(dataset, batch_size=8)
    assert len(loader) == 9
    model = build_model("tiny", vocab_size=len(dataset.tokenizer))
    steps = FusionTrainer(model, device="cpu").fit(loader)
    assert sum(step["num_samples"] for step in steps) == len(dataset)
    assert all(np.isfinite(step["loss"]) for step in steps)


@given(
    st.lists(
        st.tuples(st.one_of(st.just(np.nan), st.floats(0, 6)), st.integers(0, 500)), min_size=1, max_size=50
    ),
)
def test_difficulty_has_mean_one_in_the_articles_parts(samples) -> None:
    complexity, num_tokens = (np.array(column) for column in zip(*samples, strict=True))
    whole = difficulty(complexity, num_tokens)
    assert whole.mean() == pytest.approx(1)
    assert (whole >= 0.1).all()
    image, text = difficulty(complexity, 0 * num_tokens), difficulty(np.nan * complexity, num_tokens)
    assert whole - 1 == pytest.approx(
        (image - 1) + (text - 1), abs=1e-9
    )  # a missing modality neither raises nor lowers


@pytest.mark.parametrize("num_samples", [None, 20, 200])
def test_corrected_sampling_has_the_expectation_of_the_data_exactly(dataset, num_samples) -> None:
    """Mean of drawn w f = 1/m sum of E[times] w f, and E[times] w = m / N for every sample."""
    loader = in_process(dataset, batch_size=8, correct=True, num_samples=num_samples)
    expected = loader.scheduler.expected_times() * loader.weights
    assert expected == pytest.approx((num_samples or len(dataset)) / len(dataset), rel=1e-12)
    assert loader.weights.max() <= 10


def test_corrected_sampling_is_unbiased_over_many_epochs(dataset) -> None:
    """The exact expectation above is also that of the draws; without the correction they are far off."""
    loader = in_process(dataset, batch_size=8, correct=True, num_samples=24)
    value = np.square(loader.dataset.records.num_tokens.astype(float))
    plain, corrected = [], []
    for epoch in range(400):
        rows = drawn(loader, epoch)
        plain.append(value[rows].mean())
        corrected.append((loader.weights[rows] * value[rows]).mean())
    standard_error = np.std(corrected) / np.sqrt(400)
    assert abs(np.mean(corrected) - value.mean()) < 4 * standard_error
    assert abs(np.mean(plain) - value.mean()) > 10 * standard_error


def test_both_modes_expect_the_same_gradient(dataset) -> None:
    by_draw, by_loss = in_process(dataset), in_process(dataset, mode="loss")
    assert by_draw.weights is None
    assert by_draw.scheduler.expected_times() == pytest.approx(by_loss.weights)
    assert sorted(drawn(by_loss, 1)) == list(range(len(dataset)))


@pytest.mark.parametrize("options", [{"mode": "loss"}, {"correct": True}], ids=["loss", "corrected"])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_each_weight_reaches_its_own_sample(dataset, options, num_workers) -> None:
    loader = AdaptiveDataLoader(dataset, 5, num_workers=num_workers, progress=False, **options)
    row_of = {record_id: row for row, record_id in enumerate(dataset.records.ids)}
    loader.set_epoch(3)
    seen: Counter[int] = Counter()
    for batch in loader:
        rows = [row_of[record_id] for record_id in batch.record_ids]
        assert batch.weights.tolist() == pytest.approx(loader.weights[rows].tolist())
        assert torch.equal(batch.to("cpu").weights, batch.weights)
        seen.update(rows)
    assert seen == Counter(loader.plan.columns.order.tolist())


def test_any_scheduler_forms_the_batches(dataset) -> None:
    loader = in_process(dataset, scheduler=make_scheduler("budget", budget=300))
    assert loader.plan.report().num_over_budget == 0
    assert len({len(batch) for batch in loader}) > 1
    sorted_loader = in_process(dataset, mode="loss", scheduler=make_scheduler("sorted", batch_size=6))
    assert len(sorted_loader) == 12


def test_the_report_states_the_effect(dataset) -> None:
    by_draw, by_loss = in_process(dataset).report(), in_process(dataset, mode="loss").report()
    corrected = in_process(dataset, correct=True).report()
    assert by_loss["coverage"] == 1 > by_draw["coverage"] > 0.8
    assert by_draw["max_times_drawn"] == 2
    assert by_loss["counted_num_tokens"] > by_loss["mean_num_tokens"] * 1.01
    assert by_draw["counted_num_tokens"] == pytest.approx(by_loss["counted_num_tokens"], rel=0.05)
    assert abs(corrected["counted_num_tokens"] / corrected["mean_num_tokens"] - 1) < 0.05
    assert by_draw["effective_ratio"] < by_loss["effective_ratio"] < 1
    follows = ResourceAwareScheduler(1, planner=make_scheduler("random"), policy="halving")
    assert in_process(dataset, mode="loss", scheduler=follows).report() == by_loss


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "curriculum"}, "unknown mode 'curriculum'"),
        ({"batch_size": 8, "scheduler": make_scheduler("random")}, "not both"),
        ({"mode": "loss", "correct": True}, "need mode='sampling'"),
        ({"num_samples": 0}, "num_samples must be at least 1"),
        ({"scheduler": "bucket"}, r"scheduler must be a scheduler, as make_scheduler\(\) gives"),
    ],
)
def test_impossible_options_are_named(dataset, options, message) -> None:
    with pytest.raises(OptionError, match=message):
        in_process(dataset, **options)


def weighted_sum(objective, batch: Batch, weights: list[float] | None) -> torch.Tensor:
    """The objective's sum under weights, with the same model and the same drawn negatives each time."""
    torch.manual_seed(0)
    model = build_model("tiny", vocab_size=50).double()
    batch.weights = None if weights is None else torch.tensor(weights)
    torch.manual_seed(1)
    return objective(model(batch), batch)


@pytest.mark.parametrize("objective", [Contrastive(), Matching()], ids=["contrastive", "matching"])
def test_weights_multiply_each_samples_loss_and_leave_the_count(objective) -> None:
    batch = make_batch([(5, 32, 16), (3, 16, 16), (8, 16, 32), (4, 32, 32)])
    plain = weighted_sum(objective, batch, None)
    each = [weighted_sum(objective, batch, torch.eye(4)[row].tolist()) for row in range(4)]
    torch.testing.assert_close(weighted_sum(objective, batch, [1.0] * 4), plain)
    torch.testing.assert_close(torch.stack(each).sum(), plain)
    expected = 0.5 * each[0] + 2 * each[2] + each[3]
    torch.testing.assert_close(weighted_sum(objective, batch, [0.5, 0, 2, 1]), expected)
    assert objective.count(batch) == (4 if isinstance(objective, Contrastive) else 12)


def test_a_model_that_makes_its_own_mean_refuses_weights() -> None:
    class Own(nn.Module):
        def forward(self, input_ids: torch.Tensor) -> object: ...

    batch = make_batch([(5, 32, 16)])
    batch.weights = torch.ones(1)
    with pytest.raises(OptionError, match="computes its own mean loss"):
        OwnLoss(LossModel(Own()))(None, batch)
