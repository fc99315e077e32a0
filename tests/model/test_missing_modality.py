"""Records without an image or without a text flow from a manifest through batches and model to finite losses."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from mmlab.data.collate import collate
from mmlab.data.dataset import MultimodalDataset
from mmlab.data.readers import read_records
from mmlab.data.records import Records
from mmlab.loading.adaptive import AdaptiveDataLoader
from mmlab.loading.loader import PlannedLoader
from mmlab.model.fusion_model import FusionOutput
from mmlab.model.presets import build_model
from mmlab.schedule.mixing import MODALITIES, Mixed, modality_of
from mmlab.schedule.schedulers import make_scheduler
from mmlab.training.loop import FusionTrainer
from mmlab.training.losses.contrastive import Contrastive, Matching
from mmlab.types import Aspect, Batch


@pytest.fixture(scope="module")
def dataset(records: Records, tmp_path_factory: pytest.TempPathFactory) -> MultimodalDataset:
    """A manifest of 12 pairs, 6 texts and 6 images, in turns, each of another scene."""
    lines = ["image,text"]
    for row in range(24):
        image = "" if row % 4 == 1 else records.image_paths[3 * row]
        text = "" if row % 4 == 3 else records.texts[3 * row]
        lines.append(f'{image},"{text}"')
    manifest = Path(tmp_path_factory.mktemp("mixed") / "data.csv")
    manifest.write_text("\n".join(lines))
    folder = Path(str(records.image_paths[0])).parent
    mixed = read_records(manifest, images=folder, allow_missing_modality=True, progress=False)
    return MultimodalDataset(mixed, image_policy=Aspect(32 * 32, 16))


def make_model(dataset: MultimodalDataset) -> nn.Module:
    torch.manual_seed(0)
    small = dict.fromkeys(("image_dim", "text_dim", "hidden_dim", "embed_dim"), 32)
    depth = {"image_depth": 1, "text_depth": 1, "head_dim": 8}
    return build_model("tiny", vocab_size=len(dataset.tokenizer), **small, **depth)


def test_what_is_missing_is_missing_everywhere(dataset: MultimodalDataset) -> None:
    kind = modality_of(dataset.sizes)
    assert kind.tolist() == [0, 1, 0, 2] * 6
    batch = collate([dataset[row] for row in range(4)])
    assert batch.pixel_mask.flatten(1).any(1).tolist() == [True, False, True, True]
    assert batch.attention_mask.any(1).tolist() == [True, True, True, False]
    assert not batch.pixel_values[1].any()


@pytest.mark.parametrize("rows", [[1, 5, 9], [3, 7], [0, 1, 2, 3], [1, 3], [1]])
@pytest.mark.parametrize("objective", [Contrastive(), Matching()], ids=["contrastive", "matching"])
def test_losses_and_gradients_are_finite(dataset, rows, objective) -> None:
    model, batch = make_model(dataset), collate([dataset[row] for row in rows])
    loss = objective(model(batch), batch)
    loss.backward()
    gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
    assert loss.isfinite()
    assert all(gradient.isfinite().all() for gradient in gradients)
    num_pairs = sum(row % 2 == 0 for row in rows)
    assert objective.count(batch) == num_pairs * (1 if isinstance(objective, Contrastive) else 3)
    if not num_pairs:
        assert loss == 0
        assert not any(gradient.any() for gradient in gradients)


def test_samples_without_a_partner_do_not_change_the_loss_of_pairs(dataset) -> None:
    model = make_model(dataset)
    pairs, all_kinds = (collate([dataset[row] for row in rows]) for rows in ([0, 2, 4], range(6)))
    torch.testing.assert_close(
        Contrastive()(model(all_kinds), all_kinds), Contrastive()(model(pairs), pairs), rtol=1e-5, atol=1e-5
    )


def test_a_step_without_pairs_changes_no_weight(dataset) -> None:
    model = make_model(dataset)
    before = [weight.clone() for weight in model.parameters()]
    step = FusionTrainer(model, device="cpu").train_step([collate([dataset[row] for row in (1, 3, 5)])])
    assert step["num_samples"] == 3
    assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))


class Brightness:
    """Samples with an image: is the embedding's first entry the image's mean brightness?"""

    def _has_image(self, batch: Batch) -> torch.Tensor:
        return batch.pixel_mask.flatten(1).any(1)

    def count(self, batch: Batch) -> int:
        return int(self._has_image(batch).sum())

    def __call__(self, output: FusionOutput, batch: Batch) -> torch.Tensor:
        pixels = batch.pixel_values.float().sum((1, 2, 3))
        brightness = pixels / (3 * 255 * batch.pixel_mask.sum((1, 2))).clamp(min=1)
        return ((output.image_embedding[:, 0] - brightness).square() * self._has_image(batch)).sum()


class Length:
    """Samples with a text: does the embedding's first entry tell the text's length?"""

    def count(self, batch: Batch) -> int:
        return int(batch.attention_mask.any(1).sum())

    def __call__(self, output: FusionOutput, batch: Batch) -> torch.Tensor:
        length = batch.attention_mask.sum(1) / 64
        return ((output.text_embedding[:, 0] - length).square() * batch.attention_mask.any(1)).sum()


def test_training_under_a_ratio_that_changes_teaches_each_modality(dataset) -> None:
    start, end = (
        {"image-text": 1, "text-only": 0, "image-only": 0},
        {"image-text": 2, "text-only": 1, "image-only": 1},
    )
    scheduler = Mixed(inner=make_scheduler("random", batch_size=6), ratios=[(0, start), (2, end)])
    loader = PlannedLoader(dataset, scheduler, num_workers=0)
    model = make_model(dataset)
    objectives = {"contrastive": Contrastive(), "brightness": Brightness(), "length": Length()}
    trainer = FusionTrainer(model, objectives=objectives, device="cpu", lr=1e-3)
    found = []
    for _ in range(3):
        trainer.fit(loader)
        found.append({MODALITIES[modality_of(dataset.sizes)[batch[0]]] for batch in loader.plan})
    assert found == [{"image-text"}, set(MODALITIES), set(MODALITIES)]
    assert all(weight.isfinite().all() for weight in model.parameters())


def test_difficulty_of_a_missing_modality_is_neutral(dataset) -> None:
    loader = AdaptiveDataLoader(
        dataset, num_workers=0, scheduler=Mixed(inner=make_scheduler("random")), progress=False
    )
    for batch in loader:
        assert len({tuple(row) for row in zip(*masks(batch), strict=True)}) == 1
    assert loader.report()["coverage"] > 0.7


def masks(batch: Batch) -> tuple[list[bool], list[bool]]:
    """Which samples have an image, which a text."""
    return batch.pixel_mask.flatten(1).any(1).tolist(), batch.attention_mask.any(1).tolist()
