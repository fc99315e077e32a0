"""`BranchStrategy`: the image branch on rank 0; the text branch, the fusion and the losses on rank 1.

    rank 0   image 0 | image 1 |        back 0 | image 2 | back 1 | ...
    rank 1   text 0  | fusion 0, back | text back 0 | text 1 | fusion 1, back | ...

Features are sent forward and their gradients back (`mmlab.parallel.wire`; gloo between CPUs, NCCL between
GPUs is not tried yet). The image rank runs a few micro-batches ahead, and the gradient of a micro-batch's
features is sent before the text branch's backward pass, so that both ranks compute at the same time. Both
read the same batches. Images usually take longer than texts, so rank 1 can compute the upper layers of a
vision transformer too: what is sent is then the output of the lower layers.

Loss and gradients are bitwise those of one process with as many threads, in fp32 and under bf16 autocast,
wherever the cut is. Two exceptions: dropout in the image branch draws other masks (reproducible ones), and
masked language modelling, which uses the text encoder twice, adds the same terms in another order over
several micro-batches.

A rank has only the gradients of its own weights, so an optimizer over all weights updates only these. Before
an evaluation the ranks exchange weights; before a checkpoint, the optimizer's state as well.

Costs, per micro-batch: sending its image features and their gradient (only embeddings if all objectives are
contrastive). Rank 0 holds the activations of `1 + ahead` micro-batches. Does not split a step that ran out of
memory, nor support fp16, whose loss scales would differ between the ranks.
"""

from __future__ import annotations

import math
import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any, ClassVar

from torch import Tensor, distributed, nn
from torch.optim import Optimizer

from mmlab.errors import OptionError, RunError
from mmlab.model.fusion_model import IMAGE_MODULES, Encoded, FusionModel
from mmlab.parallel.reduce import RanksStrategy
from mmlab.parallel.wire import PeerFailed, Wire
from mmlab.training.losses.base import LossTerms
from mmlab.training.losses.contrastive import Contrastive
from mmlab.training.precision import Parts, fresh_state
from mmlab.training.setup import TrainerSetup
from mmlab.training.split import Window, backward_features
from mmlab.types import Batch

_OF_IMAGES = tuple(f"{name}." for name in IMAGE_MODULES)
# What rank 0 sends to rank 1 for a micro-batch: embedding (B, D), None if rank 1 computes the upper layers; features
# (B, P, C), None if no objective reads them; mask (B, P).
_ImagePart = tuple[Tensor | None, Tensor | None, Tensor]
_BLOCKS, _AFTER_BLOCKS = "image_encoder.blocks.", ("image_encoder.norm.", "image_head.")


