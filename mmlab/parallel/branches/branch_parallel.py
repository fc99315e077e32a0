"""`BranchParallel`: a `FusionModel` whose image branch and text branch compute at the same time, in one process.

On CPUs each branch has a thread. The engine that walks backwards runs in one thread, so a branch's output is cut from
its graph, and the node that joins the branches hands their gradients back to both in two threads at once. On CUDA
kernels are queued without waiting and the engine has a thread for each device, so nothing is cut: with two devices each
branch runs on its own, with one device the text branch has a stream of its own.

Weights, their names, losses and gradients are those of the plain model, bit by bit in fp32 and under autocast, at the
same number of intra-op threads and without dropout in both branches (see `mmlab.parallel.branches.draws`). One exception, of
rounding: with masked language modelling, which uses the text encoder twice, a window of several micro-batches adds the
same terms in another order.

Costs the activations of both branches at once, and on two devices a copy of features there and of their gradients back.
Gradients reach the branches through `backward` alone: `torch.autograd.grad` towards a branch's weights finds no path.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mmlab.errors import OptionError
from mmlab.machine import require_device
from mmlab.model.fusion_model import IMAGE_MODULES, Encoded, FusionModel, FusionOutput
from mmlab.parallel.branches.draws import OwnDraws, draws, keeps_generator
from mmlab.parallel.branches.placement import BranchPlacement
from mmlab.parallel.branches.side_by_side import is_watched, side_by_side
from mmlab.parallel.branches.timeline import BACKWARD, FORWARD, IMAGE, TEXT, Timeline
from mmlab.types import Batch

_SMALLEST_SEED, _LARGEST_SEED = 0, 2**62


class BranchParallel(FusionModel):
    """Takes over a `FusionModel`; a `FusionTrainer` trains it like the plain one, and checkpoints interchange.

    >>> from mmlab.model import build_model
    >>> model = build_model("tiny", vocab_size=100)
    >>> branches = BranchParallel(model, BranchPlacement(image="cpu", text="cpu"))
    >>> branches.state_dict().keys() == model.state_dict().keys()
    True

    Args:
        model: its modules are used, not copied, and moved to their devices.
        placement: devices of the branches.
        timeline: takes the spans of both branches on CPUs.
        concurrent: False lets the branches take turns in the calling thread, to compare.
        threads_per_branch: intra-op threads of each branch meanwhile (CPU); None shares torch's number evenly.

    Raises:
        OptionError: another kind of model, which has no branches that are known, or a device that is not there.
    """

    not_compiled_because = "its branches run in threads or on streams of their own"

    def __init__(
        self,
        model: nn.Module,
        placement: BranchPlacement | None = None,
        *,
        timeline: Timeline | None = None,
        concurrent: bool = True,
        threads_per_branch: int | None = None,
    ) -> None:
        nn.Module.__init__(self)
        if not isinstance(model, FusionModel):
            raise OptionError(
                f"{type(model).__name__} has no image and text branch that meet in a fusion; branch parallelism "
                "needs a FusionModel (build_model makes one)"
            )
        if threads_per_branch is not None and threads_per_branch < 1:
            raise OptionError(f"threads_per_branch must be at least 1, found {threads_per_branch}")
        self.__dict__.update(vars(model))  # the same modules under the same names
        self.placement, self.timeline = placement or BranchPlacement(), timeline
        self.concurrent, self.threads_per_branch = concurrent, threads_per_branch
        self._number = 0
        self._place()

    @property
    def branch_devices(self) -> list[torch.device]:
        """Devices that the model lives on, the fusion's first."""
        return self.placement.devices

    @property
    def takes_turns_because(self) -> str | None:
        """Why the branches cannot run at once on CPUs in training, if they cannot."""
        drawing = [draws(branch) for branch in self._encoders]
        kept = [keeps_generator(branch) for branch in self._encoders]
        if any(drawing) and any(kept) and (all(drawing) or drawing != kept):
            return (
                "a branch has dropout, and checkpointing in a Hugging Face encoder sets the generator back that "
                "both threads draw from"
            )
        return None

    def to(self, *args: Any, **kwargs: Any) -> BranchParallel:
        """Change type or memory order; devices stay those of the placement.

        Raises:
            OptionError: another device than the fusion's.
        """
        device, dtype, _, memory_format = torch._C._nn._parse_to(*args, **kwargs)
        if device is not None and str(BranchPlacement(fusion=str(device)).fusion) != self.placement.fusion:
            raise OptionError(
                f"the branches are placed with the fusion on {self.placement.fusion}, found device {device}; "
                f"train with device={self.placement.fusion!r}, or give BranchParallel another placement"
            )
        if dtype is not None or memory_format is not None:
            nn.Module.to(self, dtype=dtype, memory_format=memory_format)  # type: ignore[call-overload]
        return self

    def forward(self, batch: Batch) -> FusionOutput:
        """Encode both branches at once and join them on the fusion's device."""
        image_device, text_device = self.placement.image, self.placement.text
        pixels = [
            tensor.to(image_device, non_blocking=True) for tensor in (batch.pixel_values, batch.pixel_mask)
        ]
        texts = [
            tensor.to(text_device, non_blocking=True) for tensor in (batch.input_ids, batch.attention_mask)
        ]
        encode_image, encode_text = partial(self.encode_image, *pixels), partial(self.encode_text, *texts)
        if is_watched():
            image, text = encode_image(), encode_text()
        elif image_device.startswith("cpu") and text_device.startswith("cpu"):
            image, text = self._threaded(encode_image, encode_text)
        elif image_device == text_device and self.concurrent:
            image, text = _streamed(encode_image, encode_text, torch.device(image_device))
        else:  # kernels are queued without waiting; a CPU goes last, so that the other device has work meanwhile
            if image_device == "cpu":
                text, image = encode_text(), encode_image()
            else:
                image, text = encode_image(), encode_text()
        self._number += 1
        return self.join(*(_moved(encoded, self.placement.fusion) for encoded in (image, text)))

    @property
    def _encoders(self) -> tuple[nn.Module, nn.Module]:
        return self.image_encoder, self.text_encoder

    def _place(self) -> None:
        placement = self.placement
        for device in placement.devices:
            require_device(str(device))
        self.fusion.to(placement.fusion)
        for name, module in self.named_modules():
            if name in IMAGE_MODULES:
                module.to(placement.image)
            elif name in ("text_encoder", "text_head", "token_head", "fusion.mix_texts"):
                module.to(placement.text)
        self.match_head.to(placement.fusion)
        self.log_logit_scale.data = self.log_logit_scale.data.to(placement.fusion)
        self.pixel_mean, self.pixel_std = (
            statistics.to(placement.image) for statistics in (self.pixel_mean, self.pixel_std)
        )

    def _threaded(
        self, encode_image: Callable[[], Encoded], encode_text: Callable[[], Encoded]
    ) -> tuple[Encoded, Encoded]:
        together = self.concurrent and not (self.training and self.takes_turns_because)
        pair = _Pair(together, self.threads_per_branch, self.timeline, self._number)
        contexts: list[AbstractContextManager[Any]] = [nullcontext(), nullcontext()]
        if together and self.training and all(map(draws, self._encoders)):
            seeds = torch.randint(_SMALLEST_SEED, _LARGEST_SEED, (2,)).tolist()
            contexts = [OwnDraws(seed) for seed in seeds]

        def encode(encoder: Callable[[], Encoded], context: AbstractContextManager[Any]) -> Encoded:
            with context:
                return encoder()

        image, text = pair.run(
            FORWARD, partial(encode, encode_image, contexts[0]), partial(encode, encode_text, contexts[1])
        )
        return (image, text) if not torch.is_grad_enabled() else pair.cut(image, text)

    def _tell(
        self,
        image: Tensor,
        image_mask: Tensor,
        masked_ids: Tensor,
        attention_mask: Tensor,
        positions: Tensor,
        targets: Tensor,
    ) -> Tensor:
        """The same with the texts, and the head over the vocabulary, on the text branch's device."""
        at = self.placement.text
        text, fusable = self._encode_texts(masked_ids.to(at), attention_mask.to(at))
        fused, fused_mask = self.fusion.fuse(image, image_mask, fusable.to(image.device), attention_mask)
        told = self._tell_tokens(text, *(tensor.to(at) for tensor in (fused, fused_mask, positions, targets)))
        return told.to(image.device)


