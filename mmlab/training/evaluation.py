"""Evaluate a model on held-out samples; ranks share the batches, and the figures are those of all samples."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils import _pytree

from mmlab.errors import DataError, OptionError, RunError
from mmlab.model.fusion_model import FusionOutput
from mmlab.model.huggingface import LossModel, normalisation_of
from mmlab.model.masking import can_hide, num_hidden
from mmlab.training.losses.base import Objective
from mmlab.training.losses.masked_language import MaskedLanguage
from mmlab.training.losses.names import OBJECTIVES
from mmlab.training.out_of_memory import out_of_memory_in, release_memory
from mmlab.training.retrieval import Embeddings, figures_of, of_pairs
from mmlab.training.split import Leaves
from mmlab.training.strategy import Strategy
from mmlab.types import Batch

if TYPE_CHECKING:
    from mmlab.training.setup import TrainerSetup


class Vocabulary(NamedTuple):
    """What the token ids and labels of a loader's batches stand for; None and () where the loader does not say."""

    words: Any = None  # a checksum of the tokenizer's vocabulary
    classes: tuple[str, ...] = ()  # by label

    @classmethod
    def of(cls, loader: Any) -> Vocabulary:
        records = getattr(getattr(loader, "dataset", None), "records", None)
        return cls(getattr(loader, "vocabulary", None), tuple(getattr(records, "label_names", ())))


def check_meaning(trainer: TrainerSetup, loader: Any) -> None:
    """Raise OptionError if the model reads token ids or labels that stand for other things than in training, or pixels that
    it normalises in another way than the data set's processor."""
    trained, held_out, model = trainer.vocabulary, Vocabulary.of(loader), trainer.model
    inputs = {*getattr(model, "accepted", ("batch",))}
    images = getattr(getattr(loader, "dataset", None), "image_processor", None)
    reads_pixels = "pixel_values" in inputs and hasattr(images, "do_normalize")
    if reads_pixels and normalisation_of(images) != model.normalisation:
        remedy = "give LossModel(model, processor=processor), from mmlab.model"
        raise OptionError(f"pixels are normalised in another way than by {type(images).__name__}: {remedy}")
    differ = None not in (trained.words, held_out.words) and trained.words != held_out.words
    if differ and inputs & {"input_ids", "batch"}:
        remedy = "give MultimodalDataset(held_out, tokenizer=dataset.tokenizer)"
        raise OptionError(f"token ids of eval_loader stand for other words than in training: {remedy}")
    differ = any(a != b for a, b in zip(trained.classes, held_out.classes, strict=False))
    reads_labels = inputs & {"labels", "batch"} and getattr(model, "labels", "batch") == "batch"
    # those of OBJECTIVES do not read labels
    own_objectives = {type(objective) for objective in trainer.objectives.values()} - {*OBJECTIVES.values()}
    if differ and reads_labels and own_objectives:
        remedy = "read both as splits of one source, which numbers their classes together"
        raise OptionError(f"labels of eval_loader stand for other classes than in training: {remedy}")


@torch.no_grad()
def evaluate(trainer: TrainerSetup, loader: Iterable[Batch], *, by_objective: bool = False) -> dict[str, Any]:
    """Losses, recall and alignment over all samples; see `FusionTrainer.evaluate`. Leaves the model in evaluation mode.

    If `MaskedLanguage` is among the objectives, `masked_language_loss` is the loss of all hidden tokens;
    `masked_language_text_loss` and `masked_language_pair_loss` are the losses of the hidden tokens of pairs,
    predicted without and with their image: the difference is what the images contribute. Every evaluation of
    the same batches hides the same tokens. A batch that does not fit into memory is measured in halves.

    Args:
        by_objective: add the mean of each objective under `by_objective`, computed as in training, batch by
            batch. A model's own loss is already `loss`.

    Raises:
        DataError: no batch; or no pair, where the model gives embeddings.
        RunError: a sample does not fit by itself, or a batch whose loss compares samples does not fit.
    """
    model, strategy = trainer.into_evaluation(), trainer.strategy
    each = trainer.objectives if by_objective and not isinstance(model, LossModel) else {}

    def measure_own() -> list[_Found]:
        own: list[_Found] = []
        for number, held_out, is_extra in _own_batches(loader, strategy):
            parts = _in_parts(partial(_measure, trainer, each, number), held_out, trainer)
            own += [] if is_extra else parts
        return _pytree.tree_map_only(torch.Tensor, torch.Tensor.cpu, own) if strategy.world_size > 1 else own

    found = [part for own in strategy.gather_objects(measure_own, "evaluate") for part in own]
    if not found:
        raise DataError("there is no batch to evaluate on; give a loader that can be iterated anew each time")

    def figures() -> dict[str, Any]:
        parts = [part.pairs for part in found if part.pairs is not None]
        return figures_of(parts, found[0].logit_scale) if parts else {}

    measured: dict[str, Any] = {"num_samples": sum(part.num_samples for part in found)}
    measured |= strategy.run_on_main(figures, "evaluate")
    if isinstance(model, LossModel):
        measured["loss"] = math.nan
    sums: defaultdict[str, float] = defaultdict(float)
    counts: defaultdict[str, int] = defaultdict(int)
    for name, value, count in chain.from_iterable(part.losses for part in found):
        sums[name] += value
        counts[name] += count
    means = {name: sums[name] / count for name, count in counts.items() if count}
    if each:
        measured["by_objective"] = {name: means.pop(_EACH + name) for name in each if _EACH + name in means}
    return measured | means


