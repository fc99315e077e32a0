"""What a step leaves alone, counts and tells: the caller's generator, epochs, the device's queue, predicted costs."""

from __future__ import annotations

import traceback

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from mmlab.data.collate import collate
from mmlab.errors import OptionError
from mmlab.runs.events import RunLog, read_events
from mmlab.schedule.plan import BatchPlan
from mmlab.training import loop
from mmlab.training.loop import FusionTrainer
from mmlab.training.losses.contrastive import Contrastive, Matching
from mmlab.training.losses.masked_language import MaskedLanguage
from mmlab.training.options import TrainOptions
from mmlab.training.step_meter import measure_padding
from mmlab.types import Batch, SampleSizes
from tests.batches import make_batch
from tests.training.test_trainer import SIZES, PairDistance, micro_batches, tiny_model


def test_options_and_changes_by_name_make_the_same_trainer():
    options = TrainOptions(device="cpu", lr=1e-3, objectives=("contrastive", "matching"))
    by_name = FusionTrainer(tiny_model(), device="cpu", lr=1e-3, objectives=["contrastive", "matching"])
    assert FusionTrainer(tiny_model(), options).options == by_name.options == options
    assert FusionTrainer(tiny_model(), options, lr=1.0).options.lr == 1.0
    with pytest.raises(OptionError, match="unknown option of the trainer 'learning_rate'"):
        FusionTrainer(tiny_model(), learning_rate=1.0)


def test_fit_after_single_steps_begins_with_the_first_batch():
    batches = micro_batches()
    trainer = FusionTrainer(tiny_model(), device="cpu")
    trainer.train_step(batches[:2])
    assert len(trainer.fit(batches)) == len(batches)


def test_batches_that_come_only_once_are_no_second_epoch():
    trainer, batches = FusionTrainer(tiny_model(), device="cpu", total_steps=4), micro_batches()
    with pytest.raises(
        OptionError, match="the loader gave no batch in epoch 1; give one that can be iterated"
    ):
        trainer.fit(iter(batches[:2]), num_epochs=2)
    assert (trainer.epoch, trainer.step) == (1, 2)


def test_a_step_leaves_the_callers_generator_as_it_was():
    seen = []
    trainer = FusionTrainer(
        tiny_model(dropout=0.2), device="cpu", emit=lambda _: seen.append(torch.get_rng_state())
    )
    torch.manual_seed(5)
    before = torch.get_rng_state()
    trainer.train_step([make_batch(SIZES)])
    assert torch.equal(torch.get_rng_state(), before)
    trainer.fit([make_batch(SIZES)] * 2)
    assert len(seen) == 3
    assert all(torch.equal(state, before) for state in seen)


class CountReads(TorchFunctionMode):
    """Counts how often numbers are read from a tensor, for which a GPU must be waited for."""

    READS = (
        Tensor.item,
        Tensor.tolist,
        Tensor.cpu,
        Tensor.__bool__,
        Tensor.__float__,
        Tensor.__int__,
    )

    def __init__(self):
        super().__init__()
        self.num_reads = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in self.READS:
            frames = [frame.filename for frame in traceback.extract_stack()]
            self.num_reads += not any("transformers" in name for name in frames)  # BERT looks at its masks
        return func(*args, **(kwargs or {}))


class CountOperations(TorchDispatchMode):
    """Counts operations on tensors."""

    num_operations = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.num_operations += 1
        return func(*args, **(kwargs or {}))


def collated(seed: int) -> Batch:
    generator = np.random.default_rng(seed)
    samples = [
        {
            "image": torch.from_numpy(generator.integers(0, 256, (3, height, width), dtype=np.uint8)),
            "input_ids": torch.from_numpy(generator.integers(5, 50, tokens)),
            "label": 0,
            "id": f"{seed}-{row}",
            "group": 10 * seed + row,
        }
        for row, (tokens, height, width) in enumerate(SIZES[:4])
    ]
    return collate(samples)


def test_a_step_reads_from_the_device_as_often_with_many_micro_batches_as_with_one():
    objectives = {
        "contrastive": Contrastive(),
        "matching": Matching(),
        "masked_language": MaskedLanguage(mask_id=4, special_ids=(0, 1)),
    }
    found = []
    for num_batches in (1, 4):
        trainer = FusionTrainer(tiny_model(), device="cpu", objectives=objectives)
        batches = [collated(seed) for seed in range(num_batches)]
        trainer.train_step(batches)
        with CountReads() as reads:
            trainer.train_step(batches)
        found.append(reads.num_reads)
    assert found == [4, 4]  # each loss once, all gradient norms at once


