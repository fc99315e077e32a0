"""`BranchRanks`: the image branch on all ranks but the last, which has the text branch, the fusion and the losses.

Of two ranks:

    rank 0   image 0 | image 1 |        back 0 | image 2 | back 1 | ...
    rank 1   text 0  | fusion 0, back | text back 0 | text 1 | fusion 1, back | ...

Features go forward and their gradients back (`mmlab.parallel.branches.wire`: gloo between CPUs; NCCL between GPUs, not yet
tried). Image ranks are a few micro-batches ahead, and a micro-batch's image gradient leaves before the text branch is
taught, so that all ranks compute. All see the same batches. On two ranks loss and gradients are those of one process,
bit by bit in fp32 and under bf16 autocast, with the exception named in `mmlab.parallel.branches.branch_parallel`; with dropout
in the image branch they repeat themselves but differ from one process's.

Images usually take longer than texts. The last rank can have the upper layers of a vision transformer too: what
crosses is then what the lower ones give, and all stays bit by bit. And several ranks may share the images: each encodes
its rows of every micro-batch, and their gradients are added at the window's end; that is exact but for rounding.

A rank's gradients are those of its own branch, so an optimizer over all weights moves and remembers these alone.
`share_weights` and `share_moments` make all ranks whole, to evaluate or to save.

Costs, for each micro-batch: its image features and their gradient over the wire (embeddings alone where nothing but a
contrastive loss asks), and the activations of `1 + ahead` micro-batches on an image rank; where several share the
images, also the image branch's gradient, once a window. Does not do a step again in parts where memory ran out, nor
fp16, whose scaler would have to agree, nor batch normalisation over images that ranks share.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import islice, pairwise
from typing import NamedTuple

import torch
from torch import Tensor, distributed, nn

from mmlab.errors import OptionError, RunError
from mmlab.model.fusion_model import IMAGE_MODULES, Encoded, FusionModel
from mmlab.parallel.branches.timeline import BACKWARD, FORWARD, FUSION, IMAGE, TEXT, WAIT, Timeline
from mmlab.parallel.branches.wire import PeerFailed, Wire
from mmlab.parallel.process_group import ProcessGroup
from mmlab.training.losses.base import LossTerms, Objective
from mmlab.training.losses.contrastive import Contrastive
from mmlab.training.losses.names import parse_objectives
from mmlab.training.precision import Precision
from mmlab.types import Batch

_OF_IMAGES = (*(f"{name}." for name in IMAGE_MODULES), "pixel_")
_BLOCKS, _AFTER_BLOCKS = "image_encoder.blocks.", ("image_encoder.norm.", "image_head.")


class _Sent(NamedTuple):
    """What crosses from an image rank to the last one, of a micro-batch's rows."""

    embedding: Tensor | None  # (B, D); None where the image branch goes on there
    features: Tensor | None  # (B, P, C); None where nobody reads them
    mask: Tensor  # (B, P)

    @property
    def learns(self) -> bool:
        """Whether gradients will come back."""
        return any(tensor is not None and tensor.requires_grad for tensor in self[:2])