def _own_batches(loader: Iterable[Batch], strategy: Strategy) -> Iterator[tuple[int, Batch, bool]]:
    """This rank's batches, every `world_size`-th of the loader's.

    Yields:
        A batch's number, the batch, and whether it is another rank's batch that is run here only because all ranks must
        run the model equally often.
    """
    batches, first = iter(loader), 0
    while group := list(islice(batches, strategy.world_size)):
        if strategy.rank < len(group):
            yield first + strategy.rank, group[strategy.rank], False
        elif strategy.requires_equal_steps:
            yield first, group[0], True
        first += len(group)


_EACH = "objective "  # prefix of the name of an objective whose mean is asked for


class _Found(NamedTuple):
    """What a batch, or a part of one, adds to the figures."""

    num_samples: int
    pairs: Embeddings | None  # None if the model has no embeddings
    logit_scale: torch.Tensor
    losses: list[tuple[str, float, int]]  # name, sum and count


def _measure(trainer: TrainerSetup, each: Mapping[str, Objective], seed: int, held_out: Batch) -> _Found:
    model, precision, device = trainer.model, trainer.precision, trainer.device
    trainer.check_words(held_out)
    batch = held_out.to(device)
    with precision.autocast():
        output = model(batch)
    if isinstance(model, LossModel):
        num_terms = int(model.num_terms(batch.host))
        has_pairs = getattr(output, "text_embeds", None) is not None
        pairs = of_pairs(batch, output.image_embeds, output.text_embeds) if has_pairs else None
        losses = [("loss", float(output.loss) * num_terms, num_terms)] if num_terms else []
        scale = model.logit_scale
        return _Found(len(batch), pairs, torch.ones(()) if scale is None else scale, losses)
    losses = []
    with precision.autocast(), torch.random.fork_rng([device] if device.type == "cuda" else []):
        for objective in trainer.objectives.values():
            if isinstance(objective, MaskedLanguage):
                losses += _masked_losses(objective, output, batch, seed=seed)
        unweighted = replace(batch, weights=None)
        for name, objective in each.items():
            torch.manual_seed(seed)
            losses.append((_EACH + name, float(objective(output, unweighted)), objective.count(unweighted)))
    pairs = of_pairs(batch, output.image_embedding, output.text_embedding)
    return _Found(len(batch), pairs, torch.as_tensor(output.logit_scale), losses)


def _in_parts(measure: Callable[[Batch], _Found], batch: Batch, trainer: TrainerSetup) -> list[_Found]:
    """What is measured on a batch, or on its halves if it does not fit into memory."""
    found: list[_Found] = []
    failure = out_of_memory_in(lambda: found.append(trainer.strategy.evaluate(partial(measure, batch))))
    if failure is None:
        return found
    release_memory(trainer.device)
    trainer.ran_out("evaluation", failure, 2)
    size, compares = len(batch), getattr(trainer.model, "compares_samples", False)
    if size == 1 or compares:
        why = "this model's own loss compares its samples" if compares else "it is a single sample"
        raise RunError(
            f"the held-out batch of {size} from {batch.record_ids[0]!r} does not fit into memory ({failure}), and "
            f"{why}: it cannot be cut; evaluate smaller batches or samples, or use 16-bit precision"
        )
    halves = (batch.part(rows) for rows in (slice(0, size // 2), slice(size // 2, size)))
    return [part for half in halves for part in _in_parts(measure, half, trainer)]


def _masked_losses(
    goal: MaskedLanguage, output: FusionOutput, batch: Batch, *, seed: int
) -> Iterator[tuple[str, float, int]]:
    """Name, sum and count of each loss of hidden tokens."""
    image, image_mask, text, text_mask = output.features
    blind = replace(output, features=(image, torch.zeros_like(image_mask), text, text_mask))
    has_image = torch.from_numpy(batch.host.height > 0)
    hidden = num_hidden(can_hide(batch.host, goal.special_ids), goal.mask_ratio)
    num_hidden_in_pairs = int(hidden[has_image].sum())
    pairs = replace(batch, weights=has_image.float().to(batch.input_ids.device))
    every = replace(batch, weights=None)
    for name, seeing, samples, count in (
        ("masked_language_loss", output, every, int(hidden.sum())),
        ("masked_language_pair_loss", output, pairs, num_hidden_in_pairs),
        ("masked_language_text_loss", blind, pairs, num_hidden_in_pairs),
    ):
        torch.manual_seed(seed)
        yield name, float(goal(seeing, samples)), count


@torch.no_grad()
def nonfinite_samples(trainer: TrainerSetup, batches: Iterable[Batch]) -> list[str]:
    """Ids of the samples for which a model's output, an input or the weight is not finite, each run by itself.

    Leaves the model in evaluation mode: batch normalisation neither learns from these samples nor refuses a lone one.
    """
    model = trainer.into_evaluation()
    ids = []
    for batch in batches:
        for row in range(len(batch)):
            sample = batch.part(slice(row, row + 1)).to(trainer.device)
            with trainer.precision.autocast():
                tensors = [*Leaves.of(model(sample)).tensors, *sample.tensors()]
            if not all(tensor.isfinite().all() for tensor in tensors if tensor.is_floating_point()):
                ids += sample.record_ids
    return ids
