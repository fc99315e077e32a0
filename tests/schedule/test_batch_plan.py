"""A plan is data: columns, shapes, shares, a state of a few integers, and a batch sampler for torch and torchdata."""

import json
import pickle

import numpy as np
import pytest
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

import mmlab
from mmlab.data.records import Records
from mmlab.errors import DataError, OptionError
from mmlab.schedule.cost import PaddedTokens
from mmlab.schedule.mixing import Weighted
from mmlab.schedule.plan import BatchPlan
from mmlab.schedule.schedulers import SCHEDULERS, make_scheduler
from mmlab.types import BatchShape, Record, SampleSizes
from tests.schedule.planning import any_scheduler, in_blocks, make_sizes

SIZES = make_sizes(500)


def test_the_shapes_are_the_largest_of_each_batch():
    plan = make_scheduler("random", batch_size=7).plan(SIZES)
    for batch, shape in zip(plan, plan.shapes, strict=True):
        columns = (SIZES.num_tokens, SIZES.height, SIZES.width)
        assert shape == (len(batch), *(column[batch].max() for column in columns))
    assert plan.shapes[-1] == plan.shapes[len(plan) - 1] == plan.shapes[-1:][0]
    assert isinstance(plan.shapes[0], BatchShape)


def test_a_padded_batch_costs_its_shape_and_a_pack_the_sum_of_its_samples():
    alone = BatchPlan.from_batches([[row] for row in range(500)], SIZES).costs()
    padded, packed = (any_scheduler(name, SIZES).plan(SIZES) for name in ("budget", "packed"))
    assert padded.costs().tolist() == [PaddedTokens()(shape) for shape in padded.shapes]
    assert packed.costs().tolist() == [alone[batch].sum() for batch in packed]
    assert packed.costs(PaddedTokens(32)).sum() < packed.costs().sum()


def test_records_sizes_and_a_list_of_records_plan_alike():
    records = Records(
        ids=["a", "b", "c"],
        image_paths=["a.jpg", "b.jpg", None],
        texts=["one", "two", "three"],
        height=np.array([32, 64, 0], np.int32),
        width=np.array([48, 16, 0], np.int32),
        num_tokens=np.array([5, 9, 3], np.int32),
        group=np.array([0, 1, 2]),
    )
    scheduler = make_scheduler("budget", budget=100)
    plans = [list(scheduler.plan(samples)) for samples in (records, list(records), records.sizes())]
    assert plans[0] == plans[1] == plans[2]
    assert isinstance(records[0], Record)


def test_batches_made_elsewhere_are_reported_as_they_are():
    plan = BatchPlan.from_batches([[0, 1], [1, 2], [7]], SIZES.take(range(9)))
    report = plan.report()
    assert (report.num_batches, report.num_duplicates, report.randomness) == (3, 1, None)
    assert report.coverage == pytest.approx(4 / 9)
    assert plan.dropped.tolist() == [3, 4, 5, 6, 8]
    assert "5 samples are in no batch: rows 3, 4, 5, 6, 8" in report.notes[0]
    assert list(plan.skip(1)) == [[1, 2], [7]]
    assert plan.state_dict(2) == {"block": 0, "batch": 2}


@pytest.mark.parametrize("name", sorted(SCHEDULERS))
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_plan_is_the_batch_sampler_of_a_loader(name, num_workers):
    plan = any_scheduler(name, SIZES).plan(SIZES)
    loader = DataLoader(range(500), batch_sampler=plan, collate_fn=list, num_workers=num_workers)
    assert list(loader) == list(loader) == list(plan)
    assert len(loader) == len(plan)


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("num_steps", [0, 1, 9, 17])
def test_a_stateful_loader_goes_on_where_it_stopped(num_steps, num_workers):
    plan = in_blocks(any_scheduler("budget", SIZES, budget=6000), 150).plan(SIZES)

    def loader():
        return StatefulDataLoader(range(500), batch_sampler=plan, collate_fn=list, num_workers=num_workers)

    first = loader()
    batches = iter(first)
    seen = [next(batches) for _ in range(num_steps)]
    state = first.state_dict()
    second = loader()
    second.load_state_dict(state)
    assert seen + list(second) == list(plan)


