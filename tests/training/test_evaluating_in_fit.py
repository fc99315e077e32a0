"""Evaluations in mid-epoch leave training bitwise as it was."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from mmlab.comparison.config import load_config
from mmlab.comparison.train import train
from mmlab.data.dataset import MultimodalDataset
from mmlab.errors import OptionError
from mmlab.loading.loader import PlannedLoader
from mmlab.model.presets import build_model
from mmlab.runs.events import RunEvent, RunLog, read_events
from mmlab.schedule.schedulers import make_scheduler
from mmlab.training.checkpoint.keeping import Checkpoints
from mmlab.training.loop import FusionTrainer
from mmlab.training.weighting import make_weighting
from mmlab.types import Square
from tests.batches import make_batch
from tests.comparison.test_training import CONFIG, assert_equal, final_state
from tests.model.test_any_model import clip

TINY = {"image_dim": 32, "image_depth": 1, "text_dim": 32, "text_depth": 1, "hidden_dim": 32, "embed_dim": 16}
BATCHES = [make_batch([(4, 32, 48), (9, 16, 16), (3, 48, 32), (6, 32, 32)], seed=seed) for seed in range(6)]
HELD_OUT = [make_batch([(4, 32, 32), (5, 16, 16), (3, 32, 16)], seed=seed) for seed in (10, 11, 12)]


class Restless:
    """Held-out batches from a loader that draws from torch's generator whenever it gives one."""

    def __iter__(self):
        for batch in HELD_OUT:
            torch.rand(3)
            yield batch


