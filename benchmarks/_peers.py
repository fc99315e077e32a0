"""Batch samplers of other projects, run as they are shipped (one is written anew): sizes in, lists of sample rows out, one epoch a call.

Each sees one number a sample, text tokens and image patches together, because that is all it can take. What is not
installed is left out and named. To add a peer: a function below and one line in `PEERS`.
"""

from __future__ import annotations

import importlib.util
import warnings
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from mmlab.types import SampleSizes

PATCH = 16


@dataclass(frozen=True, slots=True)
class Peer:
    """A sampler and what it is."""

    name: str
    package: str  # must be installed
    plan: Callable[[SampleSizes, float, int], list[list[int]]]  # sizes, budget, epoch
    packed: bool = False

    @property
    def installed(self) -> bool:
        """Whether its package can be imported."""
        return importlib.util.find_spec(self.package) is not None


def lengths_of(sizes: SampleSizes) -> np.ndarray:
    """(N,) text tokens and image patches of each sample, added."""
    return sizes.num_tokens.astype(np.int64) + -(-sizes.height // PATCH) * -(-sizes.width // PATCH)


def batch_size_of(sizes: SampleSizes, budget: float) -> int:
    """How many average samples the budget holds."""
    return max(1, round(budget / float(lengths_of(sizes).mean())))


def length_grouped(sizes: SampleSizes, budget: float, epoch: int) -> list[list[int]]:
    """transformers' `LengthGroupedSampler`, in batches of a fixed size."""
    import torch
    from transformers.trainer_pt_utils import LengthGroupedSampler

    size = batch_size_of(sizes, budget)
    generator = torch.Generator().manual_seed(epoch)
    rows = list(LengthGroupedSampler(size, lengths=lengths_of(sizes).tolist(), generator=generator))
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def batch_rebalance(sizes: SampleSizes, budget: float, epoch: int, num_ranks: int = 8) -> list[list[int]]:
    """transformers' `BatchRebalanceSampler` for 8 ranks; the ranks' batches of one step are neighbours."""
    from transformers.trainer_pt_utils import BatchRebalanceSampler

    lengths, size = lengths_of(sizes).tolist(), batch_size_of(sizes, budget)
    shares = []
    for rank in range(num_ranks):
        sampler = BatchRebalanceSampler(
            lengths, size * num_ranks, dp_size=num_ranks, grad_accum=1, rank=rank, drop_last=False
        )
        sampler.set_epoch(epoch)
        shares.append(list(sampler))
    return [batch for step in zip(*shares, strict=True) for batch in step]


def dynamic_buckets(num_buckets: int) -> Callable[[SampleSizes, float, int], list[list[int]]]:
    """lhotse's `DynamicBucketingSampler` with the budget as `max_duration`, over samples shuffled each epoch.

    It shuffles by itself too, but only within a buffer of 20,000.
    """

    def plan(sizes: SampleSizes, budget: float, epoch: int) -> list[list[int]]:
        from lhotse import MonoCut
        from lhotse.dataset import DynamicBucketingSampler

        lengths = lengths_of(sizes)
        cuts = [
            MonoCut(id=str(row), start=0, duration=float(lengths[row]), channel=0)
            for row in np.random.default_rng(epoch).permutation(len(sizes))
        ]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it recommends lazily read cuts
            sampler = DynamicBucketingSampler(
                cuts, max_duration=budget, num_buckets=num_buckets, shuffle=True, world_size=1, rank=0
            )
        sampler.set_epoch(epoch)
        return [[int(cut.id) for cut in batch] for batch in sampler]

    return plan


def best_fit_packing(sizes: SampleSizes, budget: float, epoch: int) -> list[list[int]]:
    """TRL's `pack_dataset`, best fit decreasing, over shuffled samples; every token of a sample is its row."""
    import datasets
    from trl.data_utils import pack_dataset

    datasets.disable_progress_bars()
    rows = np.random.default_rng(epoch).permutation(len(sizes))
    lengths = lengths_of(sizes)
    tokens = ([int(row)] * int(lengths[row]) for row in rows)
    packs = pack_dataset(datasets.Dataset.from_dict({"input_ids": list(tokens)}), int(budget))
    batches = []
    for pack in packs:
        firsts = np.cumsum([0, *pack["seq_lengths"][:-1]])
        batches.append([pack["input_ids"][first] for first in firsts])
    return [batches[place] for place in np.random.default_rng(epoch).permutation(len(batches))]


def greedy_knapsack(sizes: SampleSizes, budget: float, epoch: int) -> list[list[int]]:
    """Packs as NeMo Automodel's `neat_packing_vlm` fills them, written anew: each takes the longest sequence that still fits.

    It looks at the language model's sequence alone, whose share of the budget is its room, and packs once for all epochs.
    """
    lengths = sizes.num_tokens.astype(np.int64)
    left = int(budget * lengths.sum() / lengths_of(sizes).sum())
    room, order = left, np.argsort(lengths, kind="stable").tolist()
    sorted_lengths, packs = sorted(lengths.tolist()), [[]]
    while order:
        place = bisect_right(sorted_lengths, left) - 1
        if place < 0:
            packs, left = [*packs, []], room
            continue
        left -= sorted_lengths.pop(place)
        packs[-1].append(order.pop(place))
    return [packs[place] for place in np.random.default_rng(epoch).permutation(len(packs))]


PEERS = (
    Peer("transformers LengthGroupedSampler", "transformers", length_grouped),
    Peer("transformers BatchRebalanceSampler", "transformers", batch_rebalance),
    Peer("lhotse DynamicBucketingSampler, 10 buckets", "lhotse", dynamic_buckets(10)),
    Peer("lhotse DynamicBucketingSampler, 30 buckets", "lhotse", dynamic_buckets(30)),
    Peer("trl best-fit packing", "trl", best_fit_packing, packed=True),
    Peer("greedy knapsack of sequences, as in NeMo Automodel", "numpy", greedy_knapsack, packed=True),
)
