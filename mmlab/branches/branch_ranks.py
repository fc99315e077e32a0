"""`BranchRanks`: two processes, the image branch on rank 0, the text branch, the fusion and the losses on rank 1.

    rank 0   image 0 | image 1 |        back 0 | image 2 | back 1 | ...
    rank 1   text 0  | fusion 0, back | text back 0 | text 1 | fusion 1, back | ...

Features go forward and their gradients back (`mmlab.branches.wire`: gloo between CPUs, NCCL between GPUs). Rank 0 is
a few micro-batches ahead, and a micro-batch's image gradient leaves before the text branch is taught, so that both
ranks compute. Both see the same batches. Loss and gradients are those of one process, bit by bit in fp32 and under bf16
autocast, with the exception named in `mmlab.branches.branch_parallel`; with dropout in the image branch they repeat
themselves but differ from one process's.

A rank's gradients are those of its own branch, so an optimizer over all weights moves and remembers these alone.
`share_weights` and `share_moments` make both ranks whole, to evaluate or to save.

Costs, for each micro-batch: its image features and their gradient over the wire (embeddings alone where nothing but a
contrastive loss asks), and the activations of `1 + ahead` micro-batches on rank 0. Does not do a step again in parts
where memory ran out, nor fp16, whose scaler would have to agree.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import islice

import torch
from torch import Tensor, distributed, nn

from mmlab.branches.timeline import BACKWARD, FORWARD, FUSION, IMAGE, TEXT, WAIT, Timeline
from mmlab.branches.wire import PeerFailed, Wire
from mmlab.errors import OptionError, RunError
from mmlab.losses import Contrastive, LossTerms, Objective, parse_objectives
from mmlab.model import Encoded, FusionModel
from mmlab.parallel import Ranks
from mmlab.precision import Precision
from mmlab.types import Batch

IMAGE_RANK, TEXT_RANK = 0, 1
_OF_IMAGES = ("image_encoder.", "image_head.", "fusion.mix_images.", "pixel_")


class BranchRanks:
    """One rank of two; both make it with the same arguments, after `torch.distributed.init_process_group`.

    `FusionTrainer(..., parallel="branch")` trains with it.

    Args:
        model: the same on both ranks; the branch of this rank is trained.
        objectives: names in `mmlab.losses.OBJECTIVES`, or objects by name.
        precision: "fp32" or "bf16" ("tf32" on CUDA).
        device: of this rank.
        ahead: micro-batches that rank 0 may be ahead.
        ranks: counts what this one waits.

    Attributes:
        timeline: takes the spans of this rank, where it is set.

    Raises:
        OptionError: not two ranks, fp16, a model without branches, or negatives from all ranks.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        objectives: Sequence[str] | Mapping[str, Objective] = ("contrastive",),
        precision: str | Precision = "fp32",
        device: torch.device | str = "cpu",
        ahead: int = 1,
        ranks: Ranks | None = None,
    ) -> None:
        self.ranks, self.device = ranks or Ranks(), torch.device(device)
        if self.ranks.world_size != 2:
            raise OptionError(
                f"branches take two ranks, one for the images and one for the texts, found {self.ranks.world_size}; "
                "start with torchrun --nproc-per-node 2, or use BranchParallel in one process"
            )
        if not isinstance(model, FusionModel):
            raise OptionError(
                f"{type(model).__name__} has no branches; branch parallelism needs a FusionModel"
            )
        self.model, self.precision = model.to(self.device), Precision.parse(precision, self.device)
        self.objectives = parse_objectives(model, objectives)
        if self.precision.scales:
            raise OptionError("fp16 scales the loss, and the two ranks' scalers would part; use bf16 or fp32")
        if any(getattr(goal, "all_ranks", False) for goal in self.objectives.values()):
            raise OptionError(
                "both ranks see the same batches, so negatives come from all of them; use contrastive"
            )
        if ahead < 0:
            raise OptionError(f"ahead must be at least 0, found {ahead}")
        self.ahead = ahead
        self.timeline: Timeline | None = None
        self.is_image_rank = self.ranks.rank == IMAGE_RANK
        peer = TEXT_RANK if self.is_image_rank else IMAGE_RANK
        self._features, self._gradients = (Wire(peer, self.device, self.ranks) for _ in range(2))
        self._wants_features = any(type(goal) is not Contrastive for goal in self.objectives.values())
        self._number = 0  # micro-batches so far
        self._failed = False

    def owns(self, name: str) -> bool:
        """Whether this rank trains the weight of that name."""
        return name.startswith(_OF_IMAGES) == self.is_image_rank

    @property
    def num_bytes_sent(self) -> int:
        """By this rank so far."""
        return self._features.num_bytes + self._gradients.num_bytes

    def gradient(
        self,
        batches: Sequence[Batch],
        counts: Mapping[str, float],
        weights: Mapping[str, float] | None = None,
        *,
        seed: Callable[[int], None],
        doing: str = "the window",
    ) -> dict[str, float]:
        """Leave the window's gradient, as far as it is this rank's, in the weights; a collective.

        Args:
            batches: micro-batches with something to learn, on any device; the same on both ranks.
            counts: by objective, over all of them.
            weights: by objective, the factor of its mean.
            seed: as in `mmlab.window.Window`, alike on both ranks.
            doing: what the ranks are at, for an error.

        Returns:
            Mean losses, on both ranks.

        Raises:
            RunError: the other rank failed, now or in an earlier window, or has other batches; this rank's own error is
                raised as it is.
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
            if self.is_image_rank:
                self._images(batches)
            else:
                self._texts(batches, terms, seed)
        except PeerFailed:
            pass  # it is named below
        except Exception as error:
            problem = error
            (self._features if self.is_image_rank else self._gradients).give_up()
        self._failed = True
        self.ranks.agree(problem, self.device, doing)
        self._failed = False
        self._number += len(batches)
        for wire in (self._features, self._gradients):
            wire.wait()
        shares = terms.means()  # none on rank 0
        means = self.ranks.sums([shares.get(name, 0.0) for name in counts], self.device)
        return {name: mean for name, mean in zip(counts, means, strict=True) if counts[name]}

    def part_norms(self, parts: Mapping[str, Sequence[nn.Parameter]]) -> dict[str, float]:
        """As `mmlab.precision.part_norms`, of both ranks' gradients: bitwise those of one process; a collective."""
        weights = [weight for of_part in parts.values() for weight in of_part]
        has_gradient = [weight.grad is not None for weight in weights]
        gradients = [weight.grad for weight in weights if weight.grad is not None]
        norms = iter(torch.stack(torch._foreach_norm(gradients)).tolist() if gradients else [])
        told = self.ranks.sums(
            [*has_gradient, *(next(norms) if there else 0.0 for there in has_gradient)], self.device
        )
        both = zip(told[: len(weights)], told[len(weights) :], strict=True)
        found = {}
        for part, of_part in parts.items():
            there = [norm for held, norm in islice(both, len(of_part)) if held]
            if there:
                found[part] = float(torch.linalg.vector_norm(torch.tensor(there)))
        return found

    def share_weights(self) -> None:
        """Give each rank the other's weights and statistics, so that both hold the whole model; a collective."""
        for name, tensor in self.model.state_dict(keep_vars=True).items():
            self._share(tensor.data, self.owns(name))

    def share_moments(self, optimizer: torch.optim.Optimizer) -> None:
        """Give each rank the other's state of AdamW; a collective. `forget_moments` undoes it."""
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
                self._share(state[weight][key], own)

    def forget_moments(self, optimizer: torch.optim.Optimizer) -> None:
        """Drop the other rank's state of the optimizer."""
        for name, weight in self.model.named_parameters():
            if not self.owns(name):
                optimizer.state.pop(weight, None)

    def _require_same(self, batches: Sequence[Batch], doing: str) -> None:
        digest = zlib.crc32(repr([(batch.shape, batch.record_ids) for batch in batches]).encode())
        most, least = self.ranks.largest_of([digest, -digest], self.device)
        if most != -least:
            raise RunError(
                f"{doing}: the ranks have different batches; with a branch on each both must read the same samples in "
                "the same order: give both the whole plan, no share of it, and no sampler that deals samples out"
            )

    def _share(self, tensor: Tensor, own: bool) -> None:
        source = self.ranks.rank if own else 1 - self.ranks.rank
        message = tensor.detach().to(self.device).contiguous()
        distributed.broadcast(message, source)
        if not own:
            tensor.copy_(message)

    def _images(self, batches: Sequence[Batch]) -> None:
        """Rank 0: encode ahead, and be taught as gradients come back."""
        waiting: deque[tuple[int, Encoded]] = deque()
        for number, batch in enumerate(batches):
            with self._span(number, IMAGE, FORWARD), self.precision.autocast():
                encoded = self.model.encode_image(*self._here(batch.pixel_values, batch.pixel_mask))
            if not self._wants_features:  # nothing will come back for them
                encoded = encoded._replace(features=encoded.features.detach())
            embedding, features, mask = encoded
            self._features.send([embedding, features if self._wants_features else None, mask])
            waiting.append((number, encoded))
            if len(waiting) > self.ahead:
                self._taught(*waiting.popleft())
        while waiting:
            self._taught(*waiting.popleft())

    def _taught(self, number: int, encoded: Encoded) -> None:
        if not any(tensor.requires_grad for tensor in encoded[:2]):
            return
        with self._span(number, IMAGE, WAIT):
            gradients = self._gradients.receive()
        with self._span(number, IMAGE, BACKWARD):
            _teach(encoded, gradients)

    def _texts(self, batches: Sequence[Batch], terms: LossTerms, seed: Callable[[int], None]) -> None:
        """Rank 1: encode the texts, meet the images, and send their gradients before the texts are taught."""
        for number, batch in enumerate(batches):
            with self._span(number, TEXT, FORWARD), self.precision.autocast():
                text = self.model.encode_text(*self._here(batch.input_ids, batch.attention_mask))
            with self._span(number, TEXT, WAIT):
                embedding, features, mask = self._features.receive()
            assert embedding is not None
            assert mask is not None
            if features is None:  # nobody will read them
                features = embedding.new_zeros(*mask.shape, 1)
            image, leaves = Encoded(embedding, features, mask), _leaves(text)
            with self._span(number, FUSION, FORWARD):
                with self.precision.autocast():
                    output = self.model.join(image, leaves)
                seed(number + 1)
                here = batch.to(self.device)
                with self.precision.autocast():
                    loss = terms.add({name: goal(output, here) for name, goal in self.objectives.items()})
                del output
            with self._span(number, FUSION, BACKWARD):
                self.precision.backward(loss)
            if any(tensor.requires_grad for tensor in image[:2]):
                self._gradients.send([embedding.grad, features.grad])
            with self._span(number, TEXT, BACKWARD):
                _teach(text, [leaves.embedding.grad, leaves.features.grad])

    def _here(self, *tensors: Tensor) -> list[Tensor]:
        return [tensor.to(self.device, non_blocking=True) for tensor in tensors]

    def _span(self, number: int, branch: str, phase: str) -> AbstractContextManager[None]:
        timeline = self.timeline
        return nullcontext() if timeline is None else timeline.span(self._number + number, branch, phase)


def _leaves(encoded: Encoded) -> Encoded:
    """The same values, cut from their graph."""
    embedding, features = (tensor.detach().requires_grad_(tensor.requires_grad) for tensor in encoded[:2])
    return Encoded(embedding, features, encoded.mask)


def _teach(encoded: Encoded, gradients: Sequence[Tensor | None]) -> None:
    """Gradients of embedding and features into the branch that made them."""
    taught = [
        (tensor, gradient)
        for tensor, gradient in zip(encoded[:2], gradients, strict=True)
        if gradient is not None and tensor.requires_grad
    ]
    if taught:
        torch.autograd.backward([tensor for tensor, _ in taught], [gradient for _, gradient in taught])