@pytest.mark.parametrize("batch", [[True, False, True], [0.7], [-1, 0], [500], []], ids=str)
def test_batches_of_anything_but_rows_are_refused(batch):
    with pytest.raises(OptionError, match="batch 1 must hold rows from 0 to 499, found "):
        BatchPlan.from_batches([[0, 1], batch, [2]], SIZES)


def test_a_state_is_a_few_integers():
    plan = any_scheduler("budget", SIZES, world_size=2, seed=4).plan(SIZES, epoch=3)
    state = plan.shard(1, 2).state_dict(5)
    assert state == json.loads(json.dumps(state))
    assert (state["seed"], state["epoch"], state["num_samples"], state["taken"]) == (4, 3, 500, [[2, 10]])


@pytest.mark.parametrize(
    ("scheduler", "num_samples", "named"),
    [
        (make_scheduler("random", seed=1, batch_size=8), 500, "seed 0, this plan has 1"),
        (make_scheduler("random", batch_size=9), 500, "with other scheduler options"),
        (make_scheduler("random", batch_size=8), 400, "num_samples 500, this plan has 400"),
    ],
)
def test_a_state_of_something_else_is_refused(scheduler, num_samples, named):
    state = make_scheduler("random", batch_size=8).plan(SIZES).state_dict(3)
    with pytest.raises(DataError, match=named):
        scheduler.resume(SIZES.take(range(num_samples)), state)
    with pytest.raises(DataError, match="not the state of a plan; give what a plan's state_dict"):
        scheduler.resume(SIZES, {})
    planned, given = (
        make_scheduler("random", batch_size=8).plan(SIZES),
        BatchPlan.from_batches([[0], [1]], SIZES),
    )
    for plan, other in ((planned, given), (given, planned)):
        with pytest.raises(DataError, match="not the state of a plan"):
            iter(plan).load_state_dict(other.state_dict(1))


def test_a_state_of_other_sizes_or_weights_is_refused():
    scheduler = make_scheduler("budget")
    state = scheduler.plan(SIZES).state_dict(3)
    assert len(scheduler.resume(SIZES, state)) == len(scheduler.plan(SIZES)) - 3
    with pytest.raises(DataError, match="saved with other samples, or other sizes of them"):
        scheduler.resume(make_sizes(500, seed=1), state)
    state = Weighted(weights=np.arange(1, 501)).plan(SIZES).state_dict(3)
    with pytest.raises(DataError, match="saved with other samples, or other sizes of them"):
        Weighted(weights=np.arange(501, 1, -1)).resume(SIZES, state)


def test_a_report_refuses_numbers_out_of_range_and_the_plan_of_other_data():
    plan = make_scheduler("budget").plan(SIZES)
    for options, message in [
        ({"num_ranks": 0}, "ranks must be at least 1, found 0"),
        ({"budget": -5}, "budget must be above 0, found -5"),
        (
            {"following": make_scheduler("budget").plan(SIZES.take(range(50)))},
            "plans 50 samples, this plan 500",
        ),
    ]:
        with pytest.raises(OptionError, match=message):
            plan.report(**options)


def test_a_state_of_the_same_samples_in_another_order_is_refused():
    scheduler = make_scheduler("bucket", batch_size=8)
    state = scheduler.plan(SIZES).state_dict(3)
    with pytest.raises(
        DataError, match="cannot resume: the state was saved with other samples, or other sizes of them"
    ):
        scheduler.resume(SIZES.take(np.arange(500)[::-1]), state)
    del state["checksum"]  # of an earlier version
    assert len(scheduler.resume(SIZES, state)) == len(scheduler.plan(SIZES)) - 3


