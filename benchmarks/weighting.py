"""Adaptive weights with and without their brakes: how much they oscillate, and what that does to the losses.

    python benchmarks/weighting.py [--quick] [--json FILE | --out DIR]

A tiny model learns contrastive, matching and masked language modelling together on generated scenes. Every rule runs
three times on the same batches from the same weights: `raw` (an update every step, all the way, no bounds), `interval`
(averages of ten steps, all the way) and `smoothed` (averages of ten steps, three tenths of the way, bounds); `fixed` is
the reference. A change is the mean absolute change of a share, an update or a step; to and fro is what of it, a step,
did not lead anywhere: the whole way less the distance from beginning to end. A turn is an update that goes back on the
one before. The loop is a plain one on one core. `--quick` makes fewer steps.
Exit code: 0 done, whether or not every goal is met.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from _common import add_common_options, goal, print_goals, write_if_asked

from mmlab.data.collate import collate
from mmlab.data.dataset import MultimodalDataset
from mmlab.data.readers import read_records
from mmlab.data.synthetic import make_dataset
from mmlab.model.fusion_model import FusionModel
from mmlab.model.presets import build_model
from mmlab.training.loop import FusionTrainer
from mmlab.training.losses.base import Objective
from mmlab.training.losses.contrastive import Contrastive, Matching
from mmlab.training.losses.masked_language import MaskedLanguage
from mmlab.training.weighting import Weighting, make_weighting
from mmlab.types import Aspect, Batch

MODES: dict[str, dict[str, Any]] = {
    "raw": {"interval": 1, "smoothing": 1.0, "min_share": 0.0, "max_share": 1.0},
    "interval": {"interval": 10, "smoothing": 1.0, "min_share": 0.0, "max_share": 1.0},
    "smoothed": {"interval": 10, "smoothing": 0.3},
}
BATCH_SIZE, LR = 16, 1e-3
LAST = 60  # steps whose shares and losses go into the result file


def main() -> None:
    """Run every arm, print a table and the goals, write the results if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add_common_options(parser, "weighting", quick="about a minute")
    options = parser.parse_args()
    num_steps = 40 if options.quick else 300
    torch.set_num_threads(1)

    with TemporaryDirectory() as folder:
        train, held_out, tokenizer = load(Path(folder) / "scenes")
    objectives = {
        "contrastive": Contrastive(),
        "matching": Matching(),
        "masked_language": MaskedLanguage.of(tokenizer),
    }
    rows = []
    for name in ("fixed", "uncertainty", "trend", "gradnorm"):
        for mode, settings in {"fixed": {}}.items() if name == "fixed" else MODES.items():
            weighting = make_weighting(name, list(objectives), **settings)
            row = {"weighting": name, "mode": mode}
            row |= run(weighting, objectives, train, held_out, len(tokenizer), num_steps)
            show(row)
            rows.append(row)
    goals = judge(rows)
    print_goals(goals)
    write_if_asked(options, "weighting", rows, goals)


def load(folder: Path) -> tuple[list[dict], list[Batch], Any]:
    """Decoded training samples, held-out batches and the tokenizer of some generated scenes."""
    make_dataset(folder, num_images=1200, captions_per_image=2, max_side=96, val_fraction=0.1, progress=False)
    records = read_records(folder, progress=False)
    dataset = MultimodalDataset(records, image_policy=Aspect(48 * 48))
    held_out = [row for row, record in enumerate(records) if record.split == "val"]
    others = sorted(set(range(len(records))) - set(held_out))
    batches = [
        collate([dataset[row] for row in held_out[start : start + BATCH_SIZE]])
        for start in range(0, len(held_out), BATCH_SIZE)
    ]
    return [dataset[row] for row in others], batches, dataset.tokenizer


