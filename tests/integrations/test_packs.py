"""Packed conversations have the logits, gradients and losses of padded ones, or their model is refused by its name."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainingArguments

from mmlab.data import ConversationCollator, conversation_sizes
from mmlab.data.conversation_batches import Packer
from mmlab.errors import OptionError
from mmlab.integrations import PlannedBatches, TrainerEvents
from mmlab.runs import read_events
from mmlab.schedule import make_scheduler
from mmlab.schedule.cost import MaxPolynomial
from tests.integrations.test_conversations import REFUSED, conversations, folder
from tests.integrations.vlm_families import FAMILIES, build

__all__ = ["folder"]  # a fixture
pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers and torch, about themselves


@pytest.mark.parametrize("name", sorted(FAMILIES.keys() - REFUSED.keys()))
def test_packs_have_the_logits_and_gradients_of_padded_batches(name: str, folder: Path) -> None:
    processor, model = build(name)
    rows = list(conversations(folder, one_answer=False))
    for (
        weight
    ) in model.parameters():  # larger than at the start of training, so that attention differs among tokens
        if weight.ndim > 1:
            torch.nn.init.normal_(weight, std=0.1)
    packing = pickle.loads(
        pickle.dumps(ConversationCollator(processor, packed_for=model))
    )  # as a worker has it
    assert model.training == build(name)[1].training
    for some in (rows, rows[7:8], rows[6:9]):  # all, one without an image, and images beside none
        processor.tokenizer.padding_side = "right"
        padded, packed = ConversationCollator(processor)(some), packing(some)
        there = padded["attention_mask"].bool()
        assert packed["input_ids"].tolist() == [padded["input_ids"][there].tolist()]
        found = []
        for batch in (padded, packed):
            model.zero_grad()
            output = model(**batch)
            output.loss.backward()
            gradients = {
                key: weight.grad for key, weight in model.named_parameters() if weight.grad is not None
            }
            found.append((output.logits, output.loss, gradients))
        (logits, loss, wanted), (own_logits, own_loss, gradients) = found
        torch.testing.assert_close(own_logits[0], logits[there], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(own_loss, loss, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(gradients, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_cannot_be_packed_is_refused_by_its_name(name: str) -> None:
    processor, model = build(name)
    model.train()
    model.get_input_embeddings().eval()
    with pytest.raises(
        OptionError, match=f"^{type(model).__name__} cannot take packed batches.*{REFUSED[name]}"
    ):
        ConversationCollator(processor, packed_for=model)
    assert model.training
    assert not model.get_input_embeddings().training


def test_no_loss_crosses_samples() -> None:
    there = torch.tensor([[0, 1, 1], [1, 1, 1], [0, 0, 1]])
    ids = torch.arange(9).reshape(3, 3)
    row = Packer(torch.nn.Linear(1, 1))({"input_ids": ids, "labels": ids.clone(), "attention_mask": there})
    assert row["input_ids"].tolist() == [[1, 2, 3, 4, 5, 8]]
    assert row["position_ids"].tolist() == [[0, 1, 0, 1, 2, 0]]
    assert row["labels"].tolist() == [[-100, 2, -100, 4, 5, -100]]


class PlannedTrainer(PlannedBatches, Trainer):
    """Keeps the rows of its batches."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        self.__dict__.setdefault("seen", []).append(inputs["input_ids"].shape)
        return super().training_step(model, inputs, num_items_in_batch)


def test_a_trainer_has_the_loss_of_padded_batches_and_says_that_nothing_was_padded(
    folder: Path, tmp_path: Path
) -> None:
    processor, model = build("Qwen2-VL")
    talks = conversations(folder, one_answer=False)
    sizes = conversation_sizes(talks, processor, progress=False)
    with torch.no_grad():
        wanted = float(model.train()(**ConversationCollator(processor)(list(talks))).loss)
    args = TrainingArguments(
        str(tmp_path), use_cpu=True, report_to=[], disable_tqdm=True, num_train_epochs=1, save_strategy="no",
        remove_unused_columns=False, logging_steps=1, dataloader_num_workers=1,
    )  # fmt: skip
    cost = MaxPolynomial([[1000, 2, 3]], [(0, 0, 0), (1, 1, 0), (1, 0, 1)], unit="bytes")
    trainer = PlannedTrainer(
        model, args, train_dataset=talks, processing_class=processor, callbacks=[TrainerEvents()],
        data_collator=ConversationCollator(processor, packed_for=model),
        scheduler=make_scheduler("packed", cost=cost, budget=100_000),
    )  # fmt: skip
    trainer.train()
    assert trainer.seen == [(1, int(sizes.num_tokens.sum()))]
    assert trainer.state.log_history[0]["loss"] == pytest.approx(wanted, rel=1e-4)
    events, _ = read_events(tmp_path / "events-rank0.jsonl")
    (step,) = (event for event in events if event.kind == "step")
    assert step.values["combined_waste"] == step.values["text_waste"] == 0
    patches = sizes.sizes().height // 16
    assert step.values["predicted_cost"] == sizes.num_tokens.sum() + patches.sum()
    assert step.values["predicted_bytes"] == 1000 + 2 * sizes.num_tokens.sum() + 3 * patches.sum()
