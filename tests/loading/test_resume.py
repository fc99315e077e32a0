"""After a resume the next batch is bit for bit the one that would have come, wherever it happens."""

from __future__ import annotations

import io
import time
from itertools import islice

import pytest
import torch

from mmlab.data.dataset import MultimodalDataset
from mmlab.data.text import load_tokenizer
from mmlab.errors import DataError
from mmlab.loading.adaptive import AdaptiveDataLoader
from mmlab.pricing.resource_aware import ResourceAwareScheduler
from mmlab.schedule.cost import PaddedTokens
from mmlab.schedule.schedulers import make_scheduler
from tests.loading.loaders import Noise, assert_same, make_loader


def saved(state: dict) -> dict:
    """As a checkpoint gives it back."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("name", ["random", "budget"])
@pytest.mark.parametrize(
    ("before", "after"), [("threads", "torch"), ("torch", "threads"), ("threads", "here")]
)
def test_the_next_batch_is_the_one_that_would_have_come(dataset, name: str, before: str, after: str) -> None:
    options = {"batch_size": 5} if name == "random" else {"budget": 200}

    def loader(backend: str):
        made = make_loader(
            dataset, backend, scheduler=make_scheduler(name, seed=7, **options), augment=Noise(), prefetch=4
        )
        made.set_epoch(2)
        return made

    expected = list(loader("here"))
    for num_batches in (1, len(expected) // 2, len(expected)):
        first = loader(before)
        iterator = iter(first)
        assert_same(list(islice(iterator, num_batches)), expected[:num_batches])
        second = make_loader(
            dataset, after, scheduler=make_scheduler(name, seed=7, **options), augment=Noise()
        )
        second.load_state_dict(saved(first.state_dict()))
        assert (second.epoch, second.start_batch, len(second)) == (2, num_batches, len(expected))
        assert_same(list(second), expected[num_batches:])
        assert second.start_batch == 0
        assert_same(list(islice(second, 1)), expected[:1])  # the epoch from its start
        del iterator


def test_a_resumed_epoch_can_be_resumed_and_is_followed_by_the_next(dataset) -> None:
    reference = make_loader(dataset, augment=Noise())
    expected = list(reference)
    state: dict = {}
    batches = []
    while len(batches) < len(expected):
        loader = make_loader(dataset, "threads", augment=Noise())
        if state:
            loader.load_state_dict(state)
        batches += list(islice(loader, 3))
        state = saved(loader.state_dict())
    assert_same(batches, expected)
    reference.set_epoch(1)
    loader.set_epoch(1)
    assert_same(list(loader), list(reference))


@pytest.mark.parametrize("num_left", [0, 4])
def test_on_other_ranks_len_is_what_was_done_and_what_is_left(dataset, monkeypatch, num_left: int) -> None:
    """Also after a second resume; the next iteration is a whole epoch, not again what was left of the first."""

    def loader(world_size: int):
        monkeypatch.setenv("WORLD_SIZE", str(world_size))
        return make_loader(dataset, scheduler=make_scheduler("random", batch_size=8, world_size=world_size))

    first = loader(1)
    num_done = len(list(islice(first, len(first) - num_left)))
    second = loader(2)
    second.load_state_dict(saved(first.state_dict()))
    assert len(second) == num_done + num_left // 2
    list(islice(second, num_left // 2))
    third = loader(2)
    third.load_state_dict(saved(second.state_dict()))
    assert (len(third), len(list(third))) == (len(second), 0)
    assert len(list(third)) == len(third) == len(loader(2))


@pytest.mark.serial
def test_no_image_is_read_again_for_a_resume(dataset) -> None:
    first = make_loader(dataset)
    num_batches = len(first) - 1
    iterator = iter(first)
    list(islice(iterator, num_batches))
    second = make_loader(dataset, "threads")
    started = time.perf_counter()
    second.load_state_dict(first.state_dict())
    assert len(list(second)) == 1
    assert time.perf_counter() - started < 1
    (decode,) = [row for row in second.stage_report().rows if row["stage"] == "decode"]
    (train,) = [row for row in second.stage_report().rows if row["stage"] == "train"]
    assert decode["items_per_s"] == train["items_per_s"]  # nothing but the last batch


def test_weights_of_an_adaptive_loader_come_with_their_samples(dataset) -> None:
    def loader(num_workers: int):
        return AdaptiveDataLoader(dataset, 8, correct=True, num_workers=num_workers, progress=False)

    expected = list(loader(0))
    first = loader(2)
    list(islice(first, 4))
    second = loader(2)
    second.load_state_dict(first.state_dict())
    rest = list(second)
    assert_same(rest, expected[4:])
    assert all(
        torch.equal(batch.weights, other.weights) for batch, other in zip(rest, expected[4:], strict=True)
    )


@pytest.mark.parametrize(("before", "after"), [("threads", "torch"), ("torch", "here")])
def test_decisions_of_a_closed_loop_are_part_of_the_state(dataset, before: str, after: str) -> None:
    """Batches shrink in mid-epoch; those that were drawn ahead stay as they are, before and after the resume."""

    def loader(backend: str):
        planner = make_scheduler("random", batch_size=8)
        scheduler = ResourceAwareScheduler(1, planner=planner, policy="halving")
        return make_loader(dataset, backend, scheduler=scheduler, augment=Noise(), prefetch=2)

    def train(made, num_batches: int | None = None) -> list:
        batches = []
        for batch in islice(made, num_batches):
            batches.append(batch)
            values = {
                "num_samples": len(batch),
                "num_batches": 1,
                "num_out_of_memory": int(len(batches) == 2),
            }
            made.observe(values)
        return batches

    whole = loader(before)
    expected = train(whole)
    assert sorted({len(batch) for batch in expected[:-1]}) == [4, 8]
    ids = [record_id for batch in expected for record_id in batch.record_ids]
    assert sorted(ids) == sorted(dataset.records.ids)
    first = loader(before)
    assert_same(train(first, 3), expected[:3])
    second = loader(after)
    second.load_state_dict(saved(first.state_dict()))
    assert_same(list(second), expected[3:])


def test_another_plan_is_refused(dataset) -> None:
    loader = make_loader(dataset)
    list(islice(loader, 2))
    other = make_loader(dataset, scheduler=make_scheduler("budget", budget=300, cost=PaddedTokens(), seed=3))
    told = r"cannot resume: the state was saved with other scheduler options; .*under ddp on several ranks go on only as that"
    with pytest.raises(DataError, match=told):  # before a run in mid-epoch writes that it has begun
        other.load_state_dict(loader.state_dict())


def test_other_rows_and_other_words_are_refused(dataset) -> None:
    """The same number of samples in another order would be repeated and left out; token ids would mean other words."""
    loader = make_loader(dataset)
    next(iter(loader))
    state = saved(loader.state_dict())
    turned = MultimodalDataset(
        dataset.records.select(range(len(dataset))[::-1]),
        image_policy=dataset.image_policy,
        tokenizer=dataset.tokenizer,
    )
    with pytest.raises(
        DataError, match="the samples, their order or their sizes are not those of the saved state"
    ):
        make_loader(turned).load_state_dict(state)
    others = load_tokenizer(records=dataset.records, vocab_size=len(dataset.tokenizer) - 1)
    retrained = MultimodalDataset(dataset.records, image_policy=dataset.image_policy, tokenizer=others)
    with pytest.raises(DataError, match="the vocabulary differs"):
        make_loader(retrained).load_state_dict(state)


def test_other_rows_after_an_epoch_are_a_warning(dataset) -> None:
    """What was drawn to be held out of them may have been trained on."""
    loader = make_loader(dataset)
    list(loader)
    fewer = MultimodalDataset(
        dataset.records[:-8], image_policy=dataset.image_policy, tokenizer=dataset.tokenizer
    )
    for before, now in ((loader, make_loader(fewer)), (make_loader(fewer), make_loader(dataset))):
        list(before)
        with pytest.warns(RuntimeWarning, match="not those of the saved state.*may have been trained on"):
            now.load_state_dict(saved(before.state_dict()))
        assert list(now) == []
        now.set_epoch(1)
        assert len(list(now)) == len(now)
