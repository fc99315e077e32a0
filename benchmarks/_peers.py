"""Batch samplers of other projects, run as they are shipped: sizes in, lists of sample rows out, one epoch a call.

Each sees one number a sample, text tokens and image patches together, because that is all it can take. What is not
installed is left out and named. To add a peer: a function below and one line in `PEERS`.
"""

from __future__ import annotations

import importlib.util
import warnings
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


PEERS = (
    Peer("transformers LengthGroupedSampler", "transformers", length_grouped),
    Peer("transformers BatchRebalanceSampler", "transformers", batch_rebalance),
    Peer("lhotse DynamicBucketingSampler, 10 buckets", "lhotse", dynamic_buckets(10)),
    Peer("lhotse DynamicBucketingSampler, 30 buckets", "lhotse", dynamic_buckets(30)),
    Peer("trl best-fit packing", "trl", best_fit_packing, packed=True),
)
