"""What each rank does in `branches.py`: every way takes one optimizer step in turn, on the same samples."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from _parallel_balance import VOCAB_SIZE, batch_of_noise
from torch import distributed

from mmlab.model.fusion_model import FusionModel
from mmlab.model.parameters import learning, parameter_groups
from mmlab.model.presets import build_model
from mmlab.parallel.branches.pipelining import PipelinedBranches
from mmlab.parallel.strategies import ParallelOptions
from mmlab.training.fusion_trainer import FusionTrainer
from mmlab.training.losses.contrastive import Contrastive
from mmlab.training.optimizer import RestartableAdamW
from mmlab.types import Batch, BatchShape

ONE, TWO, CUT, PEER = "one device", "two ranks", "layers moved", "torch.distributed.pipelining, 1f1b"
AHEAD = 2


class Sizes(NamedTuple):
    """Of the model and of a step."""

    model: str
    batch_size: int  # of a micro-batch
    num_micro_batches: int
    image_side: int
    num_tokens: int

    def build(self) -> FusionModel:
        """The model that every way starts from."""
        torch.manual_seed(0)
        model = build_model(self.model, vocab_size=VOCAB_SIZE)
        model.token_head.requires_grad_(False)  # no objective here tells hidden tokens
        return model

    def batch(self) -> Batch:
        """A step's samples: noise, nothing padded."""
        size = self.batch_size * self.num_micro_batches
        return batch_of_noise(BatchShape(size, self.num_tokens, self.image_side, self.image_side))

    def window(self) -> list[Batch]:
        """The same as micro-batches."""
        whole, size = self.batch(), self.batch_size
        return [whole.part(slice(start, start + size)) for start in range(0, len(whole), size)]


def take_turns(sizes: Sizes, image_layers: int, num_rounds: int) -> dict[str, dict[str, list[float]]]:
    """Seconds and losses of every way's steps, as this rank saw them; rank 0 alone knows `one device`."""
    torch.set_num_threads(1)
    ways: dict[str, Callable[[], float | None]] = {ONE: _trained(sizes)}  # before there is a group
    distributed.init_process_group("gloo")
    rank = distributed.get_rank()
    ways |= {
        TWO: _trained(sizes, parallel=ParallelOptions(strategy="branch", ahead=AHEAD)),
        CUT: _trained(
            sizes, parallel=ParallelOptions(strategy="branch", ahead=AHEAD, image_layers=image_layers)
        ),
        PEER: _pipelined(sizes),
    }
    found: dict[str, dict[str, list[Any]]] = {name: {"step_s": [], "losses": []} for name in ways}
    for number in range(1 + num_rounds):
        for name, step in ways.items():
            distributed.barrier()
            if name == ONE and rank:
                continue
            started = time.perf_counter()
            loss = step()
            if name != ONE:
                distributed.barrier()
            if number:  # the first warms up
                found[name]["step_s"].append(time.perf_counter() - started)
            found[name]["losses"].append(loss)
    distributed.destroy_process_group()
    return found


def _trained(sizes: Sizes, **options: Any) -> Callable[[], float]:
    trainer = FusionTrainer(sizes.build(), objectives={"contrastive": Contrastive()}, device="cpu", **options)
    window = sizes.window()
    return lambda: trainer.train_step(window)["loss"]


def _pipelined(sizes: Sizes) -> Callable[[], float | None]:
    model, batch = sizes.build(), sizes.batch()
    pipeline = PipelinedBranches(
        model, num_micro_batches=sizes.num_micro_batches, objectives={"contrastive": Contrastive()}
    )
    optimizer = RestartableAdamW(parameter_groups(model, weight_decay=0.01), lr=1e-4, fused=True)

    def step() -> float | None:
        loss = pipeline.step(batch)
        torch.nn.utils.clip_grad_norm_(learning(model), 1.0)  # of each stage by itself
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    return step
