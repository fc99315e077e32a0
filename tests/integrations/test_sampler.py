"""`PlannedSampler`: every sample once an epoch, equally many batches in every epoch and on every rank, exact resume."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from mmlab.errors import DataError, OptionError
from mmlab.integrations import PlannedSampler, sample_sizes
from mmlab.schedule import make_scheduler
from mmlab.schedule.mixing import Mixed, modality_of
from tests.integrations.tiny import LENGTHS, Pairs, budget, collate, flat, sizes

EVERYTHING = list(range(len(LENGTHS)))


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("name", ["random", "bucket", "budget"])
def test_epochs_have_one_length_and_ranks_share_every_sample_once(name: str, world_size: int) -> None:
    scheduler = budget() if name == "budget" else make_scheduler(name, batch_size=7)
    ranks = [
        PlannedSampler(sizes(), scheduler, num_epochs=4, rank=rank, world_size=world_size)
        for rank in range(world_size)
    ]
    lengths = set()
    for epoch in range(4):
        for sampler in ranks:
            sampler.set_epoch(epoch)
        batches = [list(sampler) for sampler in ranks]
        lengths |= {len(own) for own in batches} | {len(sampler) for sampler in ranks}
        assert flat(list(itertools.chain(*batches))) == EVERYTHING
    assert len(lengths) == 1


def test_epochs_of_different_length_are_split_within_the_budget() -> None:
    alone = [len(budget().plan(sizes(), epoch=epoch)) for epoch in range(6)]
    assert len(set(alone)) > 1
    sampler = PlannedSampler(sizes(), budget(), num_epochs=6)
    for epoch in range(6):
        sampler.set_epoch(epoch)
        assert len(sampler) == max(alone)
        assert sampler.plan.costs().max() <= 150
    free = PlannedSampler(sizes(), budget())
    for epoch in range(6):
        free.set_epoch(epoch)
        assert len(list(free)) == alone[epoch]


def test_batches_of_one_step_share_their_modality_in_epochs_that_were_lengthened_too() -> None:
    mixed = sample_sizes(LENGTHS, height=np.arange(len(LENGTHS)) % 3 * 16, width=16)
    scheduler = Mixed(inner=budget(), seed=1)
    ranks = [PlannedSampler(mixed, scheduler, num_epochs=8, rank=rank, world_size=2) for rank in range(2)]
    assert len({len(replace(scheduler, world_size=2).plan(mixed, epoch=epoch)) for epoch in range(8)}) > 1
    for epoch in range(8):
        for sampler in ranks:
            sampler.set_epoch(epoch)
        steps = [list(sampler) for sampler in ranks]
        assert flat([*steps[0], *steps[1]]) == EVERYTHING
        for batches in zip(*steps, strict=True):
            assert len(np.unique(modality_of(mixed)[flat(batches)])) == 1


@pytest.mark.filterwarnings("ignore:.*set_vital:UserWarning")  # torchdata asks torch for it
@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_stateful_loader_goes_on_in_mid_epoch(num_workers: int) -> None:
    def loader() -> tuple[PlannedSampler, StatefulDataLoader]:
        sampler = PlannedSampler(sizes(), budget(), num_epochs=3)
        return sampler, StatefulDataLoader(
            Pairs(), batch_sampler=sampler, collate_fn=collate, num_workers=num_workers
        )

    sampler, first = loader()
    sampler.set_epoch(2)
    batches = iter(first)
    seen = [next(batches)["rows"].tolist() for _ in range(3)]
    state = first.state_dict()
    del batches
    sampler, second = loader()
    second.load_state_dict(state)
    seen += [batch["rows"].tolist() for batch in second]
    assert sampler.epoch == 2
    assert flat(seen) == EVERYTHING
    sampler.set_epoch(1)
    assert flat([batch["rows"].tolist() for batch in second]) == EVERYTHING


@pytest.mark.filterwarnings("ignore:.*set_vital:UserWarning")  # torchdata asks torch for it
@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize(
    "is_in_loop", [True, False]
)  # when the state is taken, or after the loop over the epoch
def test_a_stateful_loader_goes_on_after_an_epoch(is_in_loop: bool, num_workers: int) -> None:
    def loader() -> tuple[PlannedSampler, StatefulDataLoader]:
        sampler = PlannedSampler(sizes(), budget(), num_epochs=3)
        return sampler, StatefulDataLoader(
            Pairs(), batch_sampler=sampler, collate_fn=collate, num_workers=num_workers
        )

    def train(first: int, state: dict[str, Any]) -> list[list[list[int]]]:
        sampler, resumed = loader()
        resumed.load_state_dict(state)
        seen = []
        for epoch in range(first, 3):
            sampler.set_epoch(epoch)
            seen.append([batch["rows"].tolist() for batch in resumed])
        return seen

    sampler, whole = loader()
    planned = []
    for epoch in range(3):
        sampler.set_epoch(epoch)
        planned.append(list(sampler))
    sampler.set_epoch(0)
    for number, _ in enumerate(whole, start=1):
        if is_in_loop and number == len(sampler):
            break
    state = whole.state_dict()
    assert train(1, state) == planned[1:]  # by a loop that counts the epoch as done
    assert train(0, state) == [[], *planned[1:]]  # by one that goes on with it


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_plain_loader_goes_on_behind_the_batches_that_were_trained(num_workers: int) -> None:
    sampler = PlannedSampler(sizes(), budget(), num_epochs=2)
    sampler.set_epoch(1)
    whole = list(sampler)
    resumed = PlannedSampler(sizes(), budget(), num_epochs=2)
    resumed.load_state_dict(sampler.state_dict(4))
    loader = DataLoader(Pairs(), batch_sampler=resumed, collate_fn=collate, num_workers=num_workers)
    assert [batch["rows"].tolist() for batch in loader] == whole[4:]
    assert [batch["rows"].tolist() for batch in loader] == whole  # the next iteration is a whole one


def test_a_state_of_other_options_is_refused() -> None:
    state = PlannedSampler(sizes(), budget()).state_dict(1)
    for other in (
        PlannedSampler(sizes(), make_scheduler("budget", budget=200, seed=1)),
        PlannedSampler(sizes(), budget(), rank=0, world_size=2),
        PlannedSampler(sample_sizes(LENGTHS[:-1]), budget()),
        PlannedSampler(sample_sizes(LENGTHS[::-1]), budget()),
    ):
        with pytest.raises(DataError, match="cannot resume"):
            other.load_state_dict(state)


def test_another_number_of_epochs_is_refused_in_mid_epoch_where_it_changes_the_batches() -> None:
    first, longer = (PlannedSampler(sizes(), budget(), num_epochs=number) for number in (1, 4))
    assert len(longer) > len(first)
    with pytest.raises(
        DataError, match=f"{len(first)} batches and is now cut into {len(longer)}.*num_epochs"
    ):
        longer.load_state_dict(first.state_dict(3))
    longer.load_state_dict(first.state_dict(0))


def test_epochs_beyond_those_announced_are_refused_where_they_need_more_batches() -> None:
    lengths = [len(budget().plan(sizes(), epoch=epoch)) for epoch in range(20)]
    shortest = next(epoch for epoch in range(1, 20) if lengths[epoch] > max(lengths[:epoch]))
    sampler = PlannedSampler(sizes(), budget(), num_epochs=shortest)
    with pytest.raises(OptionError, match=f"give num_epochs={shortest + 1}"):
        sampler.set_epoch(shortest)


def test_groups_may_have_any_values() -> None:
    for group in (["b.jpg", "a.jpg", "b.jpg"], [0.5, 0.25, 0.5]):
        assert sample_sizes([3, 4, 5], group=group).group.tolist() == [1, 0, 1]
    assert sample_sizes([3, 4, 5], group=[7, -1, 7]).group.tolist() == [7, -1, 7]


def test_what_is_no_scheduler_is_refused() -> None:
    with pytest.raises(OptionError, match=r"scheduler must be one of mmlab.make_scheduler"):
        PlannedSampler(sizes(), "budget")  # type: ignore[arg-type]


@pytest.mark.parametrize("num_epochs", ["3", 2.5])
def test_epochs_that_are_no_whole_number_are_refused(num_epochs: object) -> None:
    with pytest.raises(OptionError, match=f"num_epochs must be a whole number, found {num_epochs!r}"):
        PlannedSampler(sizes(), budget(), num_epochs=num_epochs)  # type: ignore[arg-type]
    for unknown in (None, -1):  # Lightning's `max_epochs` of a run without an end
        assert len(PlannedSampler(sizes(), budget(), num_epochs=unknown)) == len(budget().plan(sizes()))