class BranchStrategy(RanksStrategy):
    """The strategy `branch`; every rank makes it with the same options."""

    refused: ClassVar[Mapping[str, str]] = {
        "scales": "fp16 scales the loss, and the scales of two ranks would differ; use bf16 or fp32",
        "splits": "with a branch on each rank one alone cannot run a micro-batch again in parts; use "
        "on_out_of_memory='auto', and plan smaller batches",
        "compiles": "with a branch on each rank no rank calls the whole model; use compile=False",
    }

    def check(self, **asked: bool) -> None:
        if self.world_size != 2:
            raise OptionError(
                "branch takes two ranks, one for the images and one for the texts, found "
                f"{self.world_size}; start with torchrun --nproc-per-node 2"
            )
        super().check(**asked)

    def prepare(self, model: nn.Module, trainer: TrainerSetup) -> nn.Module:
        """Put the model on the trainer's device.

        Raises:
            OptionError: a model without branches, negatives from all ranks, or an encoder that cannot be cut.
        """
        if not isinstance(model, FusionModel):
            raise OptionError(f"{type(model).__name__} has no two branches; branch needs a FusionModel")
        if getattr(model.forward, "__func__", None) is not FusionModel.forward:
            raise OptionError(f"{type(model).__name__} has its own forward, which no rank calls: change join")
        if any(getattr(goal, "all_ranks", False) for goal in trainer.objectives.values()):
            raise OptionError("both ranks read the same batches, so contrastive already has all negatives")
        self._image_layers = self.options.image_layers
        if self._image_layers is not None and (why := model.why_not_cut(self._image_layers)):
            raise OptionError(why)
        self.device, self.objectives, self.precision = trainer.device, trainer.objectives, trainer.precision
        self.model = model.to(self.device)
        self.has_images = self.rank == 0
        self._features = Wire(1 - self.rank, distributed.new_group([0, 1]), self)
        self._gradients = Wire(1 - self.rank, distributed.new_group([0, 1]), self)
        self._sends_features = any(type(goal) is not Contrastive for goal in self.objectives.values())
        self._failed = False
        return model

    def owns(self, name: str) -> bool:
        """Whether this rank trains the weight of that name."""
        return self._owner(name) == self.rank

    def _owner(self, name: str) -> int:
        """The rank that trains a weight."""
        if self._image_layers is not None and name.startswith(_BLOCKS):
            return int(int(name.removeprefix(_BLOCKS).partition(".")[0]) >= self._image_layers)
        after_cut = self._image_layers is not None and name.startswith(_AFTER_BLOCKS)
        return int(after_cut or not name.startswith(_OF_IMAGES))

    def gradient(self, window: Window) -> dict[str, float]:
        """Leave this rank's part of the window's gradient in its weights, and return mean losses on both ranks.

        Raises:
            RunError: the other rank failed, now or in an earlier window, or has other batches; an error of this rank
                is raised as it is.
        """
        if self._failed:
            raise RunError("a rank failed earlier, and what was sent is lost; resume from a checkpoint")
        batches, doing = window.learnable, f"step {window.step}"
        self._require_same(batches, doing)
        terms = LossTerms(window.counts, window.weights)
        problem: Exception | None = None
        window.trainer.seed(0)
        try:
            if self.has_images:
                self._run_images(batches)
            else:
                self._run_texts(batches, terms, window.trainer.seed)
        except Exception as error:
            (self._features if self.has_images else self._gradients).give_up()
            if not isinstance(error, PeerFailed):  # the exchange below names the peer that failed
                problem = error
        self._failed = True
        self.raise_if_any_failed(problem, doing)
        self._failed = False
        for wire in (self._features, self._gradients):
            wire.wait()
        means = terms.means()  # empty on rank 0
        sums = self.total([means.get(name, 0.0) for name in window.counts])
        return {name: mean for name, mean in zip(window.counts, sums, strict=True) if window.counts[name]}

    def part_norms(self, parts: Parts) -> dict[str, float]:
        """L2 norms of the parts' gradients over both ranks, bitwise those of one process."""
        weights = [weight for of_part in parts.values() for weight in of_part]
        gradients = [weight.grad for weight in weights]
        there = [gradient is not None for gradient in gradients]
        own = [0.0 if gradient is None else float(gradient.norm()) for gradient in gradients]
        sums = self.total([*there, *own])
        both = zip(sums[: len(weights)], sums[len(weights) :], strict=True)
        norms = {
            part: [norm for is_there, norm in islice(both, len(of_part)) if is_there]
            for part, of_part in parts.items()
        }
        return {part: math.hypot(*of_part) for part, of_part in norms.items() if of_part}

    def state_dict(self, model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
        self.gather_weights()
        self._share_moments(optimizer)
        state = super().state_dict(model, optimizer)
        self._forget_moments(optimizer)
        return state

    def load_state_dict(self, model: nn.Module, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        super().load_state_dict(model, optimizer, state)
        self._forget_moments(optimizer)

    def gather_weights(self) -> None:
        """Give each rank the weights and running statistics that the other one trains."""
        for name, tensor in self.model.state_dict(keep_vars=True).items():
            self.broadcast(tensor, self._owner(name))

    def _share_moments(self, optimizer: Optimizer) -> None:
        """Give each rank AdamW's state of the other one's weights; `_forget_moments` undoes it."""
        for name, weight in self.model.named_parameters():
            own, state = self.owns(name), optimizer.state
            if not self.largest(float(own and weight in state)):
                continue
            if not own:
                state[weight] = fresh_state(weight)
            for key in ("step", "exp_avg", "exp_avg_sq"):  # in one order on both ranks
                self.broadcast(state[weight][key], self._owner(name))

    def _forget_moments(self, optimizer: Optimizer) -> None:
        """Drop the optimizer's state of the weights that this rank does not train."""
        for name, weight in self.model.named_parameters():
            if not self.owns(name):
                optimizer.state.pop(weight, None)

    def _require_same(self, batches: Sequence[Batch], doing: str) -> None:
        digest = zlib.crc32(repr([(batch.shape, batch.record_ids) for batch in batches]).encode())
        most, least = self.largest_of([digest, -digest])
        if most != -least:
            raise RunError(
                f"{doing}: the ranks have different batches; with branch both must read the same samples in the same "
                "order: give both the whole plan, and no sampler that splits the samples among ranks"
            )

    def _run_images(self, batches: Sequence[Batch]) -> None:
        """Rank 0: encode ahead, and run each backward pass once its gradient has arrived."""
        waiting: deque[_ImagePart] = deque()
        for batch in batches:
            with self.precision.autocast():
                sent = self._lower_layers(*self._here(batch.pixel_values, batch.pixel_mask))
            self._features.send(sent)
            waiting.append(sent)
            if len(waiting) > self.options.ahead:
                self._image_backward(waiting.popleft())
        while waiting:
            self._image_backward(waiting.popleft())

    def _lower_layers(self, pixel_values: Tensor, pixel_mask: Tensor) -> _ImagePart:
        if self._image_layers is not None:
            features, mask = self.model.begin_image(pixel_values, pixel_mask, num_blocks=self._image_layers)
            return None, features, mask
        embedding, features, mask = self.model.encode_image(pixel_values, pixel_mask)
        return embedding, features if self._sends_features else None, mask

    def _upper_layers(self, received: _ImagePart) -> Encoded:
        embedding, features, mask = received
        if self._image_layers is not None:
            assert features is not None
            return self.model.finish_image(features, mask, num_blocks=self._image_layers)
        assert embedding is not None
        if features is None:  # no objective reads them
            features = embedding.new_zeros(*mask.shape, 1)
        return Encoded(embedding, features, mask)

    def _image_backward(self, sent: _ImagePart) -> None:
        if any(tensor is not None and tensor.requires_grad for tensor in sent[:2]):
            backward_features(sent[:2], self._gradients.receive())

    def _run_texts(self, batches: Sequence[Batch], terms: LossTerms, seed: Callable[[int], None]) -> None:
        """Rank 1: encode texts, join them with the images, and send feature gradients before the texts' backward pass."""
        for number, batch in enumerate(batches):
            with self.precision.autocast():
                text = self.model.encode_text(*self._here(batch.input_ids, batch.attention_mask))
            image: Any = self._features.receive()  # an `_ImagePart`
            leaves = cut_from_graph(text)  # the backward pass of the losses stops here
            with self.precision.autocast():
                output = self.model.join(self._upper_layers(image), leaves)
            seed(number + 1)
            here = batch.to(self.device)
            with self.precision.autocast():
                loss = terms.add({name: goal(output, here) for name, goal in self.objectives.items()})
            del output
            self.precision.backward(loss)
            if any(tensor is not None and tensor.requires_grad for tensor in image[:2]):
                self._gradients.send([None if tensor is None else tensor.grad for tensor in image[:2]])
            backward_features(text[:2], [leaf.grad for leaf in leaves[:2]])

    def _here(self, *tensors: Tensor) -> list[Tensor]:
        return [tensor.to(self.device, non_blocking=True) for tensor in tensors]


def cut_from_graph(encoded: Encoded) -> Encoded:
    """The same tensors as leaves of a new graph."""
    embedding, features = (tensor.detach().requires_grad_(tensor.requires_grad) for tensor in encoded[:2])
    return Encoded(embedding, features, encoded.mask)
