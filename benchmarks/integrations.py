"""mmlab's batches in transformers' Trainer beside the Trainer's own: a vision-language model on mixed conversations.

    python benchmarks/integrations.py [--quick] [--data FILE --images FOLDER] [--json FILE | --out DIR]

The same small Qwen2-VL, collator and samples for every arm; only what a batch holds differs: the Trainer's default
(`random`), its `group_by_length` and `batch_rebalance` (with four micro-batches a step, which it balances), and mmlab's
`fastest`, priced by a dozen real steps. Answers have 5 to 800 tokens, images every shape. Equal memory: no batch may
need more predicted bytes than four of the longest sample, and then eight, which is how a fixed batch size that never runs
out of memory is found. An arm's peak is that of its costliest batch, by counting live tensors. A worker of the DataLoader collates ahead,
as in most trainings. Arms run in turns and are compared turn by turn; every repetition is kept.
`--data` takes conversations of your own; few of them are trained for several epochs a turn.
Exit code: 0 done, whether or not every goal is met.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from _common import add_common_options, goal, paired, print_goals, write_if_asked
from datasets import Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments

import mmlab
from mmlab import ConversationCollator, conversation_sizes, price_model
from mmlab.data.conversations import Conversations, read_conversations
from mmlab.integrations import PlannedTrainer
from mmlab.runs.meters import LiveBytes
from mmlab.schedule.cost import PaddedTokens, batch_costs

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from small_vlm import mixed_talks, small_qwen

ARMS = ("random", "group_by_length", "batch_rebalance", "mmlab")
FIXED_SIZES = (4, 8)  # samples: of the longest one, so many fit
MICRO_BATCHES = 4  # of a step of batch_rebalance
NUM_HELD_OUT, HELD_OUT_BATCH = 24, 8
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
        turn = (
            {"num_rounds": 2, "min_samples": 200} if options.quick else {"num_rounds": 6, "min_samples": 700}
        )
        rows = []
        for size in FIXED_SIZES[: 1 if options.quick else None]:
            rows += compared(talks, Path(temporary), fixed_size=size, **turn)
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
        progress=False,
    )
    return read_conversations(mixed_talks(mmlab.read_records(scenes, progress=False)))


def compared(
    talks: Conversations, folder: Path, *, fixed_size: int, num_rounds: int, min_samples: int
) -> list[dict[str, Any]]:
    """A row for every arm, which trains `min_samples` a turn, in whole epochs."""
    answers = [part["text"] for talk in talks.messages for part in talk[-1]["content"]]
    processor, model = small_qwen(answers)
    sizes = conversation_sizes(talks, processor, progress=False).sizes()
    held_out = np.random.default_rng(0).permutation(len(talks))[:NUM_HELD_OUT]
    train = np.setdiff1d(np.arange(len(talks)), held_out)
    items = [talks[row] for row in range(len(talks))]  # decoded once, in memory
    collate = ConversationCollator(processor)
    sizes = sizes.take(train)
    num_epochs = -(-min_samples // len(train))
    longest = sizes.alone[:, 1:].max(0)
    most = fixed_size * batch_costs(PaddedTokens(), np.array([[1, *longest]]))[0]
    own = [items[row] for row in train]
    prices = price_model(model, own, collate, sizes, budget=float(most), progress=False)
    limit = float(batch_costs(prices.bytes, np.array([[fixed_size, *longest]]))[0])
    columns = {"row": train.tolist(), "length": sizes.num_tokens.tolist()}
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    trainers = {}
    scheduler = mmlab.make_scheduler("fastest", cost=prices.bytes, budget=limit, time=prices.seconds)
    for arm in ARMS:
        kind: Any = partial(PlannedTrainer, scheduler=scheduler, sizes=sizes) if arm == "mmlab" else Trainer
        args = trainer_args(arm, folder / arm, fixed_size, num_epochs)
        trainers[arm] = kind(model, args, train_dataset=Dataset.from_dict(columns), callbacks=[Clock()])
        trainers[arm].data_collator = NotingCollator(items, collate, folder / f"{arm}.jsonl")
    found: dict[str, list[dict[str, Any]]] = {arm: [] for arm in ARMS}
    rng = np.random.default_rng(0)
    for number in range(1 + num_rounds):  # the first one warms up
        for arm in rng.permutation(ARMS).tolist():
            model.load_state_dict(weights)
            trainers[arm].args.seed = number
            measured = one_turn(trainers[arm])
            if number:
                found[arm].append(
                    {**measured, "loss": loss_of(model, [items[row] for row in held_out], collate)}
                )
    place = {int(row): index for index, row in enumerate(train)}
    rows = []
    for arm, turns in found.items():
        batches = [[place[row] for row in batch] for turn in turns for batch in turn["batches"]]
        shapes = np.array([[len(batch), *sizes.take(batch).alone[:, 1:].max(0)] for batch in batches])
        costs = batch_costs(prices.bytes, shapes)
        costliest = [items[train[row]] for row in batches[int(costs.argmax())]]
        useful = sizes.num_tokens.sum() * len(turns) * num_epochs
        padded = (shapes[:, 0] * shapes[:, 1]).sum()
        seconds = [turn["seconds"] for turn in turns]
        row = {
            "arm": arm,
            "fixed_size": fixed_size,
            "num_samples": len(train),
            "num_epochs": num_epochs,
            "optimizer_steps": median(turn["steps"] for turn in turns),
            "batches": len(batches) / len(turns),
            "text_waste": float(1 - useful / padded),
            "limit_bytes": limit,
            "bytes_held_out": prices.bytes_held_out,
            "seconds_held_out": prices.seconds_held_out,
            "spread_ratio": prices.spread_ratio,
            "over_limit": int((costs > limit).sum()),
            "costliest_over_limit": float(costs.max() / limit),
            "peak_bytes": peak_bytes(model, collate(costliest)),
            "samples_per_s": len(train) * num_epochs / median(seconds),
            "held_out_loss": median(turn["loss"] for turn in turns),
            "all_seconds": seconds,
            "all_losses": [turn["loss"] for turn in turns],
        }
        print(
            {key: float(f"{value:.4g}") if isinstance(value, float) else value for key, value in row.items()},
            flush=True,
        )
        rows.append(row)
    return rows


class Clock(TrainerCallback):
    """Seconds of a training."""

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.started = time.perf_counter()

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self.seconds = time.perf_counter() - self.started


def trainer_args(arm: str, folder: Path, fixed_size: int, num_epochs: int) -> TrainingArguments:
    """Of one arm, for the epochs of a turn."""
    return TrainingArguments(
        str(folder),
        per_device_train_batch_size=fixed_size,
        gradient_accumulation_steps=MICRO_BATCHES if arm == "batch_rebalance" else 1,
        train_sampling_strategy="random" if arm == "mmlab" else arm,
        num_train_epochs=num_epochs,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        remove_unused_columns=False,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
        dataloader_num_workers=1,
        dataloader_persistent_workers=True,
    )


class NotingCollator:
    """Collates rows of decoded conversations, and notes which: in a file, as it runs in a worker process."""

    def __init__(self, items: list[dict[str, Any]], collate: ConversationCollator, path: Path) -> None:
        self.items, self.collate, self.path = items, collate, path

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        numbers = [row["row"] for row in rows]
        with self.path.open("a") as file:
            print(json.dumps(numbers), file=file)
        return self.collate([self.items[number] for number in numbers])


def one_turn(trainer: Any) -> dict[str, Any]:
    """Seconds, optimizer steps and batches of a turn."""
    path = trainer.data_collator.path
    path.write_text("")
    trainer.optimizer = trainer.lr_scheduler = None
    trainer.train()
    clock = next(callback for callback in trainer.callback_handler.callbacks if isinstance(callback, Clock))
    batches = [json.loads(line) for line in path.read_text().splitlines()]
    return {"seconds": clock.seconds, "steps": trainer.state.global_step, "batches": batches}


@torch.no_grad()
def loss_of(model: Any, talks: list[dict[str, Any]], collate: Any) -> float:
    """Mean loss of an answer's token, in nats, on conversations that were not trained."""
    total, count = 0.0, 0
    model.eval()
    for start in range(0, len(talks), HELD_OUT_BATCH):
        batch = collate(talks[start : start + HELD_OUT_BATCH])
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
    """mmlab's arm against the fastest of the Trainer's own: the one that it is ahead of least."""
    goals = []
    for size in dict.fromkeys(row["fixed_size"] for row in rows):
        of_arm = {row["arm"]: row for row in rows if row["fixed_size"] == size}
        own = of_arm.pop("mmlab")
        gains = {arm: paired(own["all_seconds"], row["all_seconds"]) for arm, row in of_arm.items()}
        best = min(gains, key=lambda arm: gains[arm])
        ratio, lower = gains[best]
        peak = own["peak_bytes"] / own["limit_bytes"]
        goals += [
            goal(
                f"memory of {size} of the longest: samples/s of mmlab's batches over {best}, the fastest of the others",
                f">= {OVER_BEST}",
                f"{ratio:.3f}, interval from {lower:.3f}",
                ratio >= OVER_BEST,
            ),
            goal(
                f"memory of {size} of the longest: batches of mmlab predicted over the limit",
                "0",
                float(own["over_limit"]),
                own["over_limit"] == 0,
            ),
            goal(
                f"memory of {size} of the longest: measured peak of mmlab's costliest batch over the limit",
                "<= 1",
                peak,
                peak <= 1,
            ),
        ]
    return goals


if __name__ == "__main__":
    main()