def test_an_iterator_refuses_the_state_of_another_plan():
    scheduler = in_blocks(make_scheduler("random", batch_size=8), 100)
    rest = scheduler.resume(SIZES, scheduler.plan(SIZES).state_dict(3), world_size=2)
    with pytest.raises(OptionError, match="another plan"):
        iter(rest).load_state_dict(scheduler.plan(SIZES, epoch=1).state_dict(2))


def test_an_uneven_plan_is_not_shared():
    plan = make_scheduler("random", batch_size=100).plan(SIZES)
    with pytest.raises(
        OptionError, match="5 batches cannot be shared evenly by 2 ranks; plan with world_size=2"
    ):
        plan.shard(0, 2)
    even = make_scheduler("random", batch_size=100, world_size=2).plan(SIZES)
    assert len(even.shard(0, 2)) == len(even.shard(1, 2)) == 3
    with pytest.raises(OptionError, match="already the share of rank 0"):
        even.shard(0, 2).shard(0, 2)
    with pytest.raises(OptionError, match=r"rank must lie in \[0, 2\), found 2"):
        even.shard(2, 2)


def test_more_ranks_than_samples_is_an_error_that_says_so():
    few = SIZES.take(range(3))
    with pytest.raises(OptionError, match="3 samples in 3 batches cannot be split into 8"):
        len(make_scheduler("random", batch_size=1, world_size=8).plan(few))


def test_more_ranks_than_batches_splits_batches():
    plan = make_scheduler("random", batch_size=500, world_size=8).plan(SIZES)
    assert len(plan) == 8
    assert {len(batch) for batch in plan} <= {62, 63}


def test_a_long_epoch_keeps_one_block_in_memory(monkeypatch):
    monkeypatch.setattr("mmlab.schedule.epoch._KEPT_SAMPLES", 100)
    plan = in_blocks(make_scheduler("random", batch_size=8), 100).plan(SIZES)
    assert sorted(row for batch in plan for row in batch) == list(range(500))
    assert len(plan.source._built) == 1


def test_a_plan_travels_to_another_process():
    plan = any_scheduler("budget", SIZES).plan(SIZES)
    assert list(pickle.loads(pickle.dumps(plan))) == list(plan)


def test_negative_steps_are_refused():
    with pytest.raises(OptionError, match="num_steps must not be negative, found -1"):
        make_scheduler("random").plan(SIZES).skip(-1)


def test_the_articles_call_plans_by_size_and_decodes_nothing():
    class Dataset:
        sizes = SIZES

    scheduler = mmlab.BatchScheduler(batch_size=8)
    assert scheduler == make_scheduler("sorted", batch_size=8)
    plan = scheduler.optimize_batch(Dataset())
    keys = [(SIZES.height[row], SIZES.width[row], SIZES.num_tokens[row]) for batch in plan for row in batch]
    assert keys == sorted(keys)


def test_a_plan_shows_itself():
    plan = any_scheduler("budget", SIZES).plan(SIZES)
    assert repr(plan) == f"BatchPlan({len(plan)} batches of 500 samples)"
    assert "combined waste" in plan._repr_html_()
    assert "randomness" in str(plan.report())
    assert json.loads(json.dumps(plan.report().as_dict()))["num_batches"] == len(plan)


def test_sizes_that_are_negative_are_refused_with_their_row():
    with pytest.raises(ValueError, match=r"num_tokens must be whole numbers below .*, found -2 in row 1"):
        SampleSizes(num_tokens=[3, -2], height=[1, 1], width=[1, 1], group=[0, 1])
    for wrong in (float("nan"), 1.5, 2**62):
        with pytest.raises(ValueError, match="height must be whole numbers"):
            SampleSizes(num_tokens=[3, 2], height=[1, wrong], width=[1, 1], group=[0, 1])


@pytest.mark.parametrize("name", ["budget", "packed"])
def test_the_report_of_one_ranks_share_takes_no_batches_of_it_for_one_step(name):
    plan = make_scheduler(name, world_size=2, budget=4000).plan(make_sizes(600))
    share, whole = plan.shard(0, 2).report(), plan.report()
    assert share.straggler == 0
    assert share.text_waste == pytest.approx(whole.text_waste, abs=0.02)
