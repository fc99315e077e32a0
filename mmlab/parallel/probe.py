"""What the simulation of a step needs, measured: seconds of each part on one device, and of messages of several sizes.

Parts are measured on all ranks at once, without communication between them: if ranks share memory or cores, as on one
machine, that is in the figures. Links are measured between the same ranks while nothing else runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from torch import Tensor, distributed, nn

from mmlab.errors import OptionError
from mmlab.model.fusion_model import Encoded
from mmlab.model.parameters import parts_of
from mmlab.parallel.links import Line, Link, Network, ring
from mmlab.parallel.predict import StepCosts
from mmlab.training.losses.base import LossTerms
from mmlab.training.losses.contrastive import Contrastive
from mmlab.types import Batch

_MESSAGE_BYTES = (2**10, 2**16, 2**20, 2**22, 2**24)
_REPEATS = 5
_PARTS = tuple(f"{part}_{phase}" for part in ("image", "text", "fusion") for phase in ("forward", "backward"))


def clock(device: torch.device) -> float:
    """Now, after the device has finished."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def probe_parts(
    trainer: Any, batches: Sequence[Batch], *, meet: Callable[[], object] = lambda: None
) -> dict[str, Any]:
    """Measure every part of a step, several times for each batch.

    Args:
        trainer: a `FusionTrainer` of a `FusionModel`; it is trained meanwhile.
        batches: of two sizes or more, on the trainer's device.
        meet: called before each step, to start all ranks together.

    Returns:
        Every repetition, and the sizes of gradients and features; fit for JSON, see `costs_from`.
    """
    rows = []
    for batch in batches:
        repeats: list[dict[str, Any]] = []
        for _ in range(1 + _REPEATS):
            meet()
            found = _one_step(trainer, batch)
            started = clock(trainer.device)
            trainer.train_step([batch])
            found["step"] = clock(trainer.device) - started
            repeats.append(found)
        seconds = {name: [found[name] for found in repeats[1:]] for name in repeats[0]}
        rows.append({"num_samples": len(batch), "seconds": seconds})
    with torch.no_grad(), trainer.precision.autocast():
        output = trainer.model(batch)
    features_bytes = output.features[0].nbytes / len(batch)
    reads_features = any(type(goal) is not Contrastive for goal in trainer.objectives.values())
    sizes = {
        part: sum(weight.nbytes for weight in weights if weight.requires_grad)
        for part, weights in parts_of(trainer.model).items()
    }
    return {
        "rows": rows,
        "gradient_bytes": sizes,
        "image_output_bytes": output.image_embedding.nbytes / len(batch) + reads_features * features_bytes,
        "image_layer_bytes": features_bytes,
    }


def costs_from(probes: Sequence[Mapping[str, Any]]) -> StepCosts:
    """Costs of a step from what each rank measured: medians of the slowest rank, as lines in the number of samples."""
    first = probes[0]
    sizes = [row["num_samples"] for row in first["rows"]]

    def seconds(name: str, place: int) -> float:
        return max(median(probe["rows"][place]["seconds"][name]) for probe in probes)

    lines = {
        name: Line.fit([(size, seconds(name, place)) for place, size in enumerate(sizes)]) for name in _PARTS
    }
    rest_s = seconds("step", 0) - sum(seconds(name, 0) for name in (*_PARTS, "optimizer"))
    layers = [median(times) for times in zip(*first["rows"][0]["seconds"]["image_layers"], strict=True)]
    gradients = first["gradient_bytes"]
    return StepCosts(
        **lines,
        optimizer_s=median(seconds("optimizer", place) for place in range(len(sizes))),
        other_s=max(0.0, rest_s),
        image_bytes=gradients.get("image", 0),
        text_bytes=gradients.get("text", 0),
        fusion_bytes=sum(size for name, size in gradients.items() if name not in ("image", "text")),
        image_output_bytes=first["image_output_bytes"],
        image_layer_bytes=first["image_layer_bytes"],
        image_layers=tuple(layer_s / sum(layers) for layer_s in layers),
    )


def _one_step(trainer: Any, batch: Batch) -> dict[str, Any]:
    """Seconds of each part of one step; the graph is cut behind the encoders."""
    model, device, precision = trainer.model, trainer.device, trainer.precision
    times: dict[str, Any] = {}

    @contextmanager
    def timed(name: str) -> Iterator[None]:
        started = clock(device)
        yield
        times[name] = clock(device) - started

    model.train()
    with precision.arithmetic():
        with precision.autocast():
            with _timed_layers(model, device) as moments, timed("image_forward"):
                image = model.encode_image(batch.pixel_values, batch.pixel_mask)
            with timed("text_forward"):
                text = model.encode_text(batch.input_ids, batch.attention_mask)
        leaves = [_leaves(image), _leaves(text)]
        with timed("fusion_forward"), precision.autocast():
            output = model.join(*leaves)
            counts = {name: goal.count(batch) for name, goal in trainer.objectives.items()}
            sums = {name: goal(output, batch) for name, goal in trainer.objectives.items()}
            loss = LossTerms(counts).add(sums)
        with timed("fusion_backward"):
            loss.backward()
        for name, encoded, leaf in (("text", text, leaves[1]), ("image", image, leaves[0])):
            pairs = [
                (tensor, cut.grad)
                for tensor, cut in zip(encoded[:2], leaf[:2], strict=True)
                if cut.grad is not None
            ]
            with timed(f"{name}_backward"):
                if pairs:
                    torch.autograd.backward([tensor for tensor, _ in pairs], [grad for _, grad in pairs])
        with timed("optimizer"):
            trainer.optimizer.step()
            model.zero_grad(set_to_none=True)
    # what comes before the first layer counts to it, what comes after the last (the head) to the last
    ends = [*moments[:-1], moments[0] + times["image_forward"]] if len(moments) > 1 else []
    times["image_layers"] = [after - before for before, after in pairwise(ends)]
    return times


