"""`BranchRanks`: the image branch on rank 0; the text branch, the fusion and the losses on rank 1; layers can move.

    rank 0   image 0 | image 1 |        back 0 | image 2 | back 1 | ...
    rank 1   text 0  | fusion 0, back | text back 0 | text 1 | fusion 1, back | ...

Features go forward and their gradients come back (`mmlab.parallel.wire`; gloo between CPUs, NCCL between GPUs is not tried
yet). The image rank runs a few micro-batches ahead, and the gradient of a micro-batch's features is sent before the text
branch is trained, so that both ranks compute. Both read the same batches. Images usually take longer than texts, so rank
1 can compute the upper layers of a vision transformer too: what is sent is then the output of the lower layers.

Loss and gradients are bitwise those of one process with as many threads, in fp32 and under bf16 autocast, wherever the cut
is. Two exceptions: dropout in the image branch draws other masks (reproducible ones), and masked language modelling, which
uses the text encoder twice, adds the same terms in another order over several micro-batches.

A rank has the gradients of its own weights alone, so an optimizer over all weights updates only these. `share_weights` and
`share_moments` give both ranks all of them, to evaluate or to save.

Costs, per micro-batch: its image features and their gradient over the wire (only embeddings if all objectives are
contrastive), and activations of `1 + ahead` micro-batches on rank 0. Does not split a step that ran out of memory, nor
support fp16, whose loss scales would differ between the ranks.
"""

from __future__ import annotations

import math
import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor, distributed, nn

from mmlab.errors import OptionError, RunError
from mmlab.model.fusion_model import IMAGE_MODULES, Encoded, FusionModel
from mmlab.parallel.process_group import ProcessGroup
from mmlab.parallel.timeline import BACKWARD, FORWARD, FUSION, IMAGE, TEXT, WAIT, Timeline
from mmlab.parallel.wire import PeerFailed, Wire
from mmlab.training.losses.base import LossTerms, Objective
from mmlab.training.losses.contrastive import Contrastive
from mmlab.training.losses.names import parse_objectives
from mmlab.training.precision import Precision
from mmlab.types import Batch

_OF_IMAGES = (*(f"{name}." for name in IMAGE_MODULES), "pixel_")
_BLOCKS, _AFTER_BLOCKS = "image_encoder.blocks.", ("image_encoder.norm.", "image_head.")


class _ImagePart(NamedTuple):
    """What rank 0 sends to rank 1 for a micro-batch."""

    embedding: Tensor | None  # (B, D); None if rank 1 computes the upper layers
    features: Tensor | None  # (B, P, C); None if no objective reads them
    mask: Tensor  # (B, P)


