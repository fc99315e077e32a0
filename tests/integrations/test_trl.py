"""`PlannedBatches` with TRL's SFTTrainer: texts and conversations, every sample comes once, resume, two processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from mmlab.data import ConversationCollator, conversation_sizes
from mmlab.integrations import PlannedBatches, TrainerEvents
from mmlab.runs import RunState
from mmlab.schedule import make_scheduler
from tests.integrations.test_conversations import conversations, folder  # noqa: F401
from tests.integrations.tiny import WORDS, gpt2
from tests.integrations.vlm_families import build
from tests.ranks import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore")  # of TRL, transformers and torch, about themselves


class PlannedSFTTrainer(PlannedBatches, SFTTrainer):
    """Keeps the shape of every batch, how many labels it asks for, and how many the loss is divided by."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        asked = int(inputs["labels"][:, 1:].ne(-100).sum())
        self.__dict__.setdefault("seen", []).append(
            (int(num_items_in_batch), asked, tuple(inputs["input_ids"].shape))
        )
        return super().training_step(model, inputs, num_items_in_batch)


TEXTS = [
    " ".join("abcdefgh"[digit] for digit in np.random.default_rng(row).integers(0, 8, 1 + row % 17))
    for row in range(50)
]


def make(runs: Path, tokenizer: PreTrainedTokenizerFast, **options: Any) -> PlannedSFTTrainer:
    args = SFTConfig(
        output_dir=str(runs),
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        logging_steps=1,
        num_train_epochs=2,
        bf16=False,
        gradient_checkpointing=False,
        dataset_num_proc=None,
        **{"save_strategy": "no", **options},
    )
    scheduler = make_scheduler("budget", budget=120, window=16)
    return PlannedSFTTrainer(
        gpt2(),
        args,
        train_dataset=Dataset.from_dict({"text": TEXTS}),
        processing_class=tokenizer,
        callbacks=[TrainerEvents()],
        scheduler=scheduler,
    )


def test_batches_are_as_planned_from_the_texts_that_were_tokenised_and_a_run_resumes(tmp_path: Path) -> None:
    words = {word: number for number, word in enumerate(["[PAD]", "[EOS]", *"abcdefgh"])}
    assert len(words) <= WORDS
    core = Tokenizer(models.WordLevel(words, unk_token="[PAD]"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, pad_token="[PAD]", eos_token="[EOS]")
    whole = make(tmp_path / "whole", tokenizer, save_strategy="steps", save_steps=20)
    whole.train()
    assert whole.planned is not None
    num = len(whole.planned)
    shapes = [shape for _, _, shape in whole.seen]
    assert len(shapes) == 2 * num == whole.state.max_steps
    assert sum(size for size, _ in shapes) == 2 * len(TEXTS)
    assert all(0 < told - own <= shape[0] or told == own for told, own, shape in whole.seen)
    assert max(size * length for size, length in shapes) <= 120
    state = RunState(tmp_path / "whole")
    state.poll()
    planned = list(zip(state.column("num_samples"), state.column("num_tokens"), strict=True))
    assert planned == shapes
    assert (state.column("loss") > 0).all()
    second = make(tmp_path / "second", tokenizer)
    second.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-20"))
    assert second.seen == whole.seen[20:]


def _on_rank(runs: str, images: str) -> tuple[int, list[tuple[int, int, tuple[int, ...]]]]:
    """Samples, and what each step saw: labels that the loss is divided by, labels of this rank, shape."""
    processor, model = build("Qwen2-VL")
    talks = conversations(Path(images), one_answer=False)
    rows = Dataset.from_dict({"row": range(len(talks))}).with_transform(  # as TRL takes no other class
        lambda batch: {name: [talks[row][name] for row in batch["row"]] for name in ("messages", "images")}
    )
    options = {"report_to": [], "disable_tqdm": True, "save_strategy": "no", "num_train_epochs": 2}
    trainer = PlannedSFTTrainer(
        model,
        SFTConfig(runs, use_cpu=True, bf16=False, max_length=None, remove_unused_columns=False, **options),
        train_dataset=rows,
        processing_class=processor,
        data_collator=ConversationCollator(processor),
        scheduler=make_scheduler("budget", budget=1500),
        sizes=conversation_sizes(talks, processor).sizes(),
    )
    trainer.train()
    return len(talks), trainer.seen


def test_two_processes_train_on_conversations_and_divide_by_the_answers_of_both(
    tmp_path: Path,
    folder: Path,  # noqa: F811
) -> None:
    (num, first), (_, second) = run_ranks(_on_rank, 2, str(tmp_path), str(folder))
    assert len(first) == len(second) > 2
    assert sum(shape[0] for _, _, shape in first + second) == 2 * num
    for (told, own, _), (other_told, other_own, _) in zip(first, second, strict=True):
        assert told == other_told == own + other_own