class Classifier(nn.Module):
    """A head of three classes."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(1, 3)

    def forward(self, pixel_values, labels=None):
        return nn.functional.cross_entropy(self.head(pixel_values.mean((1, 2, 3))[:, None]), labels)


def make_trainer(**options) -> FusionTrainer:
    torch.manual_seed(0)
    model = build_model("tiny", vocab_size=50, dropout=0.2, **TINY)
    return FusionTrainer(model, device="cpu", objectives=["contrastive", "matching"], lr=1e-3, **options)


def assert_same_weights(found: FusionTrainer, expected: FusionTrainer) -> None:
    pairs = zip(found.model.parameters(), expected.model.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


@pytest.mark.parametrize("eval_batches", [None, 2])
def test_with_and_without_evaluations_the_weights_are_bitwise_the_same(tmp_path, eval_batches):
    without = make_trainer()
    without.model.image_encoder.eval()  # somebody holds a part in evaluation mode
    without.model.training = True
    history = without.fit(BATCHES, eval_loader=Restless())
    with RunLog(tmp_path) as log:
        trainer = make_trainer(eval_every=2, eval_batches=eval_batches, emit=log.emit)
        trainer.model.image_encoder.eval()
        trainer.model.training = True
        found = trainer.fit(BATCHES, eval_loader=Restless())
    assert_same_weights(trainer, without)
    assert [values["loss"] for values in found] == [values["loss"] for values in history]
    evaluations = [event for event in read_events(log.path)[0] if event.kind == "eval"]
    assert [event.step for event in evaluations] == [2, 4, 6, 6]
    midway = 3 * (eval_batches or 3)
    assert [event.values["num_samples"] for event in evaluations] == [midway, midway, midway, 9]


def test_a_part_held_in_evaluation_mode_is_so_in_every_epoch():
    trainer = make_trainer()
    trainer.model.image_encoder.eval()
    trainer.fit(BATCHES[:1], eval_loader=HELD_OUT)
    trainer.train_step(BATCHES[1:2])
    assert trainer.model.training
    assert trainer.model.text_encoder.training
    assert not any(module.training for module in trainer.model.image_encoder.modules())


def test_a_run_resumed_in_mid_epoch_is_bitwise_the_same(tmp_path):
    def trainer() -> FusionTrainer:
        weighting = make_weighting("trend", ["contrastive", "matching"], interval=2, smoothing=0.5)
        return make_trainer(eval_every=2, eval_batches=2, weighting=weighting)

    whole = trainer()
    whole.fit(BATCHES, num_epochs=2, eval_loader=HELD_OUT)
    for last in (3, 4):  # between two evaluations, and right at one
        checkpoints, stopped = Checkpoints(tmp_path / str(last)), trainer()

        def stop(event: RunEvent, last: int = last, stopped: FusionTrainer = stopped) -> None:
            if event.kind == "step" and event.step == last:
                stopped.stop()

        stopped._emit = stop
        stopped.fit(BATCHES, num_epochs=2, eval_loader=HELD_OUT, checkpoints=checkpoints)
        assert stopped.step == last
        resumed = trainer()
        checkpoints.restore(resumed)
        resumed.fit(BATCHES, num_epochs=2, eval_loader=HELD_OUT)
        assert resumed.step == whole.step == 12
        assert_same_weights(resumed, whole)
        assert resumed.weighting.weights() == whole.weighting.weights()
        assert whole.weighting.weights() != {"contrastive": 1.0, "matching": 1.0}


def test_a_run_from_a_file_evaluates_in_mid_epoch_and_trains_the_same(tmp_path, scenes):
    states, evaluations = [], []
    for name, changes in (("without", []), ("with", ["trainer.eval_every=4", "trainer.eval_batches=1"])):
        path = tmp_path / f"{name}.toml"
        path.write_text(CONFIG.format(name=name, scenes=scenes))
        train(load_config(path, ["trainer.num_epochs=1", *changes]), runs=tmp_path, progress=False)
        states.append(final_state(tmp_path / name)["model"])
        events, _ = read_events(tmp_path / name / "events-rank0.jsonl")
        evaluations.append([event.step for event in events if event.kind == "eval"])
    assert_equal(states[1], states[0])
    assert evaluations == [[18], [4, 8, 12, 16, 18]]


def test_no_evaluation_every_zero_steps():
    with pytest.raises(OptionError, match="eval_every must be at least 1, found 0"):
        make_trainer(eval_every=0)


def test_held_out_texts_of_another_tokenizer_are_refused(records):
    train, held_out = records.hold_out(0.3)
    datasets = [MultimodalDataset(part, image_policy=Square(32)) for part in (train, held_out)]
    loader, other = (
        PlannedLoader(one, make_scheduler("random", batch_size=8), num_workers=0) for one in datasets
    )
    model = build_model("tiny", vocab_size=1000, **TINY)
    trainer = FusionTrainer(model, device="cpu")
    with pytest.raises(OptionError, match="token ids of eval_loader stand for other words than in training"):
        trainer.fit(loader, eval_loader=other)
    with pytest.raises(OptionError, match="token ids of eval_loader stand for other words than in training"):
        trainer.evaluate(other)
    alike = MultimodalDataset(held_out, image_policy=Square(32), tokenizer=datasets[0].tokenizer)
    same = PlannedLoader(alike, make_scheduler("random", batch_size=8), num_workers=0)
    FusionTrainer(model, device="cpu").fit(loader, eval_loader=same)


def test_held_out_labels_of_other_classes_are_refused_where_they_are_read(records):
    """Two files read one by one number their class names each for itself."""
    train = replace(records, labels=np.arange(len(records)) % 3, label_names=("ant", "cat", "dog"))
    held_out = replace(train, label_names=("cat", "dog"))
    first = MultimodalDataset(train, image_policy=Square(32))
    second = MultimodalDataset(held_out, image_policy=Square(32), tokenizer=first.tokenizer)
    loader, other = (
        PlannedLoader(one, make_scheduler("random", batch_size=8), num_workers=0) for one in (first, second)
    )
    with pytest.raises(OptionError, match="labels of eval_loader stand for other classes than in training"):
        FusionTrainer(Classifier(), device="cpu").fit(loader, eval_loader=other)
    model = build_model("tiny", vocab_size=1000, **TINY)
    FusionTrainer(model, device="cpu").fit(loader, eval_loader=other)  # no objective reads labels


def test_token_ids_that_the_model_does_not_know_are_named():
    for model in (build_model("tiny", vocab_size=20, **TINY), clip(range(20))):
        trainer = FusionTrainer(model, device="cpu")
        for use in (trainer.train_step, trainer.evaluate):
            with pytest.raises(
                OptionError, match=r"token id \d\d in a model of 20 words: make it with vocab_size"
            ):
                use(BATCHES)


def test_a_part_in_evaluation_mode_whose_weights_are_trained_is_told_at_the_start():
    def model() -> torch.nn.Module:
        model = build_model("tiny", vocab_size=50, **TINY)
        model.image_encoder.eval()  # as a part that from_pretrained gave
        return model

    with pytest.warns(
        UserWarning, match=r"modules that will be trained, first image_encoder\..* call model.train\(\)"
    ):
        FusionTrainer(model(), device="cpu")
    FusionTrainer(model(), device="cpu", freeze=["image_encoder.*"])  # its weights stay, so it may be meant
    FusionTrainer(model().eval(), device="cpu")  # the first step puts all of it into training mode