class BranchRanks:
    """One rank of two or more; all make it with the same arguments, after `torch.distributed.init_process_group`.

    `FusionTrainer(..., parallel="branch")` trains with it.

    Args:
        model: the same on all ranks; the branch of this rank is trained.
        objectives: names in `mmlab.training.losses.OBJECTIVES`, or objects by name.
        precision: "fp32" or "bf16" ("tf32" on CUDA).
        device: of this rank.
        ahead: micro-batches that an image rank may be ahead.
        image_layers: first blocks of the image encoder that image ranks compute, the last rank the rest; None: all.
        ranks: counts what this one waits.

    Attributes:
        timeline: takes the spans of this rank, where it is set.

    Raises:
        OptionError: a single rank, fp16, a model without branches, negatives from all ranks, an encoder that cannot be
            cut, or batch normalisation over images that several ranks share.
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
        if self.ranks.world_size < 2:
            raise OptionError(
                "branches take two ranks or more, the last for the texts and the others for the images, found "
                f"{self.ranks.world_size}; start with torchrun --nproc-per-node 2, or use BranchParallel in one process"
            )
        if not isinstance(model, FusionModel):
            raise OptionError(
                f"{type(model).__name__} has no branches; branch parallelism needs a FusionModel"
            )
        self.model, self.precision = model.to(self.device), Precision.parse(precision, self.device)
        self.objectives = parse_objectives(model, objectives)
        if self.precision.scales:
            raise OptionError("fp16 scales the loss, and the ranks' scalers would part; use bf16 or fp32")
        if any(getattr(goal, "all_ranks", False) for goal in self.objectives.values()):
            raise OptionError(
                "all ranks see the same batches, so negatives come from all of them; use contrastive"
            )
        if ahead < 0:
            raise OptionError(f"ahead must be at least 0, found {ahead}")
        if image_layers is not None:
            model.require_cut(image_layers)
        self.ahead, self._image_layers = ahead, image_layers
        self.timeline: Timeline | None = None
        self._text_rank = self.num_image_ranks = self.ranks.world_size - 1  # all before the last have images
        self.is_image_rank = self.ranks.rank < self._text_rank
        if self.num_image_ranks > 1:
            model.require_rows()
        self._image_ranks = self._among_image_ranks()
        self._features, self._gradients = self._make_wires(), self._make_wires()
        self._wants_features = any(type(goal) is not Contrastive for goal in self.objectives.values())
        self._number = 0  # micro-batches so far
        self._failed = False

    def owns(self, name: str) -> bool:
        """Whether this rank trains the weight of that name."""
        return self._is_of_image_ranks(name) == self.is_image_rank

    def _is_of_image_ranks(self, name: str) -> bool:
        if self._image_layers is None:
            return name.startswith(_OF_IMAGES)
        if name.startswith(_BLOCKS):
            return int(name.removeprefix(_BLOCKS).partition(".")[0]) < self._image_layers
        return name.startswith(_OF_IMAGES) and not name.startswith(_AFTER_BLOCKS)

    @property
    def draw(self) -> int:
        """Tells image ranks apart where they draw random numbers: each has other samples."""
        return self.ranks.rank if self.is_image_rank else 0

    @property
    def num_bytes_sent(self) -> int:
        """By this rank so far, but for the image branch's gradient."""
        return sum(wire.num_bytes for wire in self._wires)

    @property
    def _wires(self) -> list[Wire]:
        return [*self._features, *self._gradients]

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
            batches: micro-batches with something to learn, on any device; the same on all ranks.
            counts: by objective, over all of them.
            weights: by objective, the factor of its mean.
            seed: as in `mmlab.training.window.Window`, alike on all ranks but for `draw`.
            doing: what the ranks are at, for an error.

        Returns:
            Mean losses, on all ranks.

        Raises:
            RunError: another rank failed, now or in an earlier window, or has other batches; this rank's own error is
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
        except PeerFailed:  # it is named below
            self._give_up()
        except Exception as error:
            problem = error
            self._give_up()
        self._failed = True
        self.ranks.raise_if_any_failed(problem, self.device, doing)
        self._failed = False
        self._number += len(batches)
        for wire in self._wires:
            wire.wait()
        if self._image_ranks is not None:
            self._image_ranks.add_gradients(self._own_weights(), self.device)
        shares = terms.means()  # none where images are
        means = self.ranks.sums([shares.get(name, 0.0) for name in counts], self.device)
        return {name: mean for name, mean in zip(counts, means, strict=True) if counts[name]}

    def part_norms(self, parts: Mapping[str, Sequence[nn.Parameter]]) -> dict[str, float]:
        """As `mmlab.training.precision.part_norms`, of all branches' gradients: bitwise those of one process; a collective."""
        weights = [weight for of_part in parts.values() for weight in of_part]
        tells = self.ranks.rank in (0, self._text_rank)  # of image ranks, which have the same, one
        has_gradient = [tells and weight.grad is not None for weight in weights]
        gradients = [weight.grad for weight in weights if tells and weight.grad is not None]
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
        """Give each rank the weights and statistics that it does not train: all hold the whole model; a collective."""
        for name, tensor in self.model.state_dict(keep_vars=True).items():
            self._share(tensor.data, name)

    def share_moments(self, optimizer: torch.optim.Optimizer) -> None:
        """Give each rank the state of AdamW of what it does not train; a collective. `forget_moments` undoes it."""
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
        """Drop the optimizer's state of what this rank does not train."""
        for name, weight in self.model.named_parameters():
            if not self.owns(name):
                optimizer.state.pop(weight, None)

    def _require_same(self, batches: Sequence[Batch], doing: str) -> None:
        digest = zlib.crc32(repr([(batch.shape, batch.record_ids) for batch in batches]).encode())
        most, least = self.ranks.largest_of([digest, -digest], self.device)
        if most != -least:
            raise RunError(
                f"{doing}: the ranks have different batches; with a branch on each all must read the same samples in "
                "the same order: give all the whole plan, no share of it, and no sampler that deals samples out"
            )

    def _make_wires(self) -> list[Wire]:
        """One direction: from or to each rank that this one meets, by a group of the two, which all ranks make."""
        groups = [distributed.new_group([rank, self._text_rank]) for rank in range(self.num_image_ranks)]
        if self.is_image_rank:
            return [Wire(self._text_rank, groups[self.ranks.rank], self.device, self.ranks)]
        return [Wire(rank, group, self.device, self.ranks) for rank, group in enumerate(groups)]

    def _among_image_ranks(self) -> ProcessGroup | None:
        """Those that share the images, where there are several; all ranks make the group."""
        if self.num_image_ranks == 1:
            return None
        group = distributed.new_group(range(self.num_image_ranks))
        return ProcessGroup(group=group) if self.is_image_rank else None

    def _own_weights(self) -> list[nn.Parameter]:
        named = self.model.named_parameters()
        return [weight for name, weight in named if weight.requires_grad and self.owns(name)]

    def _share(self, tensor: Tensor, name: str) -> None:
        """Give what the rank has that trains it to those that do not."""
        message = tensor.detach().to(self.device).contiguous()
        distributed.broadcast(message, 0 if self._is_of_image_ranks(name) else self._text_rank)
        if not self.owns(name):
            tensor.copy_(message)

    def _give_up(self) -> None:
        """Tell those who wait for this rank that nothing more comes."""
        for wire in self._features if self.is_image_rank else self._gradients:
            wire.give_up()

    def _images(self, batches: Sequence[Batch]) -> None:
        """Where images are: encode ahead, and be taught as gradients come back."""
        waiting: deque[tuple[int, _Sent]] = deque()
        for number, batch in enumerate(batches):
            rows = self._shares(len(batch)).get(self.ranks.rank)
            if rows is None:
                continue
            with self._span(number, IMAGE, FORWARD), self.precision.autocast():
                sent = self._encoded(*self._here(batch.pixel_values[rows], batch.pixel_mask[rows]))
            self._features[0].send(sent)
            waiting.append((number, sent))
            if len(waiting) > self.ahead:
                self._taught(*waiting.popleft())
        while waiting:
            self._taught(*waiting.popleft())

    def _encoded(self, pixel_values: Tensor, pixel_mask: Tensor) -> _Sent:
        """The part of the image branch that image ranks have."""
        if self._image_layers is not None:
            features, mask = self.model.begin_image(pixel_values, pixel_mask, num_blocks=self._image_layers)
            return _Sent(None, features, mask)
        embedding, features, mask = self.model.encode_image(pixel_values, pixel_mask)
        return _Sent(embedding, features if self._wants_features else None, mask)

    def _finished(self, sent: _Sent) -> Encoded:
        """The rest of it."""
        embedding, features, mask = sent
        if self._image_layers is not None:
            assert features is not None
            return self.model.finish_image(features, mask, num_blocks=self._image_layers)
        assert embedding is not None
        if features is None:  # nobody will read them
            features = embedding.new_zeros(*mask.shape, 1)
        return Encoded(embedding, features, mask)

    def _taught(self, number: int, sent: _Sent) -> None:
        if not sent.learns:
            return
        with self._span(number, IMAGE, WAIT):
            gradients = self._gradients[0].receive()
        with self._span(number, IMAGE, BACKWARD):
            _teach(sent, gradients)

    def _texts(self, batches: Sequence[Batch], terms: LossTerms, seed: Callable[[int], None]) -> None:
        """Where texts are: encode them, meet the images, and send their gradients before the texts are taught."""
        for number, batch in enumerate(batches):
            with self._span(number, TEXT, FORWARD), self.precision.autocast():
                text = self.model.encode_text(*self._here(batch.input_ids, batch.attention_mask))
            with self._span(number, TEXT, WAIT):
                images = {
                    rank: _Sent(*self._features[rank].receive())  # type: ignore[arg-type]
                    for rank in self._shares(len(batch))
                }
            leaves = _leaves(text)
            with self._span(number, FUSION, FORWARD):
                with self.precision.autocast():
                    output = self.model.join(self._finished(_together([*images.values()])), leaves)
                seed(number + 1)
                here = batch.to(self.device)
                with self.precision.autocast():
                    loss = terms.add({name: goal(output, here) for name, goal in self.objectives.items()})
                del output
            with self._span(number, FUSION, BACKWARD):
                self.precision.backward(loss)
            for rank, image in images.items():
                if image.learns:
                    self._gradients[rank].send(
                        [None if tensor is None else tensor.grad for tensor in image[:2]]
                    )
            with self._span(number, TEXT, BACKWARD):
                _teach(text, [leaves.embedding.grad, leaves.features.grad])

    def _shares(self, num_samples: int) -> dict[int, slice]:
        """Rows of a micro-batch by image rank, as even as can be; of fewer samples than ranks some have none."""
        ends = [num_samples * rank // self.num_image_ranks for rank in range(self.num_image_ranks + 1)]
        return {rank: slice(*rows) for rank, rows in enumerate(pairwise(ends)) if rows[0] < rows[1]}

    def _here(self, *tensors: Tensor) -> list[Tensor]:
        return [tensor.to(self.device, non_blocking=True) for tensor in tensors]

    def _span(self, number: int, branch: str, phase: str) -> AbstractContextManager[None]:
        timeline = self.timeline
        return nullcontext() if timeline is None else timeline.span(self._number + number, branch, phase)


def _together(shares: Sequence[_Sent]) -> _Sent:
    """The rows of several ranks in one; gradients go to each."""
    if len(shares) == 1:
        return shares[0]
    embedding, features, mask = (
        None if rows[0] is None else torch.cat(rows) for rows in zip(*shares, strict=True)
    )
    assert mask is not None
    return _Sent(embedding, features, mask)


def _leaves(encoded: Encoded) -> Encoded:
    """The same values, cut from their graph."""
    embedding, features = (tensor.detach().requires_grad_(tensor.requires_grad) for tensor in encoded[:2])
    return Encoded(embedding, features, encoded.mask)


def _teach(tensors: Sequence[Tensor | None], gradients: Sequence[Tensor | None]) -> None:
    """Gradients of embedding and features into the branch that made them."""
    taught = [
        (tensor, gradient)
        for tensor, gradient in zip(tensors[:2], gradients, strict=True)
        if gradient is not None and tensor is not None and tensor.requires_grad
    ]
    if taught:
        torch.autograd.backward([tensor for tensor, _ in taught], [gradient for _, gradient in taught])