def test_columns_on_the_host_are_what_the_tensors_say():
    batch = collated(0)
    columns, read = batch.host, Batch.host.fget(torch_only(batch))
    for name in ("input_ids", "attention_mask", "labels"):
        assert torch.equal(getattr(columns, name), getattr(read, name))
    for name in ("height", "width", "groups", "is_pair"):
        assert (getattr(columns, name) == getattr(read, name)).all()
    for name in ("num_pairs", "num_images", "num_tokens", "num_patches"):
        assert getattr(columns, name) == getattr(read, name)
    part = batch.part(slice(1, 3))
    assert len(part.host) == len(part) == 2
    assert Contrastive().count(part) == 2


def test_what_a_batch_counts_is_known_before_the_step():
    batch = collated(0)
    with CountOperations() as operations:
        found = [Contrastive().count(batch), Matching().count(batch)]
        padding = measure_padding([batch])
    assert operations.num_operations == 0
    sizes = np.array(SIZES[:4])
    num_tokens, num_patches = sizes[:, 0], np.prod(-(-sizes[:, 1:] // 16), axis=1)
    is_pair = (num_tokens > 0) & (num_patches > 0)
    assert (batch.host.num_tokens, batch.host.num_patches) == (num_tokens.sum(), num_patches.sum())
    assert batch.host.num_pairs == batch.host.num_images == is_pair.sum() == found[0]
    assert found[1] == 3 * is_pair.sum()
    assert padding["padded_tokens"] == 4 * num_tokens.max()
    assert padding["padded_patches"] == 4 * np.prod(-(-sizes[:, 1:].max(0) // 16))


def test_a_pack_of_texts_alone_costs_its_tokens():
    batch = make_batch([(6, 0, 0), (3, 0, 0)])
    assert measure_padding([batch], packed=True) == {
        "text_waste": 0.0,
        "image_waste": 0.0,
        "combined_waste": 0.0,
        "padded_tokens": 9,
        "padded_patches": 0,
    }


def test_pairs_of_one_image_have_no_negatives_unless_their_images_are_unknown():
    batch = make_batch([(3, 16, 16)] * 3)
    for groups, num_images in (([7, 7, 7], 1), ([7, 7, 8], 2), ([-1, -1, -1], 3), ([-1, 7, 7], 2)):
        batch.groups = torch.tensor(groups)
        assert batch.host.num_images == num_images
        assert Contrastive().count(batch) == (3 if num_images > 1 else 0)


def torch_only(batch: Batch) -> Batch:
    batch = batch.to("cpu")
    batch.columns = None
    return batch


class Planned(list):
    """A loader whose plan expects smaller samples than come."""

    plan = BatchPlan.from_batches(
        [[0, 1, 2], [3], [4, 5, 6, 7]],
        SampleSizes(num_tokens=[2] * 8, height=[16] * 8, width=[16] * 8, group=list(range(8))),
    )


def test_the_plans_cost_stands_beside_the_measured_one():
    trainer = FusionTrainer(tiny_model(), device="cpu", accumulation_steps=2)
    first, last = trainer.fit(Planned(micro_batches()))
    assert (first["predicted_cost"], last["predicted_cost"]) == (4 * 3, 4 * 3)
    assert first["padded_tokens"] + first["padded_patches"] > first["predicted_cost"]
    assert "predicted_cost" not in trainer.fit(micro_batches())[0]


def test_losses_of_objectives_of_ones_own_are_logged(tmp_path):
    with RunLog(tmp_path) as log:
        trainer = FusionTrainer(
            tiny_model(), device="cpu", objectives={"distance": PairDistance()}, emit=log.emit
        )
        trainer.fit(micro_batches()[:1])
    (values,) = [event.values for event in read_events(log.path)[0] if event.kind == "step"]
    assert values["user_distance_loss"] == pytest.approx(values["loss"])


def test_fit_keeps_the_values_of_the_last_steps_only(monkeypatch):
    monkeypatch.setattr(loop, "KEPT_STEPS", 2)
    trainer = FusionTrainer(tiny_model(), device="cpu", total_steps=3)
    history = trainer.fit(micro_batches())
    assert [values["num_samples"] for values in history] == [1, 4]


def test_the_schedule_ends_with_the_last_step_though_epochs_differ_in_length():
    class Epochs:
        def set_epoch(self, epoch):
            self.batches = micro_batches()[: 1 + epoch]

        def __len__(self):
            return len(self.batches)

        def __iter__(self):
            return iter(self.batches)

    loader = Epochs()
    loader.set_epoch(0)
    trainer = FusionTrainer(tiny_model(), device="cpu", lr=1e-3, warmup_ratio=0)
    rates = [values["lr"] for values in trainer.fit(loader, num_epochs=3)]
    assert len(rates) == trainer.total_steps == 6
    assert rates == sorted({*rates}, reverse=True)
    assert 0 < rates[-1] < 0.5 * rates[0]
    assert trainer.learning_rate(6) == 0