def _leaves(encoded: Encoded) -> Encoded:
    embedding, features = (tensor.detach().requires_grad_(tensor.requires_grad) for tensor in encoded[:2])
    return Encoded(embedding, features, encoded.mask)


@contextmanager
def _timed_layers(model: Any, device: torch.device) -> Iterator[list[float]]:
    """Collects when the image encoder began and when each of its blocks was done; nothing if it cannot be cut."""
    moments: list[float] = []
    try:
        model.require_cut(1)
    except OptionError:
        yield moments
        return
    blocks: Sequence[nn.Module] = model.image_encoder.blocks
    handles = [block.register_forward_hook(lambda *_: moments.append(clock(device))) for block in blocks]
    moments.append(clock(device))
    try:
        yield moments
    finally:
        for handle in handles:
            handle.remove()


def probe_network(device: torch.device) -> list[dict[str, Any]]:
    """Seconds of collectives of several sizes, every repetition as this rank saw it; a collective."""
    num_ranks = distributed.get_world_size()
    rows = []
    for size in _MESSAGE_BYTES:
        num = size // 4 // num_ranks * num_ranks
        whole, part = torch.zeros(num, device=device), torch.zeros(num // num_ranks, device=device)
        for name, run in _collectives(whole, part).items():
            times = []
            for _ in range(1 + _REPEATS):
                distributed.barrier()
                started = clock(device)
                run()
                times.append(clock(device) - started)
            rows.append({"collective": name, "num_bytes": whole.nbytes, "seconds": times[1:]})
    return [*rows, _probe_overlap(device)]


def network_from(probes: Sequence[Sequence[Mapping[str, Any]]]) -> tuple[Network, float]:
    """Links fitted to what each rank measured, and the share of hidden communication that costs nothing."""
    links: dict[str, list[tuple[float, float, float]]] = {}
    overlap = 1.0
    for rows in zip(*probes, strict=True):
        name = rows[0]["collective"]
        if name == "overlap":
            overlap = min(row["overlap"] for row in rows)
            continue
        # the rank that comes first waits for the last: the shortest time is that of the collective itself
        seconds = median(min(times) for times in zip(*(row["seconds"] for row in rows), strict=True))
        seconds /= 2 if name == "send" else 1  # there and back
        links.setdefault(name, []).append((*ring(name, rows[0]["num_bytes"], len(probes)), seconds))
    return Network(**{name: Link.fit(found) for name, found in links.items()}), overlap


def _collectives(whole: Tensor, part: Tensor) -> dict[str, Callable[[], object]]:
    def there_and_back() -> None:
        rank = distributed.get_rank()
        if rank > 1:
            return
        for sends in (rank == 0, rank == 1):
            (distributed.send if sends else distributed.recv)(whole, 1 - rank)

    return {
        "all_reduce": lambda: distributed.all_reduce(whole),
        "all_gather": lambda: distributed.all_gather_into_tensor(whole, part),
        "reduce_scatter": lambda: distributed.reduce_scatter_tensor(part, whole),
        "send": there_and_back,
    }


def _probe_overlap(device: torch.device) -> dict[str, Any]:
    """How much of an all-reduce a computation of the same length hides: (compute + reduce - both) / the shorter."""
    flat, matrix = torch.zeros(2**22, device=device), torch.ones(512, 512, device=device)

    def run(num_products: int, *, reduces: bool) -> float:
        times = []
        for _ in range(_REPEATS):
            distributed.barrier()
            started = clock(device)
            work = distributed.all_reduce(flat, async_op=True) if reduces else None
            for _ in range(num_products):
                torch.mm(matrix, matrix)
            if work is not None:
                work.wait()
            times.append(clock(device) - started)
        return median(times)

    run(0, reduces=True)
    reduce_s = run(0, reduces=True)
    num_products = torch.tensor(max(1.0, reduce_s / max(1e-9, run(8, reduces=False) / 8)), device=device)
    distributed.all_reduce(num_products, op=distributed.ReduceOp.MAX)
    compute_s, both_s = (run(round(float(num_products)), reduces=reduces) for reduces in (False, True))
    ratio = (compute_s + reduce_s - both_s) / min(compute_s, reduce_s)
    return {"collective": "overlap", "overlap": min(1.0, max(0.0, ratio))}
