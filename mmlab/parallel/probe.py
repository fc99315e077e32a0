"""Measure what `predict` needs: seconds of each part of a step on one device, and of messages by size.

Parts are measured on all ranks at once, without communication between them: if ranks share memory or cores,
as on one machine, the figures include that. Links are measured between the same ranks while nothing else
runs. All ranks get the same result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import distributed

from mmlab.model.parameters import parts_of
from mmlab.parallel.branch import cut_from_graph
from mmlab.parallel.predict import PARTS, Line, Network, StepCosts, ring
from mmlab.parallel.process_group import ProcessGroup
from mmlab.training.losses.base import LossTerms
from mmlab.training.losses.contrastive import Contrastive
from mmlab.training.split import backward_features
from mmlab.training.step_meter import clock
from mmlab.types import Batch

_MESSAGE_BYTES = (2**10, 2**16, 2**20, 2**22, 2**24)
_REPEATS = 5


def probe_costs(trainer: Any, batches: Sequence[Batch]) -> StepCosts:
    """Measure every part of a step, several times for each batch; a collective.

    Args:
        trainer: a `FusionTrainer` of a `FusionModel`, without a strategy; its weights change.
        batches: of two sizes, on the trainer's device.
    """
    group, device, model = ProcessGroup(trainer.device), trainer.device, trainer.model
    by_size: list[dict[str, float]] = []  # for each batch the medians of the slowest rank
    for batch in batches:
        repeats: list[dict[str, float]] = []
        for _ in range(1 + _REPEATS):
            group.largest(0)  # all ranks start together
            found = _one_step(trainer, batch)
            started = clock(device)
            trainer.train_step([batch])
            found["step"] = clock(device) - started
            repeats.append(found)
        medians = [median(found[name] for found in repeats[1:]) for name in found]
        by_size.append(dict(zip(found, group.largest_of(medians), strict=True)))

    def lines(phase: str) -> dict[str, Line]:
        found = [*zip(map(len, batches), by_size, strict=True)]
        return {
            part: Line.fit([(1, size, seconds[f"{part}_{phase}"]) for size, seconds in found])
            for part in PARTS
        }

    with torch.no_grad(), trainer.precision.autocast():
        output = model(batch)
    layer_bytes = output.features[0].nbytes / len(batch)
    reads_features = any(type(goal) is not Contrastive for goal in trainer.objectives.values())
    gradient_bytes = dict.fromkeys(PARTS, 0.0)
    for part, weights in parts_of(model).items():
        gradient_bytes[part if part in PARTS else "fusion"] += sum(weight.nbytes for weight in weights)
    step_s = by_size[0].pop("step")
    return StepCosts(
        forward=lines("forward"),
        backward=lines("backward"),
        gradient_bytes=gradient_bytes,
        optimizer_s=by_size[0]["optimizer"],
        other_s=max(0.0, step_s - sum(by_size[0].values())),
        image_output_bytes=output.image_embedding.nbytes / len(batch) + reads_features * layer_bytes,
        image_layer_bytes=layer_bytes,
        num_image_layers=0 if model.why_not_cut(1) else len(model.image_encoder.blocks),
    )


def _one_step(trainer: Any, batch: Batch) -> dict[str, float]:
    """Seconds of each part of one step; the graph is cut after the encoders."""
    model, device, precision = trainer.model, trainer.device, trainer.precision
    times: dict[str, float] = {}

    @contextmanager
    def timed(name: str) -> Iterator[None]:
        started = clock(device)
        yield
        times[name] = clock(device) - started

    model.train()
    with precision.kernels():
        with precision.autocast():
            with timed("image_forward"):
                image = model.encode_image(batch.pixel_values, batch.pixel_mask)
            with timed("text_forward"):
                text = model.encode_text(batch.input_ids, batch.attention_mask)
        leaves = [cut_from_graph(image), cut_from_graph(text)]
        with timed("fusion_forward"), precision.autocast():
            output = model.join(*leaves)
            counts = {name: goal.count(batch) for name, goal in trainer.objectives.items()}
            sums = {name: goal(output, batch) for name, goal in trainer.objectives.items()}
            loss = LossTerms(counts).add(sums)
        with timed("fusion_backward"):
            loss.backward()
        for name, encoded, leaf in (("text", text, leaves[1]), ("image", image, leaves[0])):
            with timed(f"{name}_backward"):
                backward_features(encoded[:2], [tensor.grad for tensor in leaf[:2]])
        with timed("optimizer"):
            trainer.optimizer.step()
            model.zero_grad(set_to_none=True)
    return times


def probe_network(device: torch.device) -> Network:
    """Measure collectives over tensors of several sizes; itself a collective."""
    group = ProcessGroup(device)
    points: dict[str, list[tuple[float, float, float]]] = {}
    for size in _MESSAGE_BYTES:
        num = size // 4 // group.world_size * group.world_size
        whole, part = torch.zeros(num, device=device), torch.zeros(num // group.world_size, device=device)
        exchanges: dict[str, Callable[[], object]] = {
            "all_reduce": partial(distributed.all_reduce, whole),
            "all_gather": partial(distributed.all_gather_into_tensor, whole, part),
            "reduce_scatter": partial(distributed.reduce_scatter_tensor, part, whole),
            "send": partial(_send_and_return, whole, group.rank),
        }
        for name, exchange in exchanges.items():
            times = []
            for _ in range(1 + _REPEATS):
                distributed.barrier()
                started = clock(device)
                exchange()
                times.append(math.inf if name == "send" and group.rank > 1 else clock(device) - started)
            # a rank that arrives early waits for the others: the shortest time is the collective's own
            shortest = [-negative for negative in group.largest_of([-seconds for seconds in times[1:]])]
            seconds = median(shortest) / (2 if name == "send" else 1)
            points.setdefault(name, []).append((*ring(name, whole.nbytes, group.world_size), seconds))
    return {name: Line.fit(found) for name, found in points.items()}


def _send_and_return(tensor: torch.Tensor, rank: int) -> None:
    """Rank 0 sends a tensor to rank 1, which sends it back; other ranks do nothing."""
    if rank < 2:
        for sends in (rank == 0, rank == 1):
            (distributed.send if sends else distributed.recv)(tensor, 1 - rank)