def run(
    weighting: Weighting,
    objectives: Mapping[str, Objective],
    samples: Sequence[dict],
    held_out: Sequence[Batch],
    vocab_size: int,
    num_steps: int,
) -> dict[str, Any]:
    """Train; figures of the shares and losses, and both themselves for the last steps."""
    torch.manual_seed(0)
    small = dict.fromkeys(("image_dim", "text_dim", "hidden_dim", "embed_dim"), 64)
    model = build_model("tiny", vocab_size=vocab_size, **small)
    shared = [*model.image_encoder.parameters(), *model.text_encoder.parameters()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    order = np.random.default_rng(0)
    shares, losses, changes = [], [], []
    started_s = time.perf_counter()
    for step in range(1, num_steps + 1):
        rows = order.choice(len(samples), BATCH_SIZE, replace=False)
        means = means_of(model, collate([samples[row] for row in rows]), objectives, seed=step)
        grad_norms = None
        if weighting.wants_grad_norms(step):
            grad_norms = {name: norm_of(mean, shared) for name, mean in means.items()}
        weights = weighting.weights()
        optimizer.zero_grad()
        torch.stack([weights[name] * mean for name, mean in means.items()]).sum().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        before = list(weighting.shares.values())
        losses.append({name: float(mean.detach()) for name, mean in means.items()})
        if weighting.update(step, losses[-1], grad_norms):
            changes.append(np.subtract(list(weighting.shares.values()), before))
        shares.append(before)
    run_s = time.perf_counter() - started_s
    found = FusionTrainer(model, objectives=objectives, device="cpu").evaluate(held_out)
    return {
        **oscillation(np.array(changes), num_steps),
        "final_shares": dict(weighting.shares),
        "held_out_loss": found["loss"],
        "held_out_masked_language_loss": found["masked_language_loss"],
        "loss_roughness": roughness(losses),
        "step_s": run_s / num_steps,
        "last_shares": [[round(share, 5) for share in row] for row in shares[-LAST:]],
        "last_losses": [[round(loss, 5) for loss in row.values()] for row in losses[-LAST:]],
    }


def means_of(
    model: FusionModel, batch: Batch, objectives: Mapping[str, Objective], *, seed: int
) -> dict[str, torch.Tensor]:
    """Mean of each objective over a batch."""
    output = model(batch)
    torch.manual_seed(seed)
    return {name: objective(output, batch) / objective.count(batch) for name, objective in objectives.items()}


def norm_of(mean: torch.Tensor, parameters: Sequence[torch.nn.Parameter]) -> float:
    """L2 norm of a mean's gradient."""
    gradients = torch.autograd.grad(mean, parameters, retain_graph=True, allow_unused=True)
    squares = [gradient.square().sum() for gradient in gradients if gradient is not None]
    return float(torch.stack(squares).sum().sqrt())


def oscillation(changes: np.ndarray, num_steps: int) -> dict[str, float]:
    """Changes of the shares (updates, objectives) as figures."""
    if not len(changes):
        return dict.fromkeys(
            ("change_per_update", "change_per_step", "to_and_fro_per_step", "turn_ratio"), 0.0
        )
    turns = changes[1:] * changes[:-1] < 0
    return {
        "change_per_update": float(np.abs(changes).mean()),
        "change_per_step": float(np.abs(changes).mean() * len(changes) / num_steps),
        "to_and_fro_per_step": float((np.abs(changes).sum(0) - np.abs(changes.sum(0))).mean() / num_steps),
        "turn_ratio": float(turns.mean()) if turns.size else 0.0,
    }


def roughness(losses: Sequence[Mapping[str, float]]) -> float:
    """Mean absolute change of the logarithm of a loss from one step to the next, in the second half."""
    table = np.log([[*row.values()] for row in losses[len(losses) // 2 :]])
    return float(np.abs(np.diff(table, axis=0)).mean())


def judge(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Every goal beside what was measured."""
    by_arm = {(row["weighting"], row["mode"]): row for row in rows}
    fixed = by_arm["fixed", "fixed"]
    goals = []
    for name in ("uncertainty", "trend", "gradnorm"):
        raw, smoothed = by_arm[name, "raw"], by_arm[name, "smoothed"]
        ratio = smoothed["to_and_fro_per_step"] / raw["to_and_fro_per_step"]
        goals.append(goal(f"{name}: to and fro, smoothed over raw", "<= 0.1", ratio, ratio <= 0.1))
        for key in ("held_out_loss", "held_out_masked_language_loss"):
            against = smoothed[key] / fixed[key]
            goals.append(goal(f"{name}, smoothed: {key} over fixed", "<= 1.05", against, against <= 1.05))
    return goals


def show(row: Mapping[str, Any]) -> None:
    """One line of the table."""
    final = " ".join(f"{share:.2f}" for share in row["final_shares"].values())
    print(
        f"{row['weighting']:12} {row['mode']:9} change an update {row['change_per_update']:.4f}  "
        f"a step {row['change_per_step']:.5f}, to and fro {row['to_and_fro_per_step']:.5f}  "
        f"turns {100 * row['turn_ratio']:3.0f} %  shares {final}  "
        f"held out {row['held_out_loss']:.3f}, hidden tokens {row['held_out_masked_language_loss']:.3f}  "
        f"roughness {row['loss_roughness']:.3f}  {1e3 * row['step_s']:.0f} ms",
        flush=True,
    )


if __name__ == "__main__":
    main()
