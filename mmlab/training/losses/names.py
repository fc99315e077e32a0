"""Objectives by name, and the objective of a model that computes its own loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from mmlab.errors import OptionError, check_is, check_name
from mmlab.model.huggingface import LossModel
from mmlab.training.losses.base import Objective, at_least_fp32
from mmlab.training.losses.contrastive import Contrastive, Matching
from mmlab.training.losses.masked_language import MaskedLanguage
from mmlab.types import Batch


@dataclass(frozen=True, slots=True)
class OwnLoss:
    """The loss that a `LossModel` computes itself, turned back from its mean into a sum."""

    model: LossModel

    def count(self, batch: Batch) -> int:
        """Number of samples or label tokens that the model averages over."""
        return int(self.model.num_terms(batch.host))

    def __call__(self, output: Any, batch: Batch) -> Tensor:
        """Sum over them, in the model's own unit.

        Raises:
            OptionError: the batch has sample weights, which a mean computed inside the model cannot take into
                account.
        """
        if batch.weights is not None:
            raise OptionError(
                "the batch has loss weights, but this model computes its own mean loss, in which all samples count "
                "alike; weigh by sampling without correction instead"
            )
        return at_least_fp32(output.loss) * self.model.num_terms(batch)


OWN = "own"  # the one objective of a model that computes its own loss
ALL_RANKS = "contrastive_all_ranks"  # the objective "contrastive", with its negatives from all ranks
OBJECTIVES = {"contrastive": Contrastive, "matching": Matching, "masked_language": MaskedLanguage}


def parse_objectives(
    model: nn.Module, asked: Sequence[str] | Mapping[str, Objective], *, tokenizer: Any = None
) -> dict[str, Objective]:
    """Objectives by name: from names in `OBJECTIVES` or as given; a `LossModel` has its own and no other.

    The name "contrastive_all_ranks" gives the objective "contrastive" with negatives from all ranks.

    Args:
        tokenizer: of the data; "masked_language" needs it.

    Raises:
        OptionError: an unknown name, no name, "contrastive" with both kinds of negatives, or negatives from all ranks for a model
            that computes its own loss.
    """
    asked = (asked,) if isinstance(asked, str) else asked
    wants_all_ranks = ALL_RANKS in asked or (
        isinstance(asked, Mapping) and any(getattr(goal, "all_ranks", False) for goal in asked.values())
    )
    if isinstance(model, LossModel):
        if wants_all_ranks:
            raise OptionError(
                f"{type(model.module).__name__} computes its own loss, inside one rank's batch, so that negatives "
                "cannot come from all ranks; leave all_ranks out, or train a FusionModel"
            )
        return {OWN: OwnLoss(model)}
    if not asked:
        raise OptionError(f"no objective; known are {', '.join(OBJECTIVES)}")
    if isinstance(asked, Mapping):
        for name, goal in asked.items():
            for method in ("count", "__call__"):
                check_is(f"objective {name!r}", goal, method, "an object with count(batch) and __call__")
        return dict(asked)
    makers: dict[str, Any] = {**OBJECTIVES, ALL_RANKS: partial(Contrastive, all_ranks=True)}
    if tokenizer is not None:
        makers["masked_language"] = partial(MaskedLanguage.of, tokenizer)
    for name in asked:
        check_name("objective", name, makers)
    if wants_all_ranks and "contrastive" in asked:
        raise OptionError(f"contrastive and {ALL_RANKS} are one objective; ask for one of them")
    return {"contrastive" if name == ALL_RANKS else name: makers[name]() for name in asked}


def refuse_bare(output: Any, model: nn.Module, objectives: Mapping[str, Objective]) -> None:
    """Raise OptionError if an objective reads embeddings and the output, say a plain tensor or dict, has none."""
    if all(hasattr(output, name) for name in ("image_embedding", "text_embedding", "logit_scale")):
        return
    reading = [name for name, goal in objectives.items() if type(goal) in OBJECTIVES.values()]
    if reading:
        name = type(model).__name__
        raise OptionError(
            f"{name} returned a {type(output).__name__}, and {', '.join(reading)} reads its image_embedding, text_embedding and "
            f"logit_scale; if it has its own loss, train LossModel({name}(...))"
        )
