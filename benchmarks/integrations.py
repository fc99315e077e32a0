"""mmlab's batches in transformers' Trainer beside the Trainer's own: a vision-language model on mixed conversations.

    python benchmarks/integrations.py [--quick] [--data FILE --images FOLDER] [--json FILE | --out DIR]

The same small Qwen2-VL, collator and samples for every arm; only what a batch holds differs: the Trainer's default
(`random`), its `group_by_length` and `batch_rebalance` (with four micro-batches a step, which it balances), and mmlab's
`fastest`, priced by a dozen real steps. Answers have 5 to 800 tokens, images every shape. Equal memory: no batch may
need more predicted bytes than eight of the longest sample, which is how a fixed batch size that never runs out of memory
is found. An arm's peak is that of its costliest batch, by counting live tensors. Rounds are interleaved, every repetition is kept.
`--data` takes conversations of your own. Exit code: 0 done, whether or not every goal is met.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from _common import add_common_options, goal, print_goals, write_if_asked
from datasets import Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments

import mmlab
from mmlab import ConversationCollator, conversation_sizes, price_model
from mmlab.data.conversations import Conversations, read_conversations
from mmlab.integrations import PlannedTrainer
from mmlab.pricing import StepPrices
from mmlab.runs.meters import LiveBytes
from mmlab.schedule.cost import PaddedTokens, batch_costs
from mmlab.types import SampleSizes

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from small_vlm import mixed_talks, small_qwen

ARMS = ("random", "group_by_length", "batch_rebalance", "mmlab")
FIXED_SIZE = 8  # samples: of the longest one, so many fit
MICRO_BATCHES = 4  # of a step of batch_rebalance
NUM_HELD_OUT = 24
OVER_BEST = 1.3


def main() -> None:
    """Run every arm in turns, print rows and goals, write the results if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add_common_options(parser, "integrations")
    parser.add_argument("--data", help="conversations of your own: JSON, JSON Lines or Parquet")
    parser.add_argument("--images", help="the folder of their images")
    options = parser.parse_args()
    torch.manual_seed(0)
    with TemporaryDirectory() as temporary:
        if options.data:
            talks = read_conversations(options.data, images=options.images)
        else:
            talks = made_talks(Path(temporary), 64 if options.quick else 800)
        rows = compared(talks, Path(temporary), num_rounds=1 if options.quick else 3)
    goals = judge(rows)
    print()
    print_goals(goals)
    write_if_asked(options, "integrations", rows, goals)


def made_talks(folder: Path, number: int) -> Conversations:
    """Generated scenes with a question and an answer of one caption, or of the captions of many images."""
    scenes = mmlab.make_dataset(
        folder / "scenes",
        num_images=number,
        captions_per_image=1,
        val_fraction=0,
        num_workers=0,
        progress=False,
    )
    return read_conversations(mixed_talks(mmlab.read_records(scenes, progress=False)))


def compared(talks: Conversations, folder: Path, *, num_rounds: int) -> list[dict[str, Any]]:
    """A row for every arm."""
    answers = [part["text"] for talk in talks.messages for part in talk[-1]["content"]]
    processor, model = small_qwen(answers)
    sizes = conversation_sizes(talks, processor, progress=False).sizes()
    held_out = np.random.default_rng(0).permutation(len(talks))[:NUM_HELD_OUT]
    train = np.setdiff1d(np.arange(len(talks)), held_out)
    items = [talks[row] for row in range(len(talks))]  # decoded once, in memory
    collate = ConversationCollator(processor)
    sizes = sizes.take(train)
    longest = sizes.alone[:, 1:].max(0)
    most = FIXED_SIZE * batch_costs(PaddedTokens(), np.array([[1, *longest]]))[0]
    own = [items[row] for row in train]
    prices = price_model(model, own, collate, sizes, budget=float(most), progress=False)
    limit = float(batch_costs(prices.bytes, np.array([[FIXED_SIZE, *longest]]))[0])
    columns = {"row": train.tolist(), "length": sizes.num_tokens.tolist()}
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    trainers = {}
    for arm in ARMS:
        trainers[arm] = make_trainer(
            arm, model, Dataset.from_dict(columns), sizes, prices, limit, folder / arm
        )
        trainers[arm].data_collator = lambda rows: collate([items[row["row"]] for row in rows])
    found: dict[str, list[dict[str, Any]]] = {arm: [] for arm in ARMS}
    rng = np.random.default_rng(0)
    for number in range(1 + num_rounds):  # the first one warms up
        for arm in rng.permutation(ARMS).tolist():
            model.load_state_dict(weights)
            trainers[arm].args.seed = number
            measured = one_epoch(trainers[arm])
            if number:
                found[arm].append(
                    {**measured, "loss": loss_of(model, [items[row] for row in held_out], collate)}
                )
    place = {int(row): index for index, row in enumerate(train)}
    rows = []
    for arm, epochs in found.items():
        batches = [[place[row] for row in batch] for epoch in epochs for batch in epoch["batches"]]
        shapes = np.array([[len(batch), *sizes.take(batch).alone[:, 1:].max(0)] for batch in batches])
        costs = batch_costs(prices.bytes, shapes)
        costliest = [items[train[row]] for row in batches[int(costs.argmax())]]
        useful, padded = sizes.num_tokens.sum() * len(epochs), (shapes[:, 0] * shapes[:, 1]).sum()
        seconds = [epoch["seconds"] for epoch in epochs]
        row = {
            "arm": arm,
            "num_samples": len(train),
            "optimizer_steps": median(epoch["steps"] for epoch in epochs),
            "batches": len(batches) / len(epochs),
            "text_waste": float(1 - useful / padded),
            "limit_bytes": limit,
            "bytes_held_out": prices.bytes_held_out,
            "seconds_held_out": prices.seconds_held_out,
            "spread_ratio": prices.spread_ratio,
            "over_limit": int((costs > limit).sum()),
            "costliest_over_limit": float(costs.max() / limit),
            "peak_bytes": peak_bytes(model, collate(costliest)),
            "samples_per_s": len(train) / median(seconds),
            "held_out_loss": median(epoch["loss"] for epoch in epochs),
            "all_seconds": seconds,
            "all_losses": [epoch["loss"] for epoch in epochs],
        }
        print(
            {key: float(f"{value:.4g}") if isinstance(value, float) else value for key, value in row.items()},
            flush=True,
        )
        rows.append(row)
    return rows


