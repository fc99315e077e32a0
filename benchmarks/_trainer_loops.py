"""Training loops around the same model, loss and batches: by hand, FusionTrainer, and other projects' where installed.

All clip the gradient, follow a schedule and read the loss every step, because every real loop does. None but
FusionTrainer measures memory, padding or time, keeps norms by part, or survives running out of memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR

from mmlab.model.parameters import parameter_groups
from mmlab.model.presets import build_model
from mmlab.training.loop import FusionTrainer
from mmlab.training.losses.contrastive import Contrastive
from mmlab.training.setup import warmup_cosine
from mmlab.types import Batch

Step = Callable[[Batch], float]  # one optimizer step; its loss
LR, MAX_GRAD_NORM, NUM_STEPS = 1e-4, 1.0, 10_000


def ours(model: nn.Module) -> Step:
    """FusionTrainer."""
    device = next(model.parameters()).device
    trainer = FusionTrainer(
        model, device=str(device), lr=LR, total_steps=NUM_STEPS, max_grad_norm=MAX_GRAD_NORM
    )
    return lambda batch: trainer.train_step([batch])["loss"]


def by_hand(model: nn.Module, *, loss_of: Callable[[Any, Batch], torch.Tensor] | None = None) -> Step:
    """The loop of a tutorial."""
    optimizer, schedule = optimizer_of(model)
    loss_of = loss_of or same_loss
    model.train()

    def step(batch: Batch) -> float:
        loss = loss_of(model(batch), batch)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def with_accelerate(model: nn.Module) -> Step:
    """The same in Hugging Face accelerate."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=next(model.parameters()).device.type == "cpu")
    model, optimizer, schedule = accelerator.prepare(model, *optimizer_of(model))
    model.train()

    def step(batch: Batch) -> float:
        with accelerator.accumulate(model):
            loss = same_loss(model(batch), batch)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        return loss.item()

    return step


def with_fabric(model: nn.Module) -> Step:
    """The same in Lightning Fabric."""
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator=next(model.parameters()).device.type, devices=1)
    optimizer, schedule = optimizer_of(model)
    model, optimizer = fabric.setup(model, optimizer)
    model.train()

    def step(batch: Batch) -> float:
        loss = same_loss(model(batch), batch)
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=MAX_GRAD_NORM)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def optimizer_of(model: nn.Module) -> tuple[torch.optim.Optimizer, LambdaLR]:
    """AdamW in its fused form, weight decay as FusionTrainer has it, and the same schedule."""
    groups: dict[float, list[nn.Parameter]] = {}
    for group in parameter_groups(model, weight_decay=0.01):
        groups.setdefault(group["weight_decay"], []).extend(group["params"])
    optimizer = torch.optim.AdamW(
        [{"params": weights, "weight_decay": decay} for decay, weights in groups.items()], lr=LR, fused=True
    )
    return optimizer, LambdaLR(optimizer, partial(warmup_cosine, total_steps=NUM_STEPS, warmup_ratio=0.05))


def same_loss(output: Any, batch: Batch) -> torch.Tensor:
    """FusionTrainer's objective, without its count over a window: it tells captions of one image apart."""
    return Contrastive()(output, batch) / len(batch)


def plain_loss(output: Any, batch: Batch) -> torch.Tensor:
    """The contrastive loss as most write it: every other sample of the batch is a wrong answer."""
    logits = output.logit_scale * output.image_embedding @ output.text_embedding.T
    target = torch.arange(len(batch), device=logits.device)
    return (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2


LOOPS: dict[str, Callable[[nn.Module], Step]] = {
    "by hand": by_hand,
    "by hand, plain loss": partial(by_hand, loss_of=plain_loss),
    "FusionTrainer": ours,
}
PEERS = {"accelerate": with_accelerate, "lightning": with_fabric}  # by the package to install


def measure_overhead(
    batches: Sequence[Batch], *, vocab_size: int, num_rounds: int, device: str = "cpu"
) -> list[dict[str, Any]]:
    """A row a loop: seconds of every step, taken in turns, and the median of what it takes longer than by hand.

    Args:
        num_rounds: passes over the batches, after one to warm up.
    """
    loops, rows = {}, {}
    batches = [batch.to(device) for batch in batches]
    for name, make in (LOOPS | {name: make for name, make in PEERS.items() if find_spec(name)}).items():
        torch.manual_seed(0)
        loops[name] = make(build_model("tiny", vocab_size=vocab_size).to(device))
        rows[name] = {
            "kind": "overhead",
            "loop": name,
            "batch_size": len(batches[0]),
            "step_s": [],
            "loss": [],
        }
    names = list(loops)
    for number in range((1 + num_rounds) * len(batches)):
        batch = batches[number % len(batches)]
        for turn in range(len(names)):
            name = names[(turn + number) % len(names)]
            started_s = time.perf_counter()
            loss = loops[name](batch)
            elapsed_s = time.perf_counter() - started_s
            rows[name]["loss"].append(loss)
            if number >= len(batches):
                rows[name]["step_s"].append(elapsed_s)
    hand = np.array(rows["by hand"]["step_s"])
    for row in rows.values():
        row["median_step_s"] = float(np.median(row["step_s"]))
        differences = 1e6 * np.sort(np.array(row["step_s"]) - hand)
        middle, within = len(hand) / 2, 0.98 * len(hand) ** 0.5  # by ranks: a 95 % interval of the median
        row["overhead_us"] = float(np.median(differences))
        row["least_us"] = float(differences[max(0, int(middle - within))])
        row["most_us"] = float(differences[min(len(hand) - 1, int(middle + within))])
        row["overhead_ratio"] = row["overhead_us"] / 1e6 / float(np.median(hand))
    return list(rows.values())
