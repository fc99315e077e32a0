"""`PlannedBatches` with the real Trainer: steps, resume, two processes, and the number of labels."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import TrainingArguments

from mmlab.errors import DataError, OptionError
from mmlab.integrations import PlannedSampler, PlannedTrainer, TrainerEvents, sample_sizes
from tests.integrations.tiny import LENGTHS, WORDS, Pairs, budget, clip, collate, flat, gpt2, sizes
from tests.ranks import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers and torch, about themselves

EVERYTHING = list(range(len(LENGTHS)))


def arguments(folder: Path | str, **options: Any) -> TrainingArguments:
    fixed = {
        "output_dir": str(folder),
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        "remove_unused_columns": False,
        "save_strategy": "no",
        "logging_steps": 1,
        "dataloader_pin_memory": False,
    }
    return TrainingArguments(**{**fixed, **options})


def make(
    folder: Path | str,
    *,
    callbacks: Any = None,
    eval_dataset: Any = None,
    events: bool = False,
    **options: Any,
) -> Any:
    return PlannedTrainer(
        clip(),
        arguments(folder, **options),
        train_dataset=Pairs(),
        eval_dataset=eval_dataset,
        data_collator=collate,
        callbacks=[TrainerEvents()] if events else callbacks,
        scheduler=budget(),
        sizes=sizes(),
    )


def test_every_epoch_has_the_steps_that_the_trainer_counts_and_every_sample(tmp_path: Path) -> None:
    trainer = make(tmp_path, num_train_epochs=3, gradient_accumulation_steps=2)
    trainer.train()
    seen, num = trainer.model.seen, len(trainer.planned)
    assert trainer.state.global_step == trainer.state.max_steps == 3 * math.ceil(num / 2)
    assert [flat(seen[epoch * num : (epoch + 1) * num]) for epoch in range(3)] == [EVERYTHING] * 3
    assert seen[:num] != seen[num : 2 * num]
    mean = len(LENGTHS) / math.ceil(num / 2)
    assert trainer.get_total_train_batch_size(trainer.args) == round(mean)


def test_batches_that_the_trainer_would_make_smaller_are_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="auto_find_batch_size cannot shrink planned batches"):
        make(tmp_path, auto_find_batch_size=True).train()


def test_a_resume_in_mid_epoch_sees_every_sample_once_and_ends_with_the_same_weights(tmp_path: Path) -> None:
    whole = make(tmp_path / "whole", num_train_epochs=2)
    whole.train()
    num = len(whole.planned)
    stop = num + 3
    first = make(tmp_path / "first", num_train_epochs=2, save_strategy="steps", save_steps=stop)
    first.train()
    second = make(tmp_path / "second", num_train_epochs=2)
    second.train(resume_from_checkpoint=str(tmp_path / "first" / f"checkpoint-{stop}"))
    assert second.model.seen == whole.model.seen[stop:]
    for ours, theirs in zip(second.model.parameters(), whole.model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def test_a_resume_with_other_batches_is_refused(tmp_path: Path) -> None:
    first = make(tmp_path / "first", num_train_epochs=1, save_strategy="steps", save_steps=3, max_steps=-1)
    first.train()
    longer = make(tmp_path / "longer", num_train_epochs=4)
    other = make(tmp_path / "other", num_train_epochs=1)
    other.batch_scheduler = replace(budget(), seed=49)  # as many batches, but with other samples
    for trainer in (longer, other):
        for step in (3, len(first.planned)):
            with pytest.raises(DataError, match="of other batches; resume with the same data"):
                trainer.train(resume_from_checkpoint=str(tmp_path / "first" / f"checkpoint-{step}"))
    assert len(other.planned) == len(first.planned)


def test_processes_of_torchrun_that_transformers_does_not_see_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make(tmp_path, num_train_epochs=1)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(OptionError, match=r"started 2 processes, but transformers sees 1 .* use_cpu=True"):
        trainer.train()


def test_enough_epochs_are_planned_for_a_number_of_steps(tmp_path: Path) -> None:
    trainer = make(tmp_path, max_steps=30)
    trainer.train()
    assert len(trainer.model.seen) == 30
    assert trainer.planned.num_epochs == math.ceil(30 / len(PlannedSampler(sizes(), budget(), num_epochs=1)))


def causal(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    batch = collate(samples)
    ids, mask = batch["input_ids"], batch["attention_mask"]
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, 0] = -100  # nothing comes before it, so it is never predicted
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def test_losses_are_divided_by_the_labels_of_the_whole_window(tmp_path: Path) -> None:
    args = arguments(tmp_path, num_train_epochs=1, gradient_accumulation_steps=3)
    trainer = PlannedTrainer(
        gpt2(), args, train_dataset=Pairs(), data_collator=causal, scheduler=budget(), sizes=sizes()
    )
    trainer.train()
    seen = trainer.model.seen
    for start in range(0, len(seen), 3):
        window = seen[start : start + 3]
        assert {told for told, _, _ in window} == {sum(own for _, own, _ in window)}


def test_lengths_are_read_from_a_datasets_column_and_wrong_sizes_are_named(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = [{"input_ids": np.arange(length).tolist()} for length in LENGTHS % WORDS]
    table = datasets.Dataset.from_list(rows)
    trainer = PlannedTrainer(
        gpt2(), arguments(tmp_path), train_dataset=table, data_collator=causal, scheduler=budget()
    )
    trainer.get_train_dataloader()
    assert trainer.planned is not None
    assert trainer.planned.sizes.num_tokens.tolist() == LENGTHS.tolist()
    trainer.sample_sizes = sample_sizes([3, 4])
    with pytest.raises(DataError, match="sizes are of 2 samples, train_dataset has 61"):
        trainer.get_train_dataloader()
    trainer = PlannedTrainer(clip(), arguments(tmp_path), train_dataset=Pairs(), scheduler=budget())
    with pytest.raises(DataError, match="Pairs does not tell the sizes"):
        trainer.get_train_dataloader()


def test_without_a_scheduler_the_trainer_is_as_it_was(tmp_path: Path) -> None:
    trainer = PlannedTrainer(clip(), arguments(tmp_path), train_dataset=Pairs(), data_collator=collate)
    assert len(trainer.get_train_dataloader()) == math.ceil(len(LENGTHS) / 8)


def _on_rank(folder: str) -> tuple[list[list[int]], list[list[int]], int, float]:
    trainer = make(folder, num_train_epochs=2, save_strategy="steps", save_steps=6)
    trainer.train()
    whole = list(trainer.model.seen)
    resumed = make(folder, num_train_epochs=2)
    resumed.train(resume_from_checkpoint=f"{folder}/checkpoint-6")
    weight = next(resumed.model.parameters()).sum().item()
    assert weight == next(trainer.model.parameters()).sum().item()
    return whole, resumed.model.seen, trainer.state.max_steps, weight


def test_two_processes_share_every_batch_once_and_resume(tmp_path: Path) -> None:
    found = run_ranks(_on_rank, 2, str(tmp_path))
    (first, first_left, max_steps, weight), (second, second_left, _, other_weight) = found
    num = max_steps // 2
    assert len(first) == len(second) == max_steps
    for epoch in range(2):
        span = slice(epoch * num, (epoch + 1) * num)
        assert flat(first[span] + second[span]) == EVERYTHING
    assert (first_left, second_left) == (first[6:], second[6:])
    assert weight == other_weight