class Clock(TrainerCallback):
    """Seconds of an epoch's steps."""

    def on_epoch_begin(self, *_: Any, **__: Any) -> None:
        self.started = time.perf_counter()

    def on_epoch_end(self, *_: Any, **__: Any) -> None:
        self.seconds = time.perf_counter() - self.started


def make_trainer(
    arm: str, model: Any, dataset: Dataset, sizes: SampleSizes, prices: StepPrices, limit: float, folder: Path
) -> Any:
    """A Trainer of one arm, for one epoch at a time."""
    micro = MICRO_BATCHES if arm == "batch_rebalance" else 1
    args = TrainingArguments(
        str(folder),
        per_device_train_batch_size=FIXED_SIZE,
        gradient_accumulation_steps=micro,
        train_sampling_strategy="random" if arm == "mmlab" else arm,
        num_train_epochs=1,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        remove_unused_columns=False,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
    )
    options: dict[str, Any] = {"train_dataset": dataset, "callbacks": [Clock()]}
    if arm == "mmlab":
        scheduler = mmlab.make_scheduler("fastest", cost=prices.bytes, budget=limit, time=prices.seconds)
        return PlannedTrainer(model, args, scheduler=scheduler, sizes=sizes, **options)
    return Trainer(model, args, **options)


def one_epoch(trainer: Any) -> dict[str, Any]:
    """Seconds, optimizer steps and batches of an epoch."""
    batches: list[list[int]] = []
    collate = trainer.data_collator

    def noted(rows: list[dict[str, Any]]) -> Any:
        batches.append([row["row"] for row in rows])
        return collate(rows)

    trainer.data_collator = noted
    try:
        trainer.optimizer = trainer.lr_scheduler = None
        trainer.train()
    finally:
        trainer.data_collator = collate
    clock = next(callback for callback in trainer.callback_handler.callbacks if isinstance(callback, Clock))
    return {"seconds": clock.seconds, "steps": trainer.state.global_step, "batches": batches}


@torch.no_grad()
def loss_of(model: Any, talks: list[dict[str, Any]], collate: Any) -> float:
    """Mean loss of an answer's token, in nats, on conversations that were not trained."""
    total, count = 0.0, 0
    model.eval()
    for start in range(0, len(talks), FIXED_SIZE):
        batch = collate(talks[start : start + FIXED_SIZE])
        asked = int(batch["labels"][:, 1:].ne(-100).sum())
        total, count = total + float(model(**batch).loss) * asked, count + asked
    model.train()
    return total / count


def peak_bytes(model: Any, batch: dict[str, Any]) -> int:
    """The most bytes of live tensors in a forward and backward pass, weights and gradients included."""
    model.zero_grad()
    model(**batch).loss.backward()
    with LiveBytes().add(model, *batch.values()) as live:
        model(**batch).loss.backward()
    model.zero_grad()
    return live.peak_bytes


def judge(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """mmlab's arm against the best of the Trainer's own."""
    of_arm = {row["arm"]: row for row in rows}
    best = max((row for row in rows if row["arm"] != "mmlab"), key=lambda row: row["samples_per_s"])
    ratio = of_arm["mmlab"]["samples_per_s"] / best["samples_per_s"]
    over = of_arm["mmlab"]["over_limit"]
    peak = of_arm["mmlab"]["peak_bytes"] / of_arm["mmlab"]["limit_bytes"]
    return [
        goal(
            f"samples/s of mmlab's batches over {best['arm']}", f">= {OVER_BEST}", ratio, ratio >= OVER_BEST
        ),
        goal("batches of mmlab predicted over the limit", "0", float(over), over == 0),
        goal("measured peak of mmlab's costliest batch over the limit", "<= 1", peak, peak <= 1),
    ]


if __name__ == "__main__":
    main()
