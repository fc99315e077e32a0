"""What each rank does in `branches.py`: every way takes one optimizer step in turn, on the same samples."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from _branch_pipelining import PipelinedBranches
from _parallel_balance import VOCAB_SIZE
from torch import distributed

from mmlab.model.fusion_model import FusionModel
from mmlab.model.parameters import parameter_groups, trainable_parameters
from mmlab.model.presets import build_model
from mmlab.parallel.predict import Network, StepCosts, predict
from mmlab.parallel.probe import probe_costs, probe_network
from mmlab.parallel.reduce import ParallelOptions
from mmlab.parallel.strategies import make_strategy
from mmlab.training.loop import FusionTrainer
from mmlab.training.losses.contrastive import Contrastive
from mmlab.training.noise import noise_batch
from mmlab.training.strategy import Strategy
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
        shape = BatchShape(size, self.num_tokens, self.image_side, self.image_side)
        return noise_batch(shape, num_ids=VOCAB_SIZE)

    def window(self) -> list[Batch]:
        """The same as micro-batches."""
        whole, size = self.batch(), self.batch_size
        return [whole.part(slice(start, start + size)) for start in range(0, len(whole), size)]


class Plan(NamedTuple):
    """What the ways were predicted to take, before any of them was tried."""

    image_layers: int
    step_s: dict[str, float]  # by way


def take_turns(sizes: Sizes, num_rounds: int) -> tuple[Plan, dict[str, dict[str, list[float]]]]:
    """Predict every way; then seconds and losses of their steps, as this rank saw them; rank 0 alone has `one device`."""
    torch.set_num_threads(1)
    ways: dict[str, Callable[[], float | None]] = {ONE: _trained(sizes, strategy=Strategy())}
    distributed.init_process_group("gloo")
    rank, window = distributed.get_rank(), sizes.window()
    batches = [window[0], window[0].part(slice(0, sizes.batch_size // 2))]
    costs = probe_costs(_trainer(sizes, strategy=Strategy()), batches)
    plan = _planned(sizes, costs, probe_network(torch.device("cpu")))
    ways |= {
        TWO: _trained(sizes, strategy=make_strategy(ParallelOptions(strategy="branch", ahead=AHEAD))),
        CUT: _trained(
            sizes,
            strategy=make_strategy(
                ParallelOptions(strategy="branch", ahead=AHEAD, image_layers=plan.image_layers)
            ),
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
    return plan, found


def _planned(sizes: Sizes, costs: StepCosts, network: Network) -> Plan:
    options = {"num_micro_batches": sizes.num_micro_batches, "ahead": AHEAD}
    size = sizes.batch_size * sizes.num_micro_batches
    one = predict("single", costs, network, num_devices=1, batch_size=size, **options)
    two, cut = (
        predict("branch", chosen, network, num_devices=2, batch_size=size / 2, **options)
        for chosen in (replace(costs, num_image_layers=0), costs)
    )
    image_layers = (
        cut.image_layers or costs.num_image_layers - 1
    )  # one that is not predicted to pay is tried too
    return Plan(image_layers, {ONE: one.step_s, TWO: two.step_s, CUT: cut.step_s})


def _trainer(sizes: Sizes, **options: Any) -> FusionTrainer:
    return FusionTrainer(sizes.build(), objectives={"contrastive": Contrastive()}, device="cpu", **options)


def _trained(sizes: Sizes, **options: Any) -> Callable[[], float]:
    trainer, window = _trainer(sizes, **options), sizes.window()
    return lambda: trainer.train_step(window)["loss"]


def _pipelined(sizes: Sizes) -> Callable[[], float | None]:
    model, batch = sizes.build(), sizes.batch()
    pipeline = PipelinedBranches(
        model, num_micro_batches=sizes.num_micro_batches, objectives={"contrastive": Contrastive()}
    )
    optimizer = torch.optim.AdamW(parameter_groups(model, weight_decay=0.01), lr=1e-4, fused=True)

    def step() -> float | None:
        loss = pipeline.step(batch)
        torch.nn.utils.clip_grad_norm_(trainable_parameters(model), 1.0)  # of each stage by itself
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    return step
