"""The same two stages by `torch.distributed.pipelining`, to compare with `BranchStrategy`.

torch's pipeline is a chain: stage 0 is the image branch, stage 1 the text branch, the fusion and the losses. A batch
is cut into equal micro-batches of one padded shape, where `BranchStrategy` takes them as they come; nothing tells stage 0
that its gradient could leave before the text branch is taught. Objectives see one micro-batch each, as in a window.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, distributed, nn

from mmlab.errors import OptionError
from mmlab.model.fusion_model import Encoded, FusionModel
from mmlab.training.losses.base import LossTerms, Objective
from mmlab.training.losses.names import parse_objectives
from mmlab.types import Batch


class PipelinedBranches:
    """Forward and backward of one batch over two ranks; both make it and call it alike.

    Args:
        model: the same on both ranks.
        num_micro_batches: that a batch is cut into.
        schedule: "gpipe" or "1f1b".
    """

    def __init__(
        self,
        model: FusionModel,
        *,
        num_micro_batches: int,
        schedule: str = "1f1b",
        objectives: Sequence[str] | Mapping[str, Objective] = ("contrastive",),
        device: torch.device | str = "cpu",
    ) -> None:
        from torch.distributed import pipelining  # takes a second to load

        self.num_micro_batches, self.is_first = num_micro_batches, distributed.get_rank() == 0
        self.objectives, self.device = parse_objectives(model, objectives), torch.device(device)
        self._last = _TextStage(model, self.objectives)
        stage = pipelining.PipelineStage(
            _ImageStage(model) if self.is_first else self._last, distributed.get_rank(), 2, self.device
        )
        make = pipelining.ScheduleGPipe if schedule == "gpipe" else pipelining.Schedule1F1B
        self._schedule = make(stage, num_micro_batches, loss_fn=_given, scale_grads=False)

    def step(self, batch: Batch) -> float | None:
        """Add the batch's gradient to this rank's weights; the loss, on rank 1.

        Raises:
            OptionError: the batch cannot be cut evenly.
        """
        number = self.num_micro_batches
        if len(batch) % number:
            raise OptionError(f"{len(batch)} samples cannot be cut into {number} equal micro-batches")
        batch, size = batch.to(self.device), len(batch) // number
        if self.is_first:
            self._schedule.step(batch.pixel_values, batch.pixel_mask)
            return None
        parts = [batch.part(slice(start, start + size)) for start in range(0, len(batch), size)]
        self._last.terms = LossTerms(
            {name: sum(goal.count(part) for part in parts) for name, goal in self.objectives.items()}
        )
        groups = torch.arange(len(batch)) if batch.groups is None else batch.groups
        losses: list[Tensor] = []
        self._schedule.step(
            input_ids=batch.input_ids,
            attention_mask=batch.attention_mask,
            pixel_mask=batch.pixel_mask,
            groups=groups.to(self.device),
            target=torch.zeros(len(batch), device=self.device),
            losses=losses,
        )
        return sum(float(loss.detach()) for loss in losses)


class _ImageStage(nn.Module):
    """The image branch; its mask travels as one more feature, since a pipeline carries gradients for all it sends."""

    def __init__(self, model: FusionModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixel_values: Tensor, pixel_mask: Tensor) -> tuple[Tensor, Tensor]:
        embedding, features, mask = self.model.encode_image(pixel_values, pixel_mask)
        return embedding, torch.cat([features, mask[..., None].to(features.dtype)], 2)


class _TextStage(nn.Module):
    """The text branch, the fusion and the objectives: a micro-batch's share of the loss, (1,)."""

    def __init__(self, model: FusionModel, objectives: Mapping[str, Objective]) -> None:
        super().__init__()
        self.model, self.objectives = model, objectives
        self.terms = LossTerms(dict.fromkeys(objectives, 1.0))

    def forward(
        self,
        embedding: Tensor,
        features: Tensor,
        *,
        input_ids: Tensor,
        attention_mask: Tensor,
        pixel_mask: Tensor,
        groups: Tensor,
    ) -> Tensor:
        image = Encoded(embedding, features[..., :-1], features[..., -1].detach() > 0.5)
        output = self.model.join(image, self.model.encode_text(input_ids, attention_mask))
        batch = Batch(
            pixel_values=pixel_mask[:, None].to(torch.uint8),  # no objective looks at pixels
            pixel_mask=pixel_mask,
            input_ids=input_ids,
            attention_mask=attention_mask,
            labels=None,
            record_ids=[""] * len(input_ids),
            groups=groups,
        )
        shares = {name: goal(output, batch) for name, goal in self.objectives.items()}
        return self.terms.add(shares)[None]


def _given(output: Any, target: Any) -> Tensor:
    return output.sum()
