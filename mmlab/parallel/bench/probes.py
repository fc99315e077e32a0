"""What the model of scaling needs: seconds of each part on one device, and of messages of several sizes.

Compute is measured on all ranks at once, without communication: where they share memory or cores, as on one machine,
that is in the figures. Links are measured between the same ranks, as nothing else runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

import torch
from torch import Tensor, distributed

from mmlab.model.parameters import parts_of
from mmlab.parallel.bench.arms import clock, make_trainer, share
from mmlab.parallel.bench.group import Groups
from mmlab.parallel.bench.setting import Setting, make_batch
from mmlab.parallel.scaling.links import Line, Link, Network, ring
from mmlab.parallel.scaling.work import Work
from mmlab.training.fusion_trainer import FusionTrainer
from mmlab.training.losses.base import LossTerms
from mmlab.types import Batch

_SIZES = (2**10, 2**16, 2**20, 2**22, 2**24)  # bytes
_REPEATS = 5
_PARTS = (
    "image_forward",
    "text_forward",
    "fusion_forward",
    "fusion_backward",
    "text_backward",
    "image_backward",
)


def probe_work(setting: Setting, groups: Groups) -> dict[str, Any]:
    """Every repetition of every part at two batch sizes, on this rank; called on all ranks at once."""
    torch.set_num_threads(setting.threads_per_rank)
    trainer = make_trainer(setting, groups.rank)  # before there is a process group: it reduces nothing
    rows = []
    with groups.joined():
        for num_ranks in dict.fromkeys((max(2, setting.num_ranks), 1)):
            batch = make_batch(setting, share(setting, 0, num_ranks)).to(trainer.device)
            parts: dict[str, list[float]] = {name: [] for name in (*_PARTS, "optimizer", "step")}
            for repeat in range(-1, _REPEATS):
                distributed.barrier()
                found = _one_step(trainer, batch)
                started = clock(trainer.device)
                trainer.train_step([batch])
                found["step"] = clock(trainer.device) - started
                for name, seconds in found.items():
                    if repeat >= 0:
                        parts[name].append(seconds)
            rows.append({"batch_size": len(batch), "seconds": parts})
        distributed.barrier()
    features = _feature_bytes(trainer, batch)
    parts_by_name = parts_of(trainer.model)
    sizes = {
        name: sum(weight.nbytes for weight in weights if weight.requires_grad)
        for name, weights in parts_by_name.items()
    }
    return {"rows": rows, "gradient_bytes": sizes, "feature_bytes": features}


def work_from(probes: list[Mapping[str, Any]]) -> Work:
    """Medians over repetitions, the slowest rank's, as lines in the batch size."""
    first = probes[0]
    sizes = [row["batch_size"] for row in first["rows"]]

    def seconds(name: str, place: int) -> float:
        return max(median(probe["rows"][place]["seconds"][name]) for probe in probes)

    lines = {
        name: Line.fit([(size, seconds(name, place)) for place, size in enumerate(sizes)]) for name in _PARTS
    }
    others = [
        seconds("step", place) - sum(seconds(name, place) for name in (*_PARTS, "optimizer"))
        for place in range(len(sizes))
    ]
    gradients = first["gradient_bytes"]
    return Work(
        **lines,
        optimizer_s=median(seconds("optimizer", place) for place in range(len(sizes))),
        other_s=max(0.0, others[0]),
        image_bytes=gradients.get("image", 0),
        text_bytes=gradients.get("text", 0),
        fusion_bytes=sum(size for name, size in gradients.items() if name not in ("image", "text")),
        image_feature_bytes=first["feature_bytes"]["image"],
        text_feature_bytes=first["feature_bytes"]["text"],
    )


