"""Measuring a model on held-out samples."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from mmlab.errors import RunError
from mmlab.model.fusion_model import FusionOutput
from mmlab.model.huggingface import LossModel
from mmlab.training.alignment import describe_alignment
from mmlab.training.losses.base import Objective
from mmlab.training.losses.masked_language import MaskedLanguage
from mmlab.training.out_of_memory import out_of_memory_in, release_memory
from mmlab.training.precision import Precision
from mmlab.training.retrieval import candidate_losses, joined, of_pairs, recalls
from mmlab.types import Batch


@torch.no_grad()
def evaluate(
    model: nn.Module,
    loader: Iterable[Batch],
    precision: Precision,
    device: torch.device,
    *,
    num_candidates: int = 32,
    objectives: Mapping[str, Objective] | None = None,
    by_objective: bool = False,
    on_failure: Callable[[str], object] = lambda failure: None,
    run: Callable[[Callable[[], Any]], Any] = lambda work: work(),
) -> dict[str, Any]:
    """Losses, recall and alignment over all samples; see `FusionTrainer.evaluate`. Leaves the model in evaluation mode.

    Args:
        num_candidates: see `candidate_losses`.
        objectives: where `MaskedLanguage` is among them, `masked_language_loss` is that of all hidden tokens, and
            `masked_language_text_loss` and `masked_language_pair_loss` those of the same tokens of pairs, told without
            and with their image: the difference is what the images tell. Which tokens are hidden is the same at every
            evaluation of the same batches.
        by_objective: add the mean of each objective under `by_objective`, as training computes it, in the batches as
            they come. A model's own loss is `loss` already.
        on_failure: told the error's first line each time that memory ran out; the batch is then measured in halves.
        run: calls what computes with the model's weights.

    Raises:
        RunError: a sample does not fit by itself, or a batch whose loss compares samples does not fit.
    """
    model.eval()
    masked = [goal for goal in (objectives or {}).values() if isinstance(goal, MaskedLanguage)]
    each = objectives or {} if by_objective and not isinstance(model, LossModel) else {}
    told: dict[str, list[float]] = {}
    num_samples, parts, logit_scale = 0, [], torch.ones(())
    for number, held_out in enumerate(loader):
        measure = partial(_run, run, partial(_measure, model, precision, device, masked, each, number))
        num_samples += len(held_out)
        for found in _in_parts(measure, held_out, model, device, on_failure):
            parts += found.embeddings
            logit_scale = found.logit_scale
            for name, value, num_told in found.told:
                sums = told.setdefault(name, [0.0, 0.0])
                sums[0], sums[1] = sums[0] + value, sums[1] + num_told
    measured: dict[str, Any] = {"num_samples": num_samples}
    if parts:
        embeddings = joined(parts)
        measured |= recalls(embeddings)
        measured |= candidate_losses(embeddings, logit_scale, num_candidates=num_candidates)
        measured |= describe_alignment(embeddings)
    if isinstance(model, LossModel):
        measured["loss"] = math.nan
    means = {name: value / num_told for name, (value, num_told) in told.items() if num_told}
    if each:
        measured["by_objective"] = {name: means.pop(_EACH + name) for name in each if _EACH + name in means}
    return measured | means


_EACH = "objective "  # before the name of an objective whose mean is wanted


class _Found(NamedTuple):
    """What a batch adds to the figures."""

    embeddings: list[Any]  # of its pairs, where the model gives them
    logit_scale: torch.Tensor
    told: list[tuple[str, float, int]]  # name, sum and count of a loss


def _run(run: Callable[[Callable[[], Any]], Any], measure: Callable[[Batch], _Found], batch: Batch) -> _Found:
    return run(partial(measure, batch))


def _measure(
    model: nn.Module,
    precision: Precision,
    device: torch.device,
    masked: Sequence[MaskedLanguage],
    each: Mapping[str, Objective],
    seed: int,
    held_out: Batch,
) -> _Found:
    batch = held_out.to(device)
    with precision.autocast():
        output = model(batch)
    if isinstance(model, LossModel):
        num_terms = int(model.num_terms(batch))
        has_pairs = getattr(output, "text_embeds", None) is not None
        pairs = [of_pairs(batch, output.image_embeds, output.text_embeds)] if has_pairs else []
        return _Found(pairs, torch.ones(()), [("loss", float(output.loss) * num_terms, num_terms)])
    told: list[tuple[str, float, int]] = []
    for goal in masked:
        with precision.autocast(), torch.random.fork_rng([device] if device.type == "cuda" else []):
            told += _tell(goal, output, batch, seed=seed)
    for name, objective in each.items():
        with precision.autocast(), torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(seed)
            alike = replace(batch, weights=None)
            told.append((_EACH + name, float(objective(output, alike)), objective.count(alike)))
    pairs = [of_pairs(batch, output.image_embedding, output.text_embedding)]
    return _Found(pairs, output.logit_scale, told)


def _in_parts(
    measure: Callable[[Batch], _Found],
    batch: Batch,
    model: nn.Module,
    device: torch.device,
    on_failure: Callable[[str], object],
) -> list[_Found]:
    """What is found in a batch, or in its halves where it does not fit into memory."""
    found: list[_Found] = []
    failure = out_of_memory_in(lambda: found.append(measure(batch)))
    if failure is None:
        return found
    release_memory(device)
    on_failure(failure)
    size, compares = len(batch), getattr(model, "compares_samples", False)
    if size == 1 or compares:
        why = "this model's own loss compares its samples" if compares else "it is a single sample"
        raise RunError(
            f"the held-out batch of {size} from {batch.record_ids[0]!r} does not fit into memory ({failure}), and "
            f"{why}: it cannot be cut; evaluate smaller batches or samples, or use 16-bit precision"
        )
    halves = (slice(0, size // 2), slice(size // 2, size))
    return [
        part for rows in halves for part in _in_parts(measure, batch.part(rows), model, device, on_failure)
    ]


def _tell(
    goal: MaskedLanguage, output: FusionOutput, batch: Batch, *, seed: int
) -> Iterator[tuple[str, float, int]]:
    """Name, sum and count of each of the losses of hidden tokens."""
    image, image_mask, text, text_mask = output.features
    blind = replace(output, features=(image, torch.zeros_like(image_mask), text, text_mask))
    has_image = batch.pixel_mask.flatten(1).any(1)
    pairs = replace(batch, weights=has_image.float())
    num_in_pairs = goal.count(replace(batch, attention_mask=batch.attention_mask & has_image[:, None]))
    every = replace(batch, weights=None)
    for name, seeing, samples, count in (
        ("masked_language_loss", output, every, goal.count(batch)),
        ("masked_language_pair_loss", output, pairs, num_in_pairs),
        ("masked_language_text_loss", blind, pairs, num_in_pairs),
    ):
        torch.manual_seed(seed)
        yield name, float(goal(seeing, samples)), count


@torch.no_grad()
def offending(
    model: nn.Module, batches: Iterable[Batch], precision: Precision, device: torch.device
) -> list[str]:
    """Ids of the samples for which a model's output is not finite, each looked at by itself.

    Leaves the model in evaluation mode: batch normalisation neither learns from these samples nor refuses a lone one.
    """
    model.eval()
    ids = []
    for batch in batches:
        for row in range(len(batch)):
            sample = batch.part(slice(row, row + 1)).to(device)
            with precision.autocast():
                output = model(sample)
            tensors = [value for value in _values(output) if isinstance(value, torch.Tensor)]
            if not all(tensor.isfinite().all() for tensor in tensors if tensor.is_floating_point()):
                ids += sample.record_ids
    return ids


def _values(output: Any) -> Iterable[Any]:
    if is_dataclass(output) and not isinstance(output, Mapping):
        return [getattr(output, item.name) for item in fields(output)]
    return tree_leaves(output)