class _Pair:
    """Two branches of one forward pass: run at once, cut from their graphs, and taught at once."""

    def __init__(
        self, together: bool, num_threads: int | None, timeline: Timeline | None, number: int
    ) -> None:
        self.together, self.num_threads = together, num_threads
        self.timeline, self.number = timeline, number
        self.outputs: list[list[Tensor]] = []  # of each branch, those that ask for a gradient

    def run(self, phase: str, image: Callable[[], Any], text: Callable[[], Any]) -> tuple[Any, Any]:
        """Both, in two threads or in turn."""
        image, text = (self._timed(name, phase, work) for name, work in ((IMAGE, image), (TEXT, text)))
        if self.together:
            return side_by_side(image, text, num_threads=self.num_threads)
        return image(), text()

    def _timed(self, branch: str, phase: str, work: Callable[[], Any]) -> Callable[[], Any]:
        timeline = self.timeline
        if timeline is None:
            return work

        def timed() -> Any:
            with timeline.span(self.number, branch, phase):
                return work()

        return timed

    def cut(self, image: Encoded, text: Encoded) -> tuple[Encoded, Encoded]:
        """The same values, behind one node that hands gradients back to both branches."""
        branches = [image, text]
        self.outputs = [[tensor for tensor in branch[:2] if tensor.requires_grad] for branch in branches]
        leaves = [tensor.detach().requires_grad_() for outputs in self.outputs for tensor in outputs]
        if not leaves:
            return image, text
        joined = iter(_Boundary.apply(self, *leaves))
        cut = [
            branch._replace(
                **{
                    name: next(joined)
                    for name, tensor in zip(("embedding", "features"), branch[:2], strict=True)
                    if tensor.requires_grad
                }
            )
            for branch in branches
        ]
        return cut[0], cut[1]

    def teach(self, gradients: tuple[Tensor | None, ...], keep_graph: bool) -> None:
        """Gradients of the outputs, in their order, into both branches."""
        rest = iter(gradients)
        taught = [
            [(tensor, gradient) for tensor in outputs if (gradient := next(rest)) is not None]
            for outputs in self.outputs
        ]

        def back(pairs: list[tuple[Tensor, Tensor]]) -> None:
            tensors, given = zip(*pairs, strict=True)
            torch.autograd.backward(tensors, given, retain_graph=keep_graph)

        if all(taught):
            self.run(BACKWARD, partial(back, taught[0]), partial(back, taught[1]))
        else:
            for branch, pairs in zip((IMAGE, TEXT), taught, strict=True):
                if pairs:
                    self._timed(branch, BACKWARD, partial(back, pairs))()