def probe_network(setting: Setting, groups: Groups) -> list[dict[str, Any]]:
    """Seconds of collectives of several sizes: every repetition, as this rank saw them."""
    torch.set_num_threads(setting.threads_per_rank)
    rank, num_ranks = groups.rank, groups.num_ranks
    device = setting.device(rank)
    rows = []
    with groups.joined():
        for size in _SIZES:
            num = size // 4 // num_ranks * num_ranks
            whole, part = torch.zeros(num, device=device), torch.zeros(num // num_ranks, device=device)
            for name, run in _collectives(rank, num_ranks, whole, part).items():
                times = []
                for repeat in range(-1, _REPEATS):
                    distributed.barrier()
                    started = clock(device)
                    run()
                    if repeat >= 0:
                        times.append(clock(device) - started)
                rows.append({"collective": name, "num_bytes": whole.nbytes, "seconds": times})
        rows.append(_probe_overlap(device))
    return rows


def network_from(probes: list[list[dict[str, Any]]], num_ranks: int) -> tuple[Network, float]:
    """Links fitted to the slowest rank's medians; and the share of hidden communication that costs nothing."""
    links: dict[str, list[tuple[float, float, float]]] = {}
    overlap = 1.0
    for rows in zip(*probes, strict=True):
        if rows[0]["collective"] == "overlap":
            overlap = min(row["overlap"] for row in rows)
            continue
        # the first to arrive waits for the last: what all of them share is the shortest
        seconds = median(min(times) for times in zip(*(row["seconds"] for row in rows), strict=True))
        if rows[0]["collective"] == "send":
            seconds /= 2  # there and back
        messages, num_bytes = ring(rows[0]["collective"], rows[0]["num_bytes"], num_ranks)
        links.setdefault(rows[0]["collective"], []).append((messages, num_bytes, seconds))
    return Network(**{name: Link.fit(found) for name, found in links.items()}), overlap


def _collectives(rank: int, num_ranks: int, whole: Tensor, part: Tensor) -> dict[str, Callable[[], object]]:
    def there_and_back() -> None:
        if rank == 0:
            distributed.send(whole, 1)
            distributed.recv(whole, 1)
        elif rank == 1:
            distributed.recv(whole, 0)
            distributed.send(whole, 0)

    other = torch.empty_like(whole)
    return {
        "all_reduce": lambda: distributed.all_reduce(whole),
        "all_gather": lambda: distributed.all_gather_into_tensor(whole, part),
        "reduce_scatter": lambda: distributed.reduce_scatter_tensor(part, whole),
        "send": there_and_back,
        "copy": lambda: other.copy_(whole),
    }


def _probe_overlap(device: torch.device) -> dict[str, Any]:
    """How much of an all-reduce a computation of like length hides: (compute + reduce - both) / the shorter."""
    flat = torch.zeros(2**22, device=device)
    matrix = torch.ones(512, 512, device=device)

    def reduce() -> Any:
        return distributed.all_reduce(flat, async_op=True)

    def compute(count: int) -> None:
        for _ in range(count):
            torch.mm(matrix, matrix)

    def timed(work: Callable[[], object]) -> float:
        times = []
        for _ in range(_REPEATS):
            distributed.barrier()
            started = clock(device)
            work()
            times.append(clock(device) - started)
        return median(times)

    timed(lambda: reduce().wait())
    reduce_s = timed(lambda: reduce().wait())
    count = max(1, round(reduce_s / max(1e-9, timed(lambda: compute(8)) / 8)))
    counts = torch.tensor(float(count), device=device)
    distributed.all_reduce(counts, op=distributed.ReduceOp.MAX)
    count = int(counts)
    compute_s = timed(lambda: compute(count))

    def both() -> None:
        waiting = reduce()
        compute(count)
        waiting.wait()

    both_s = timed(both)
    ratio = (compute_s + reduce_s - both_s) / min(compute_s, reduce_s)
    return {
        "collective": "overlap",
        "compute_s": compute_s,
        "reduce_s": reduce_s,
        "both_s": both_s,
        "overlap": min(1.0, max(0.0, ratio)),
    }


def _one_step(trainer: FusionTrainer, batch: Batch) -> dict[str, float]:
    """Seconds of each part of one step, the graph cut behind the encoders."""
    model, device = trainer.model, trainer.device
    times: dict[str, float] = {}
    cuts: dict[str, list[tuple[Tensor, Tensor]]] = {"image": [], "text": []}
    hooks = []

    def cut(part: str, output: Any) -> Any:
        """Tensors that have a gradient are replaced by leaves."""
        if isinstance(output, tuple | list):
            return type(output)(cut(part, item) for item in output)
        if isinstance(output, Tensor) and output.requires_grad:
            leaf = output.detach().requires_grad_()
            cuts[part].append((output, leaf))
            return leaf
        return output

    for part in cuts:

        def before(module: Any, args: Any, part: str = part) -> None:
            times[f"{part} started"] = clock(device)

        def after(module: Any, args: Any, output: Any, part: str = part) -> Any:
            times[f"{part}_forward"] = clock(device) - times.pop(f"{part} started")
            return cut(part, output)

        encoder: Any = getattr(model, f"{part}_encoder")
        hooks += [encoder.register_forward_pre_hook(before), encoder.register_forward_hook(after)]
    try:
        model.train()
        started = clock(device)
        with trainer.precision.arithmetic(), trainer.precision.autocast():
            output = model(batch)
            counts = {name: goal.count(batch) for name, goal in trainer.objectives.items()}
            loss = LossTerms(counts).add(
                {name: goal(output, batch) for name, goal in trainer.objectives.items()}
            )
        times["fusion_forward"] = clock(device) - started - times["image_forward"] - times["text_forward"]
    finally:
        for hook in hooks:
            hook.remove()
    with trainer.precision.arithmetic():
        started = clock(device)
        loss.backward()
        times["fusion_backward"] = clock(device) - started
        for part in ("text", "image"):
            taught = [(whole, leaf.grad) for whole, leaf in cuts[part] if leaf.grad is not None]
            started = clock(device)
            torch.autograd.backward([whole for whole, _ in taught], [grad for _, grad in taught])
            times[f"{part}_backward"] = clock(device) - started
        started = clock(device)
        trainer.optimizer.step()
        trainer.model.zero_grad(set_to_none=True)
        times["optimizer"] = clock(device) - started
    return times


def _feature_bytes(trainer: FusionTrainer, batch: Batch) -> dict[str, float]:
    """Of one sample, of the features that the fusion reads."""
    with torch.no_grad(), trainer.precision.autocast():
        image, _, text, _ = trainer.model(batch).features
    return {"image": image.nbytes / len(batch), "text": text.nbytes / len(batch)}
