"""What every scheduler promises, for every input that hypothesis can think of."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmlab.schedule.cost import batch_costs
from mmlab.schedule.metrics import collision_ratio
from mmlab.schedule.schedulers import SCHEDULERS
from tests.schedule.planning import NAMES, any_scheduler, any_sizes, assume_even, in_blocks, rows_of

pytestmark = pytest.mark.filterwarnings("ignore:.*exceed a stream's room")
COLLISION_FREE = [name for name in NAMES if "allow_collisions" in SCHEDULERS[name].__dataclass_fields__]
quick = settings(max_examples=15, deadline=None)


@pytest.mark.parametrize("name", NAMES)
@quick
@given(data=st.data())
def test_every_sample_comes_exactly_once_and_no_batch_is_empty(name, data):
    sizes = data.draw(any_sizes())
    world_size = data.draw(st.integers(1, max(1, min(9, len(sizes)))))
    plan = any_scheduler(name, sizes, world_size=world_size, seed=data.draw(st.integers(0, 3))).plan(sizes)
    assume_even(plan)
    batches = list(plan)
    assert sorted(rows_of(batches)) == list(range(len(sizes)))
    assert all(batches)
    assert len(plan) == len(batches) == len(plan.shapes)
    assert len(plan) % world_size == 0
    assert len(plan.dropped) == 0


@pytest.mark.parametrize("name", ["budget", "memory", "fastest"])
@quick
@given(data=st.data())
def test_no_batch_costs_more_than_its_budget(name, data):
    sizes = data.draw(any_sizes(min_samples=3))
    scheduler = any_scheduler(
        name, sizes, allow_collisions=data.draw(st.booleans()), world_size=data.draw(st.integers(1, 3))
    )
    plan = scheduler.plan(sizes, epoch=data.draw(st.integers(0, 9)))
    assume_even(plan)
    assert batch_costs(scheduler.cost, plan.shape_columns).max() <= plan.limits.budget
    assert plan.report().num_over_budget == 0


@quick
@given(data=st.data())
def test_no_pack_exceeds_a_room_unless_it_is_one_oversize_sample(data):
    sizes = data.draw(any_sizes(min_samples=3))
    scheduler = any_scheduler("packed", sizes, world_size=data.draw(st.integers(1, 3)))
    plan = scheduler.plan(sizes)
    assume_even(plan)
    patches = -(-sizes.height // 16) * -(-sizes.width // 16)
    for batch in plan:
        sums = sizes.num_tokens[batch].sum(), patches[batch].sum()
        fits = all(held <= room for held, room in zip(sums, plan.limits.streams, strict=True))
        assert fits or len(batch) == 1


@pytest.mark.parametrize("name", COLLISION_FREE)
@quick
@given(data=st.data())
def test_no_batch_holds_two_samples_of_one_image(name, data):
    sizes = data.draw(any_sizes())
    world_size = data.draw(st.integers(1, max(1, min(4, len(sizes)))))
    plan = any_scheduler(name, sizes, allow_collisions=False, world_size=world_size).plan(sizes)
    assume_even(plan)
    for batch in plan:
        images = [image for image in sizes.group[batch] if image >= 0]
        assert len(images) == len(set(images))
    assert collision_ratio(plan.columns, sizes.group) == 0


@pytest.mark.parametrize("name", NAMES)
@quick
@given(sizes=any_sizes(), epoch=st.integers(0, 3))
def test_a_plan_follows_from_seed_and_epoch_alone(name, sizes, epoch):
    scheduler = any_scheduler(name, sizes, seed=5)
    assert list(scheduler.plan(sizes, epoch=epoch)) == list(scheduler.plan(sizes, epoch=epoch))


@pytest.mark.parametrize("name", NAMES)
@quick
@given(data=st.data())
def test_shards_together_are_the_plan_step_by_step(name, data):
    sizes = data.draw(any_sizes(min_samples=5))
    world_size = data.draw(st.integers(1, 5))
    plan = in_blocks(any_scheduler(name, sizes, world_size=world_size), 40).plan(sizes)
    assume_even(plan)
    shards = [list(plan.shard(rank, world_size)) for rank in range(world_size)]
    assert [batch for step in zip(*shards, strict=True) for batch in step] == list(plan)


@pytest.mark.parametrize("name", NAMES)
@quick
@given(data=st.data())
def test_skipping_is_replaying(name, data):
    sizes = data.draw(any_sizes(min_samples=2))
    plan = in_blocks(any_scheduler(name, sizes, world_size=2), 40).plan(sizes)
    assume_even(plan)
    rank = data.draw(st.sampled_from([None, 0, 1]))
    mine = plan if rank is None else plan.shard(rank, 2)
    num_steps = data.draw(st.integers(0, len(mine) + 1))
    assert list(mine.skip(num_steps)) == list(mine)[num_steps:]
    assert list(mine.skip(1).skip(num_steps)) == list(mine)[num_steps + 1 :]


@pytest.mark.parametrize("name", NAMES)
@quick
@given(data=st.data())
def test_resuming_with_other_numbers_of_ranks_loses_and_repeats_nothing(name, data):
    sizes = data.draw(any_sizes(min_samples=30))
    scheduler = in_blocks(any_scheduler(name, sizes, seed=3), 40)
    world_size = data.draw(st.integers(1, 4))
    plan = scheduler.resume(sizes, scheduler.plan(sizes, epoch=2).state_dict(0), world_size=world_size)
    seen = []
    for _ in range(data.draw(st.integers(1, 4))):
        assume_even(plan)
        num_steps = data.draw(st.integers(0, len(plan) // world_size))
        shards = [list(plan.shard(rank, world_size))[:num_steps] for rank in range(world_size)]
        seen += [row for shard in shards for row in rows_of(shard)]
        states = [plan.shard(rank, world_size).state_dict(num_steps) for rank in range(world_size)]
        assert all(state == states[0] for state in states)
        num_left = len(sizes) - len(seen)
        if num_left < 4:
            break
        world_size = data.draw(st.integers(1, 4))
        plan = scheduler.resume(sizes, states[0], world_size=world_size)
        assume_even(plan)
        assert sorted(seen + rows_of(plan)) == list(range(len(sizes)))


@pytest.mark.parametrize("name", NAMES)
@quick
@given(data=st.data())
def test_an_iterator_resumes_from_its_state(name, data):
    sizes = data.draw(any_sizes(min_samples=10))
    plan = in_blocks(any_scheduler(name, sizes), 40).plan(sizes)
    num_steps = data.draw(st.integers(0, len(plan)))
    iterator = iter(plan)
    for _ in range(num_steps):
        next(iterator)
    state = iterator.state_dict()
    assert state == plan.state_dict(num_steps)
    again = iter(plan)
    again.load_state_dict(state)
    assert list(again) == list(plan)[num_steps:]


@pytest.mark.parametrize("name", NAMES)
def test_nothing_to_plan_is_an_empty_plan(name):
    from mmlab.types import SampleSizes

    nothing = SampleSizes(num_tokens=[], height=[], width=[], group=[])
    plan = any_scheduler(name, nothing, world_size=4).plan(nothing)
    assert list(plan) == []
    assert len(plan) == 0
    report = plan.report()
    assert report.coverage == 1.0
    assert report.combined_waste == 0.0
    assert "0" in plan._repr_html_()


@pytest.mark.parametrize("name", sorted(set(NAMES) - {"sorted"}))
def test_the_next_epoch_has_other_batches(name):
    from tests.schedule.planning import make_sizes

    sizes = make_sizes(400)
    scheduler = any_scheduler(name, sizes)
    first, second = (list(scheduler.plan(sizes, epoch=epoch)) for epoch in (0, 1))
    assert {frozenset(batch) for batch in first} != {frozenset(batch) for batch in second}