class _Boundary(torch.autograd.Function):
    """Between the branches and what reads them: forward nothing happens, backward both branches are taught."""

    @staticmethod
    def forward(ctx: Any, pair: _Pair, *leaves: Tensor) -> tuple[Tensor, ...]:
        ctx.pair = pair
        ctx.set_materialize_grads(False)
        return tuple(leaf.view_as(leaf) for leaf in leaves)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, ...]:
        state = torch.get_rng_state()  # checkpointing sets it back and forth, in both threads
        try:
            ctx.pair.teach(gradients, torch._C._autograd._get_current_graph_task_keep_graph())
        finally:
            torch.set_rng_state(state)
        return (None,) * (1 + len(gradients))


def _streamed(
    encode_image: Callable[[], Encoded], encode_text: Callable[[], Encoded], device: torch.device
) -> tuple[Encoded, Encoded]:
    """The texts on a stream of their own; backward the engine runs each node on the stream of its forward pass."""
    here, side = torch.cuda.current_stream(device), torch.cuda.Stream(device)
    side.wait_stream(here)
    image = encode_image()
    with torch.cuda.stream(side):
        text = encode_text()
    here.wait_stream(side)
    for tensor in text:
        tensor.record_stream(here)
    return image, text


def _moved(encoded: Encoded, device: str) -> Encoded:
    return Encoded(*(tensor.to(device, non_blocking=True) for tensor in encoded))