class BranchRanks:
    """One of two ranks; both construct it with the same arguments, after `torch.distributed.init_process_group`.

    `FusionTrainer(..., strategy=make_strategy("branch"))` trains with it.

    Args:
        model: the same on both ranks; each trains its own branch.
        objectives: names in `mmlab.training.losses.OBJECTIVES`, or objects by name.
        precision: "fp32" or "bf16" ("tf32" on CUDA).
        device: of this rank.
        ahead: how many micro-batches rank 0 may be ahead.
        image_layers: number of image encoder blocks on rank 0, the others on rank 1; None leaves all on rank 0.
        ranks: measures how long this rank waits.

    Attributes:
        timeline: if set, takes the spans of this rank.

    Raises:
        OptionError: not two ranks, fp16, a model without branches, negatives from all ranks, or an encoder that
            cannot be cut.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        objectives: Sequence[str] | Mapping[str, Objective] = ("contrastive",),
        precision: str | Precision = "fp32",
        device: torch.device | str = "cpu",
        ahead: int = 1,
        image_layers: int | None = None,
        ranks: ProcessGroup | None = None,
    ) -> None:
        self.ranks, self.device = ranks or ProcessGroup(), torch.device(device)
        if self.ranks.world_size != 2:
            raise OptionError(
                "branch takes two ranks, one for the images and one for the texts, found "
                f"{self.ranks.world_size}; start with torchrun --nproc-per-node 2"
            )
        if not isinstance(model, FusionModel):
            raise OptionError(
                f"{type(model).__name__} has no image branch and text branch; branch needs a FusionModel"
            )
        self.model, self.precision = model.to(self.device), Precision.parse(precision, self.device)
        self.objectives = parse_objectives(model, objectives)
        if self.precision.scales:
            raise OptionError(
                "fp16 scales the loss, and the scales of two ranks would differ; use bf16 or fp32"
            )
        if any(getattr(goal, "all_ranks", False) for goal in self.objectives.values()):
            raise OptionError(
                "both ranks read the same batches, so negatives come from all of them; use contrastive"
            )
        if image_layers is not None:
            model.require_cut(image_layers)
        self.ahead, self._image_layers = ahead, image_layers
        self.timeline: Timeline | None = None
        self.has_images = self.ranks.rank == 0
        peer = 1 - self.ranks.rank
        self._features, self._gradients = (
            Wire(peer, distributed.new_group([0, 1]), self.device, self.ranks) for _ in range(2)
        )
        self._sends_features = any(type(goal) is not Contrastive for goal in self.objectives.values())
        self._number = 0  # micro-batches so far
        self._failed = False

    def owns(self, name: str) -> bool:
        """Whether this rank trains the weight of that name."""
        return (self._owner(name) == 0) == self.has_images

    def _owner(self, name: str) -> int:
        """The rank that trains a weight."""
        if self._image_layers is not None and name.startswith(_BLOCKS):
            block = int(name.removeprefix(_BLOCKS).partition(".")[0])
            return int(block >= self._image_layers)
        after_cut = self._image_layers is not None and name.startswith(_AFTER_BLOCKS)
        return int(after_cut or not name.startswith(_OF_IMAGES))

    def gradient(
        self,
        batches: Sequence[Batch],
        counts: Mapping[str, float],
        weights: Mapping[str, float] | None = None,
        *,
        seed: Callable[[int], None],
        doing: str = "the window",
    ) -> dict[str, float]:
        """Leave this rank's part of the window's gradient in its weights; a collective.

        Args:
            batches: micro-batches with something to learn from, on any device; the same on both ranks.
            counts: by objective, over all micro-batches.
            weights: by objective, the factor of its mean.
            seed: seeds the random draws that follow; called with 0 and, per micro-batch, its number from 1.
            doing: what this is a part of, for error messages.

        Returns:
            Mean losses, on both ranks.

        Raises:
            RunError: the other rank failed, now or in an earlier window, or has other batches; an error of this rank
                is raised as it is.
        """
        if self._failed:
            raise RunError(
                "a rank failed in an earlier window, and what was sent is lost; resume from a checkpoint"
            )
        self._require_same(batches, doing)
        terms = LossTerms(counts, weights)
        problem: Exception | None = None
        seed(0)
        try:
            if self.has_images:
                self._run_images(batches)
            else:
                self._run_texts(batches, terms, seed)
        except PeerFailed:  # the exchange below names it
            self._give_up()
        except Exception as error:
            problem = error
            self._give_up()
        self._failed = True
        self.ranks.raise_if_any_failed(problem, self.device, doing)
        self._failed = False
        self._number += len(batches)
        for wire in (self._features, self._gradients):
            wire.wait()
        means = terms.means()  # empty on rank 0
        sums = self.ranks.sums([means.get(name, 0.0) for name in counts], self.device)
        return {name: mean for name, mean in zip(counts, sums, strict=True) if counts[name]}

    def part_norms(self, parts: Mapping[str, Sequence[nn.Parameter]]) -> dict[str, float]:
        """L2 norms of the parts' gradients over both ranks, bitwise those of one process; a collective."""
        weights = [weight for of_part in parts.values() for weight in of_part]
        has_gradient = [weight.grad is not None for weight in weights]
        norms = iter([float(weight.grad.norm()) for weight in weights if weight.grad is not None])
        sums = self.ranks.sums(
            [*has_gradient, *(next(norms) if there else 0.0 for there in has_gradient)], self.device
        )
        both = zip(sums[: len(weights)], sums[len(weights) :], strict=True)
        found = {}
        for part, of_part in parts.items():
            there = [norm for has_any, norm in islice(both, len(of_part)) if has_any]
            if there:
                found[part] = math.hypot(*there)
        return found

    def share_weights(self) -> None:
        """Give each rank the weights and running statistics that the other one trains; a collective."""
        for name, tensor in self.model.state_dict(keep_vars=True).items():
            self._share(tensor.data, name)

    def share_moments(self, optimizer: torch.optim.Optimizer) -> None:
        """Give each rank AdamW's state of the other one's weights; a collective. `forget_moments` undoes it."""
        for name, weight in self.model.named_parameters():
            own, state = self.owns(name), optimizer.state
            if not self.ranks.largest(float(own and weight in state), self.device):
                continue
            if not own:
                state[weight] = {
                    "step": torch.zeros((), dtype=torch.float32, device=weight.device),
                    "exp_avg": torch.zeros_like(weight, memory_format=torch.preserve_format),
                    "exp_avg_sq": torch.zeros_like(weight, memory_format=torch.preserve_format),
                }
            for key in ("step", "exp_avg", "exp_avg_sq"):
                self._share(state[weight][key], name)

    def forget_moments(self, optimizer: torch.optim.Optimizer) -> None:
        """Drop the optimizer's state of the weights that this rank does not train."""
        for name, weight in self.model.named_parameters():
            if not self.owns(name):
                optimizer.state.pop(weight, None)

    def _require_same(self, batches: Sequence[Batch], doing: str) -> None:
        digest = zlib.crc32(repr([(batch.shape, batch.record_ids) for batch in batches]).encode())
        most, least = self.ranks.largest_of([digest, -digest], self.device)
        if most != -least:
            raise RunError(
                f"{doing}: the ranks have different batches; with branch both must read the same samples in the same "
                "order: give both the whole plan, and no sampler that shares samples out"
            )

    def _share(self, tensor: Tensor, name: str) -> None:
        """Copy from the rank that trains it to the other."""
        message = tensor.detach().to(self.device).contiguous()
        distributed.broadcast(message, self._owner(name))
        if not self.owns(name):
            tensor.copy_(message)

    def _give_up(self) -> None:
        (self._features if self.has_images else self._gradients).give_up()

    def _run_images(self, batches: Sequence[Batch]) -> None:
        """Rank 0: encode ahead, and run each backward pass once its gradient has come."""
        waiting: deque[tuple[int, _ImagePart]] = deque()
        for number, batch in enumerate(batches):
            with self._span(number, IMAGE, FORWARD), self.precision.autocast():
                sent = self._lower_layers(*self._here(batch.pixel_values, batch.pixel_mask))
            self._features.send(sent)
            waiting.append((number, sent))
            if len(waiting) > self.ahead:
                self._image_backward(*waiting.popleft())
        while waiting:
            self._image_backward(*waiting.popleft())

    def _lower_layers(self, pixel_values: Tensor, pixel_mask: Tensor) -> _ImagePart:
        if self._image_layers is not None:
            features, mask = self.model.begin_image(pixel_values, pixel_mask, num_blocks=self._image_layers)
            return _ImagePart(None, features, mask)
        embedding, features, mask = self.model.encode_image(pixel_values, pixel_mask)
        return _ImagePart(embedding, features if self._sends_features else None, mask)

    def _upper_layers(self, received: _ImagePart) -> Encoded:
        embedding, features, mask = received
        if self._image_layers is not None:
            assert features is not None
            return self.model.finish_image(features, mask, num_blocks=self._image_layers)
        assert embedding is not None
        if features is None:  # no objective reads them
            features = embedding.new_zeros(*mask.shape, 1)
        return Encoded(embedding, features, mask)

    def _image_backward(self, number: int, sent: _ImagePart) -> None:
        if not any(tensor is not None and tensor.requires_grad for tensor in sent[:2]):
            return
        with self._span(number, IMAGE, WAIT):
            feature_grads = self._gradients.receive()
        with self._span(number, IMAGE, BACKWARD):
            _backward_features(sent[:2], feature_grads)

    def _run_texts(self, batches: Sequence[Batch], terms: LossTerms, seed: Callable[[int], None]) -> None:
        """Rank 1: encode texts, join them with the images, and send feature gradients before the texts' backward pass."""
        for number, batch in enumerate(batches):
            with self._span(number, TEXT, FORWARD), self.precision.autocast():
                text = self.model.encode_text(*self._here(batch.input_ids, batch.attention_mask))
            with self._span(number, TEXT, WAIT):
                image = _ImagePart(*self._features.receive())  # type: ignore[arg-type]
            # cut from its graph, so that the backward pass of the losses stops here
            leaves = Encoded(
                *(tensor.detach().requires_grad_(tensor.requires_grad) for tensor in text[:2]), text.mask
            )  # type: ignore[call-arg]
            with self._span(number, FUSION, FORWARD):
                with self.precision.autocast():
                    output = self.model.join(self._upper_layers(image), leaves)
                seed(number + 1)
                here = batch.to(self.device)
                with self.precision.autocast():
                    loss = terms.add({name: goal(output, here) for name, goal in self.objectives.items()})
                del output
            with self._span(number, FUSION, BACKWARD):
                self.precision.backward(loss)
            if any(tensor is not None and tensor.requires_grad for tensor in image[:2]):
                self._gradients.send([None if tensor is None else tensor.grad for tensor in image[:2]])
            with self._span(number, TEXT, BACKWARD):
                _backward_features(text[:2], [leaves.embedding.grad, leaves.features.grad])

    def _here(self, *tensors: Tensor) -> list[Tensor]:
        return [tensor.to(self.device, non_blocking=True) for tensor in tensors]

    def _span(self, number: int, branch: str, phase: str) -> AbstractContextManager[None]:
        timeline = self.timeline
        return nullcontext() if timeline is None else timeline.span(self._number + number, branch, phase)


def _backward_features(tensors: Sequence[Tensor | None], feature_grads: Sequence[Tensor | None]) -> None:
    """Run the backward pass of a branch from the gradients of its outputs."""
    pairs = [
        (tensor, gradient)
        for tensor, gradient in zip(tensors, feature_grads, strict=True)
        if gradient is not None and tensor is not None and tensor.requires_grad
    ]
    if pairs:
        torch.autograd.backward([tensor for tensor, _ in pairs], [gradient for _, gradient in pairs])
