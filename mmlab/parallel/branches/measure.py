"""What each branch of a model costs: seconds forward and backward, layer by layer, and the bytes between branches."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from mmlab.errors import OptionError
from mmlab.model.fusion_model import Encoded, FusionModel
from mmlab.parallel.branches.timeline import IMAGE, TEXT
from mmlab.training.losses.base import LossTerms, Objective
from mmlab.training.losses.contrastive import Contrastive
from mmlab.training.losses.names import parse_objectives
from mmlab.training.precision import Precision
from mmlab.types import Batch, BatchShape


@dataclass(frozen=True, slots=True, kw_only=True)
class BranchCost:
    """One branch with one micro-batch on one device."""

    forward_s: float
    backward_s: float
    layers: tuple[
        float, ...
    ]  # share of the branch's forward time in each layer, the last with all that follows it
    layer_bytes: int  # what one layer hands to the next
    output_bytes: int  # what the branch hands to fusion and objectives
    weight_bytes: int  # of what learns: the size of its gradient

    @property
    def both_s(self) -> float:
        """Forward and backward."""
        return self.forward_s + self.backward_s


@dataclass(frozen=True, slots=True, kw_only=True)
class BranchCosts:
    """Both branches and what joins them: fusion and objectives."""

    image: BranchCost
    text: BranchCost
    fusion_forward_s: float
    fusion_backward_s: float
    measured_on: str
    shape: BatchShape

    @property
    def fusion_s(self) -> float:
        """Fusion and objectives, forward and backward."""
        return self.fusion_forward_s + self.fusion_backward_s

    @property
    def total_s(self) -> float:
        """One micro-batch, one thing after the other."""
        return self.image.both_s + self.text.both_s + self.fusion_s


def measure_branches(
    model: nn.Module,
    batch: Batch | BatchShape,
    *,
    objectives: Sequence[str] | Mapping[str, Objective] = ("contrastive", "matching"),
    precision: str = "fp32",
    device: str = "cpu",
    repeats: int = 3,
) -> BranchCosts:
    """Measure one micro-batch, medians of some repeats after one that is not counted.

    Leaves gradients and statistics as they were, and torch's generators where they were.

    Args:
        batch: a batch, or a shape that is filled at random.
        device: where to measure; the model is moved there.

    Raises:
        OptionError: no `FusionModel`, no repeats, or a batch that holds nothing to learn from.
    """
    if not isinstance(model, FusionModel):
        raise OptionError(f"{type(model).__name__} has no branches to measure; give a FusionModel")
    if repeats < 1:
        raise OptionError(f"repeats must be at least 1, found {repeats}")
    here = torch.device(device)
    model = model.to(here)
    whole = (batch if isinstance(batch, Batch) else _filled(batch, model)).to(here)
    goals = parse_objectives(model, objectives)
    counts = {name: goal.count(whole) for name, goal in goals.items()}
    if not any(counts.values()):
        raise OptionError(
            f"a batch of {tuple(whole.shape)} holds nothing to learn from; give a batch with pairs"
        )
    seconds: dict[str, list[float]] = {}
    layers: dict[str, list[list[float]]] = {IMAGE: [], TEXT: []}
    parsed = Precision.parse(precision, here)

    def timed(name: str, work: Callable[[], Any]) -> Any:
        started = _clock(here)
        found = work()
        seconds.setdefault(name, []).append(_clock(here) - started)
        return found

    def encode(name: str, encoder: nn.Module, work: Callable[[], Encoded]) -> Encoded:
        with parsed.autocast(), _timing_layers(encoder, here) as times:
            found = timed(f"{name} forward", work)
        layers[name].append(_shares(times, seconds[f"{name} forward"][-1]))
        return found

    def once() -> tuple[Encoded, Encoded]:
        image = encode(
            IMAGE, model.image_encoder, lambda: model.encode_image(whole.pixel_values, whole.pixel_mask)
        )
        text = encode(
            TEXT, model.text_encoder, lambda: model.encode_text(whole.input_ids, whole.attention_mask)
        )
        leaves = [
            Encoded(*(tensor.detach().requires_grad_() for tensor in branch[:2]), branch.mask)  # type: ignore[call-arg]
            for branch in (image, text)
        ]

        def join() -> Tensor:
            with parsed.autocast():
                output = model.join(*leaves)
                return LossTerms(counts).add({name: goal(output, whole) for name, goal in goals.items()})

        loss = timed("fusion forward", join)
        timed("fusion backward", loss.backward)
        for name, branch, leaf in ((IMAGE, image, leaves[0]), (TEXT, text, leaves[1])):
            pairs = [
                (tensor, cut.grad)
                for tensor, cut in zip(branch[:2], leaf[:2], strict=True)
                if cut.grad is not None and tensor.requires_grad
            ]
            timed(f"{name} backward", partial(_back, pairs))
        return image, text

    with _undisturbed(model, here), parsed.arithmetic():
        for _ in range(repeats + 1):
            image, text = once()
    medians = {name: statistics.median(times[1:]) for name, times in seconds.items()}
    reads_features = any(type(goal) is not Contrastive for goal in goals.values())

    def cost(name: str, branch: Encoded, modules: Sequence[nn.Module]) -> BranchCost:
        shares = [statistics.median(column) for column in zip(*layers[name][1:], strict=True)]
        return BranchCost(
            forward_s=medians[f"{name} forward"],
            backward_s=medians[f"{name} backward"],
            layers=tuple(share / sum(shares) for share in shares),
            layer_bytes=branch.features.nbytes,
            output_bytes=branch.embedding.nbytes + (branch.features.nbytes if reads_features else 0),
            weight_bytes=sum(
                weight.nbytes for module in modules for weight in module.parameters() if weight.requires_grad
            ),
        )

    return BranchCosts(
        image=cost(IMAGE, image, (model.image_encoder, model.image_head)),
        text=cost(TEXT, text, (model.text_encoder, model.text_head)),
        fusion_forward_s=medians["fusion forward"],
        fusion_backward_s=medians["fusion backward"],
        measured_on=str(here),
        shape=whole.shape,
    )


def _filled(shape: BatchShape, model: FusionModel) -> Batch:
    """Random pixels and tokens of a shape, nothing padded."""
    size, num_tokens, height, width = shape
    generator = torch.Generator().manual_seed(0)
    vocabulary = getattr(model.text_encoder, "embedding", None)
    num_known = 2 if vocabulary is None else len(vocabulary)
    return Batch(
        pixel_values=torch.randint(256, (size, 3, height, width), dtype=torch.uint8, generator=generator),
        pixel_mask=torch.ones(size, height, width, dtype=torch.bool),
        input_ids=torch.randint(num_known, (size, num_tokens), generator=generator),
        attention_mask=torch.ones(size, num_tokens, dtype=torch.bool),
        labels=None,
        record_ids=[f"sample {row}" for row in range(size)],
    )


def _back(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    if pairs:
        torch.autograd.backward([tensor for tensor, _ in pairs], [gradient for _, gradient in pairs])


@contextmanager
def _undisturbed(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Training mode; gradients, statistics, mode and generators as before afterwards."""
    gradients = [weight.grad for weight in model.parameters()]
    buffers = [buffer.clone() for buffer in model.buffers()]
    evaluated = [module for module in model.modules() if not module.training]
    model.zero_grad(set_to_none=True)
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            model.train()
            yield
    finally:
        for module in evaluated:
            module.training = False
        for weight, gradient in zip(model.parameters(), gradients, strict=True):
            weight.grad = gradient
        for buffer, before in zip(model.buffers(), buffers, strict=True):
            buffer.copy_(before)


@contextmanager
def _timing_layers(encoder: nn.Module, device: torch.device) -> Iterator[list[float]]:
    """Moments at which each layer of the encoder's longest list of layers was done, after the one it began at."""
    moments: list[float] = []
    lists: list[Any] = [
        module for module in encoder.modules() if isinstance(module, nn.ModuleList) and len(module)
    ]
    found: Any = max(
        lists, key=lambda layers: sum(weight.numel() for weight in layers.parameters()), default=[]
    )
    handles = [layer.register_forward_hook(lambda *_: moments.append(_clock(device))) for layer in found]
    moments.append(_clock(device))
    try:
        yield moments
    finally:
        for handle in handles:
            handle.remove()


def _shares(moments: Sequence[float], whole_s: float) -> list[float]:
    """Seconds of each layer; what comes before the first is its, what comes after the last is its."""
    if len(moments) < 2:
        return [whole_s]
    times = [end - start for start, end in pairwise(moments)]
    times[-1] += max(0.0, whole_s - sum(times))
    return times


def _clock(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
