"""Whatever is decided on the way, each sample comes once; and the decisions keep a run inside its memory."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from mmlab.data.dataset import MultimodalDataset
from mmlab.data.records import Records
from mmlab.errors import DataError, OptionError
from mmlab.loading.loader import PlannedLoader
from mmlab.model.presets import build_model
from mmlab.pricing.closed_form import fit_rows
from mmlab.pricing.memory_policies import MARGIN_STEP, MAX_CHANGE, PATIENCE, TOLERANCE
from mmlab.pricing.resource_aware import ResourceAwareScheduler
from mmlab.pricing.virtual_device import VirtualDevice
from mmlab.runs.event_keys import EVENT_KEYS
from mmlab.runs.events import RunEvent
from mmlab.schedule.base import Scheduler
from mmlab.schedule.cost import MaxPolynomial
from mmlab.schedule.live import LivePlan
from mmlab.schedule.schedulers import make_scheduler
from mmlab.training.loop import FusionTrainer
from mmlab.types import Aspect, Batch, SampleSizes
from tests.batches import make_batch
from tests.configs import TINY_MODEL
from tests.pricing import ranks_following
from tests.ranks import run_ranks

TINY = {"image_dim": 32, "image_depth": 1, "text_dim": 32, "text_depth": 1, "hidden_dim": 32, "embed_dim": 16}
MB = 10**6
LINEAR = MaxPolynomial([[1 * MB, 1000.0, 1000.0]], [(0, 0, 0), (1, 1, 0), (1, 0, 1)], unit="bytes")


def make_sizes(num_samples: int, seed: int = 0) -> SampleSizes:
    rng = np.random.default_rng(seed)
    return SampleSizes(
        num_tokens=rng.integers(4, 40, num_samples),
        height=16 * rng.integers(1, 6, num_samples),
        width=16 * rng.integers(1, 6, num_samples),
        group=np.arange(num_samples) // 2,
    )


def memory_planner(limit_bytes: float = 3 * MB, **options) -> Scheduler:
    return make_scheduler("memory", cost=LINEAR, budget=limit_bytes, **options)


def aware(planner: Scheduler, events: list[RunEvent] | None = None, **options) -> ResourceAwareScheduler:
    emit = None if events is None else events.append
    return ResourceAwareScheduler(planner=planner, emit=emit, **options)


def step(*, predicted: float = 0, peak: float = 0, failed: int = 0, num_samples: int = 8) -> dict:
    """The values of a step that a policy reads."""
    return {
        "num_samples": num_samples,
        "num_batches": 1,
        "predicted_bytes": predicted,
        "peak_bytes": peak,
        "memory_source": "live tensors",
        "num_out_of_memory": failed,
    }


# what is left of an epoch, planned again


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    num_samples=st.integers(0, 120),
    name=st.sampled_from(["memory", "random", "bucket", "sorted"]),
    world_size=st.sampled_from([1, 1, 2]),
    decisions=st.lists(st.tuples(st.integers(0, 9), st.sampled_from([1, 2, 3, 7, 16])), max_size=6),
)
def test_no_decision_repeats_or_loses_a_sample(seed, num_samples, name, world_size, decisions):
    sizes = make_sizes(num_samples, seed)

    def plan_rest(rest: SampleSizes, value: float):
        if name == "memory":
            largest = LINEAR.at(1, 40, 25)
            scheduler = memory_planner(largest * (1 + value / 4), target_ratio=1.0, world_size=world_size)
        else:
            scheduler = make_scheduler(name, batch_size=int(value), seed=seed, world_size=world_size)
        return scheduler.plan(rest, epoch=1)

    try:
        live = LivePlan(plan_rest, sizes, [(0, 4)])
        whole = list(LivePlan(plan_rest, sizes, [(0, 4)]))
    except OptionError:  # few samples on two ranks: refused as every plan is
        return
    shards = [live.shard(rank, world_size) for rank in range(world_size)]
    readers = [iter(shard) for shard in shards]
    handed: list[list[list[int]]] = [[] for _ in readers]
    assert sorted(row for batch in whole for row in batch) == list(range(num_samples))
    for num_steps, value in decisions:
        for reader, batches in zip(readers, handed, strict=True):
            batches += [batch for _, batch in zip(range(num_steps), reader, strict=False)]
        before = live.history
        try:
            num_replanned = live.replan(value)
        except OptionError:
            assert live.history == before
            continue
        assert num_replanned == num_samples - sum(len(batch) for each in handed for batch in each)
    again = LivePlan(plan_rest, sizes, json.loads(json.dumps(live.history)))
    for reader, batches in zip(readers, handed, strict=True):
        batches += reader
    assert sorted(row for each in handed for batch in each for row in batch) == list(range(num_samples))
    assert {len(each) for each in handed} == {len(shard) for shard in shards}
    assert [list(shard) for shard in shards] == handed  # read again, the same
    assert [list(again.shard(rank, world_size)) for rank in range(world_size)] == handed
    assert [list(again.shard(rank, world_size).skip(2)) for rank in range(world_size)] == [
        each[2:] for each in handed
    ]
    assert list(again) == [batch for batches in zip(*handed, strict=True) for batch in batches]


def test_batches_already_handed_out_are_untouched():
    sizes = make_sizes(200)
    scheduler = aware(make_scheduler("random", batch_size=8), policy="halving", max_memory_gb=1)
    before = list(scheduler.plan(sizes))
    reader = iter(scheduler.plan(sizes))
    ahead = [next(reader) for _ in range(5)]
    scheduler.observe(step(failed=1))
    rest = list(reader)
    assert ahead == before[:5]
    assert {len(batch) for batch in rest} == {4}
    assert len(scheduler.plan(sizes)) == 5 + len(rest)


def test_what_a_torch_loader_prefetches_stays_planned_and_the_epoch_is_whole():
    sizes = make_sizes(150)
    scheduler = aware(memory_planner())
    for epoch in range(2):
        plan = scheduler.plan(sizes, epoch=epoch)
        loader = DataLoader(
            list(range(150)), batch_sampler=plan, collate_fn=list, num_workers=2, prefetch_factor=2
        )
        seen = []
        for number, batch in enumerate(loader):
            seen += batch
            scheduler.observe(step(predicted=2.9 * MB, peak=(2.95 + 0.1 * number) * MB))
        assert sorted(seen) == list(range(150))
        assert len(scheduler.plan(sizes, epoch=epoch).history) > 1 - epoch


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_planned_loader_goes_on_after_decisions_where_it_stood(records: Records, num_workers: int):
    dataset = MultimodalDataset(records, image_policy=Aspect(64 * 64, 16))

    def make_loader() -> PlannedLoader:
        scheduler = aware(make_scheduler("random", batch_size=8), policy="halving", max_memory_gb=1)
        return PlannedLoader(dataset, scheduler, num_workers=num_workers, prefetch=2)

    loader = make_loader()
    loader.set_epoch(1)
    seen, state = [], None
    for number, batch in enumerate(loader):
        seen.append(batch.record_ids)
        loader.observe(step(failed=int(number in (1, 4)), num_samples=len(batch)))
        if number == 5:
            state = json.loads(json.dumps(loader.state_dict()))
    assert sorted(record_id for batch in seen for record_id in batch) == sorted(dataset.records.ids)
    num_handed = 2 + (2 if num_workers else 0)  # before the first decision
    assert [len(batch) for batch in seen[: num_handed + 1]] == [8] * num_handed + [4]
    assert len(seen[-2]) == 2
    again = make_loader()
    again.load_state_dict(state)
    assert [batch.record_ids for batch in again] == seen[6:]


# the predictive policy


def test_a_good_model_is_left_alone():
    events: list[RunEvent] = []
    scheduler = aware(memory_planner(), events)
    scheduler.plan(make_sizes(100))
    for peak in np.random.default_rng(0).uniform(0.9, 1 + 0.9 * TOLERANCE, 500):
        scheduler.observe(step(predicted=2.5 * MB, peak=2.5 * MB * peak))
    assert not events
    assert scheduler.value == 0.97 * 3 * MB


def test_a_peak_above_the_prediction_counts_at_once_and_is_forgotten_slowly():
    events: list[RunEvent] = []
    scheduler = aware(memory_planner(), events)
    scheduler.plan(make_sizes(100))
    scheduler.observe(step(predicted=2.5 * MB, peak=2.75 * MB))
    lowered = 0.97 * 3 * MB / 1.1
    assert scheduler.value == pytest.approx(lowered)
    assert events[0].values["correction_factor"] == pytest.approx(1.1)
    for _ in range(PATIENCE):
        scheduler.observe(step(predicted=2.5 * MB, peak=2.5 * MB))
    assert scheduler.value == pytest.approx(lowered)
    for _ in range(3000):
        scheduler.observe(step(predicted=2.5 * MB, peak=2.5 * MB))
    assert 0.98 < scheduler.value / (0.97 * 3 * MB) <= 1
    actions = [event.values["action"] for event in events]
    assert actions == ["lower"] + ["raise"] * (len(events) - 1)
    assert len(events) < 15  # of 3,021 steps


def test_a_small_batch_with_a_constant_error_does_not_count_as_a_factor():
    scheduler = aware(memory_planner())
    scheduler.plan(make_sizes(100))
    scheduler.observe(step(predicted=0.1 * MB, peak=0.2 * MB))  # twice what was predicted
    assert scheduler.value > 0.9 * 3 * MB


def test_resident_memory_is_not_taken_for_a_peak():
    scheduler = aware(memory_planner())
    scheduler.plan(make_sizes(100))
    scheduler.observe({**step(predicted=2.5 * MB, peak=900 * MB), "memory_source": "process RSS"})
    assert scheduler.value == 0.97 * 3 * MB


def test_the_prediction_is_worked_out_where_a_step_has_none():
    scheduler = aware(memory_planner())
    scheduler.plan(make_sizes(100))
    shape = {"num_samples": 16, "num_batches": 1, "num_tokens": 50, "height": 160, "width": 80}
    peak = {"peak_bytes": 2.6 * MB * 1.25, "memory_source": "torch allocator"}
    scheduler.observe({**shape, **peak})  # 1 MB + 16 * (50 + 50) kB
    assert scheduler.value == pytest.approx(0.97 * 3 * MB / 1.25)


def test_an_out_of_memory_lowers_the_budget_and_raises_the_margin_once():
    events: list[RunEvent] = []
    scheduler = aware(memory_planner(), events)
    scheduler.plan(make_sizes(100))
    scheduler.observe(step(predicted=2.9 * MB, peak=3 * MB, failed=1))
    after = scheduler.value
    assert (1 - MAX_CHANGE) * 0.97 * 3 * MB <= after < 0.85 * 3 * MB
    assert events[-1].values["margin_ratio"] == pytest.approx(0.03 + MARGIN_STEP)
    scheduler.observe(step(predicted=2.9 * MB, peak=3 * MB, failed=1))  # was already on its way
    assert scheduler.value == after
    assert [event.values["action"] for event in events] == ["lower", "hold"]
    assert "before the budget was lowered" in events[-1].values["reason"]


def test_no_budget_goes_below_the_costliest_sample():
    sizes = make_sizes(60)
    scheduler = aware(memory_planner(1.2 * MB, target_ratio=1.0))
    scheduler.plan(sizes)
    for _ in range(10):
        scheduler.observe(step(predicted=scheduler.value, peak=1.2 * MB, failed=1))
    dearest = max(LINEAR.at(1, sizes.num_tokens, (sizes.height // 16) * (sizes.width // 16)))
    assert scheduler.value == dearest
    assert sorted(row for batch in scheduler.plan(sizes) for row in batch) == list(range(60))


def test_a_decision_carries_keys_that_the_table_knows():
    for policy, planner in (("predictive", memory_planner()), ("halving", make_scheduler("random"))):
        events: list[RunEvent] = []
        scheduler = aware(planner, events, policy=policy, max_memory_gb=3 * MB / 2**30)
        scheduler.plan(make_sizes(100))
        scheduler.observe(step(predicted=2.8 * MB, peak=3 * MB, failed=1))
        assert events[0].kind == "decision"
        assert all("decision" in EVENT_KEYS[key].kinds.split() for key in events[0].values)
        assert events[0].values["num_replanned"] == 100
        assert events[0].values["limit_bytes"] == 3 * MB


# resuming, and several ranks


def replay(scheduler: ResourceAwareScheduler, steps: list[dict], reader: Iterator[list[int]]):
    """Hand out a batch, observe a step, and so on."""
    batches = []
    for values in steps:
        if (batch := next(reader, None)) is None:
            break
        batches.append(batch)
        scheduler.observe(values)
    return batches


@pytest.mark.parametrize("policy", ["predictive", "halving"])
def test_a_resumed_run_goes_on_exactly(policy):
    rng = np.random.default_rng(1)
    steps = [
        step(predicted=2.5 * MB, peak=2.5 * MB * factor, failed=int(factor > 1.35))
        for factor in rng.uniform(0.9, 1.4, 60)
    ]
    planner = memory_planner(seed=3) if policy == "predictive" else make_scheduler("random", batch_size=32)

    def make() -> ResourceAwareScheduler:
        scheduler = aware(planner, policy=policy, max_memory_gb=3 * MB / 2**30)
        scheduler.plan(make_sizes(400))
        return scheduler

    whole = make()
    expected = replay(whole, steps, iter(whole.plan(make_sizes(400), epoch=2)))
    for stop in (1, 4, 9):
        first = make()
        replay(first, steps[:stop], iter(first.plan(make_sizes(400), epoch=2)))
        second = make()
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        rest = second.plan(make_sizes(400), epoch=2).skip(stop)
        assert replay(second, steps[stop:], iter(rest)) == expected[stop:]
        assert second.value == whole.value
        assert second.state_dict() == whole.state_dict()


def test_a_state_of_something_else_is_refused():
    scheduler = aware(memory_planner())
    scheduler.plan(make_sizes(100))
    state = scheduler.state_dict()
    for other, sizes, name in (
        (aware(memory_planner()), make_sizes(90), "num_samples"),
        (aware(memory_planner(seed=1)), make_sizes(100), "planner"),
    ):
        other.plan(sizes)
        with pytest.raises(DataError, match=rf"^cannot resume: the state has another {name}; [^\n]{{,100}}$"):
            other.load_state_dict(state)


def test_ranks_decide_alike_whatever_each_has_seen_and_handed_out():
    sizes = make_sizes(600)
    barrier = threading.Barrier(2, timeout=20)
    said = [0.0, 0.0]
    handed: list[list[list[int]]] = [[], []]
    schedulers: list[ResourceAwareScheduler] = []
    events: list[list[RunEvent]] = [[], []]

    def run(rank: int) -> None:
        def agree(number: float) -> float:
            said[rank] = number
            barrier.wait()
            largest = max(said)
            barrier.wait()
            return largest

        scheduler = aware(memory_planner(world_size=2), events[rank], rank=rank, agree=agree)
        schedulers.append(scheduler)
        reader = iter(scheduler.plan(sizes))
        rng = np.random.default_rng(rank)
        for number in range(8):
            ahead = 1 + (3 * rank if number == 0 else 0)  # this rank prefetches more
            handed[rank] += [batch for _, batch in zip(range(ahead), reader, strict=False)]
            peak = 2.5 * MB * rng.uniform(0.9, 1.3)
            scheduler.observe(step(predicted=2.5 * MB, peak=peak, failed=int(number == 3 and rank == 1)))
        handed[rank] += reader

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(handed[0]) == len(handed[1])
    assert sorted(row for each in handed for batch in each for row in batch) == list(range(600))
    one, other = (
        [
            {key: event.values[key] for key in ("action", "old_value", "new_value", "num_replanned")}
            for event in each
            if event.values["action"] != "hold"
        ]
        for each in events
    )
    assert one == other
    assert len(one) > 1
    assert "another rank needs it" in {event.values["reason"] for each in events for event in each}


CONFIG = (
    """
name = "small"
[data]
path = "{scenes}"
image = "aspect:32"
"""
    + TINY_MODEL
    + """[scheduler]
name = "memory"
memory_gb = 1.02
[trainer]
num_epochs = 1
device = "cpu"
"""
)


def test_two_processes_follow_what_either_of_them_needs(tmp_path: Path, scenes: Path) -> None:
    config = tmp_path / "small.toml"
    config.write_text(CONFIG.format(scenes=scenes))
    run_ranks(ranks_following.main, 2, scenes, config, tmp_path)


# the article's rule, and what is refused


def test_the_article_s_rule_halves_and_doubles_by_the_peaks_of_an_epoch():
    scheduler = aware(make_scheduler("random", batch_size=40), policy="halving", max_memory_gb=1)
    sizes = make_sizes(100)
    scheduler.plan(sizes)
    for epoch, (share, expected) in enumerate([(0.5, 40), (0.81, 20), (0.29, 40), (0.1, 64), (0.2, 64)], 1):
        scheduler.observe(step(peak=0.01 * 2**30))
        scheduler.observe(step(peak=share * 2**30))
        plan = scheduler.plan(sizes, epoch=epoch)
        assert scheduler.value == expected
        assert max(map(len, plan)) == expected
    scheduler.observe(step(peak=2**30))
    assert [scheduler.adjust_batch_size(size) for size in (1, 2, 33)] == [1, 1, 16]
    scheduler.observe({"num_out_of_memory": 1, "predicted_bytes": 9})
    assert scheduler.value == 32


def test_the_article_s_own_call_reads_the_system():
    assert ResourceAwareScheduler(max_memory_gb=16).adjust_batch_size(8) in (4, 8, 16)
    assert ResourceAwareScheduler(max_memory_gb=1e-3).adjust_batch_size(8) == 4
    assert ResourceAwareScheduler(max_memory_gb=1e6).adjust_batch_size(48) == 64


def test_what_cannot_work_is_refused():
    with pytest.raises(OptionError, match=r"needs a planner with a cost model in bytes, found Random;"):
        aware(make_scheduler("random"), max_memory_gb=1)
    with pytest.raises(OptionError, match=r"found Budget with a cost in padded tokens"):
        aware(make_scheduler("budget"), max_memory_gb=1)
    with pytest.raises(OptionError, match=r"needs a planner with a batch_size, found Memory"):
        aware(memory_planner(), policy="halving")
    assert ResourceAwareScheduler().limit_bytes == 16 * 2**30  # the article's
    for limit in (0, float("nan")):
        with pytest.raises(OptionError, match="max_memory_gb must be above 0"):
            ResourceAwareScheduler(limit)
    with pytest.raises(OptionError, match="2 ranks would decide independently"):
        aware(memory_planner(world_size=2))
    with pytest.raises(OptionError, match="unknown policy 'halve'; did you mean 'halving'"):
        aware(memory_planner(), policy="halve")
    with pytest.raises(OptionError, match="no planner"):
        ResourceAwareScheduler(16).plan(make_sizes(3))
    with pytest.raises(OptionError, match=r"call plan\(sizes\) first"):
        aware(memory_planner()).state_dict()


# the loop closed: a real model, real batches, a device with little memory


class Reader:
    """A loader that makes its batches up."""

    def __init__(self, scheduler: ResourceAwareScheduler, sizes: SampleSizes) -> None:
        self.scheduler, self.sizes, self.observe = scheduler, sizes, scheduler.observe
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        self.plan = self.scheduler.plan(self.sizes, epoch=epoch)

    def __len__(self) -> int:
        return len(self.plan)

    def __iter__(self) -> Iterator[Batch]:
        return (batch_of(self.sizes, rows) for rows in self.plan)


def batch_of(sizes: SampleSizes, rows: list[int]) -> Batch:
    some = sizes.take(rows)
    columns = (some.num_tokens.tolist(), some.height.tolist(), some.width.tolist())
    return make_batch(list(zip(*columns, strict=True)))


def make_trainer(live: VirtualDevice, memory: MaxPolynomial | None = None) -> FusionTrainer:
    torch.manual_seed(0)
    model = build_model("tiny", vocab_size=50, **TINY)
    options = {"device": "cpu", "total_steps": 1000}
    return FusionTrainer(model, live=live, memory=memory, **options)


class Recorder(VirtualDevice):
    """Keeps the live bytes after every operation."""

    def __init__(self) -> None:
        super().__init__()
        self.trace: list[int] = []

    def __torch_dispatch__(self, *arguments, **options):
        out = super().__torch_dispatch__(*arguments, **options)
        self.trace.append(self.current_bytes)
        return out


@cache
def measured_memory() -> MaxPolynomial:
    """A memory model fitted to real steps with small batches."""
    device, rng = Recorder(), np.random.default_rng(0)
    trainer = make_trainer(device)
    trainer.train_step([make_batch([(4, 32, 32)] * 2)])  # the optimizer's state is made
    traces = {}
    for _ in range(20):
        batch_size, text, rows, columns = rng.integers((2, 4, 1, 1), (13, 40, 6, 6)).tolist()
        device.trace = []
        batch = make_batch([(text, 16 * rows, 16 * columns)] * (batch_size - 1) + [(3, 16, 16)])
        trainer.train_step([batch])
        traces[batch.shape] = device.trace
    usual = Counter(map(len, traces.values())).most_common(1)[0][
        0
    ]  # operations; some sizes take another path
    kept = {shape: trace for shape, trace in traces.items() if len(trace) == usual}
    return fit_rows(np.array(list(kept)), np.array(list(kept.values())), largest=(64, 40, 25))


ONE_EACH = MaxPolynomial([[1.0]], [(0, 0, 0)], unit="seconds")  # the fewest batches are the fastest


def full_planner(limit_bytes: float, scale: float = 1.0) -> Scheduler:
    """Plans full batches by the measured model times `scale`."""
    memory = replace(measured_memory(), coefficients=scale * measured_memory().coefficients)
    options = {"allow_collisions": True, "time": ONE_EACH}
    return make_scheduler("memory", cost=memory, budget=limit_bytes, **options)


def train(scheduler: ResourceAwareScheduler, limit_bytes: float, num_epochs: int = 1):
    """Steps' values; the share of the limit that each step used."""
    sizes = replace(make_sizes(400), width=make_sizes(400).height)
    memory = getattr(scheduler.planner, "cost", None)
    trainer = make_trainer(VirtualDevice(limit_bytes=int(limit_bytes)), memory)
    steps = trainer.fit(Reader(scheduler, sizes), num_epochs=num_epochs)
    assert sum(values["num_samples"] for values in steps) == num_epochs * len(sizes)
    return steps, np.array([values["peak_bytes"] / limit_bytes for values in steps])


def failures(steps: list[Mapping]) -> list[int]:
    return [number for number, values in enumerate(steps) if values["num_out_of_memory"]]


@cache
def good_run(limit_bytes: float) -> tuple[list[dict], np.ndarray]:
    events: list[RunEvent] = []
    steps, use = train(aware(full_planner(limit_bytes), events), limit_bytes)
    assert not events
    return steps, use


@pytest.mark.parametrize("limit_mb", [6, 12])
def test_a_good_model_fills_the_device_and_never_runs_out(limit_mb):
    steps, use = good_run(limit_mb * MB)
    assert not failures(steps)
    assert np.median(use) > 0.85


@pytest.mark.parametrize(("scale", "most_failures"), [(0.6, 2), (0.8, 1), (1 / 1.2, 1)])
def test_a_model_that_predicts_too_little_corrects_itself(scale, most_failures):
    limit_bytes = 12 * MB
    events: list[RunEvent] = []
    scheduler = aware(full_planner(limit_bytes, scale), events)
    steps, _ = train(scheduler, limit_bytes)
    assert len(failures(steps)) <= most_failures
    assert failures(steps) or scale > 0.6
    assert all(number < 3 for number in failures(steps))
    assert events[0].values["action"] == "lower"
    assert scheduler.state_dict()["policy_measured"] == pytest.approx(1 / scale, rel=0.02)
    margin = scheduler.state_dict()["policy_margin_ratio"]
    assert scheduler.value / scale == pytest.approx((1 - margin) * limit_bytes, rel=0.02)


def test_random_batches_and_halving_fail_or_waste():
    limit_bytes = 12 * MB
    events: list[RunEvent] = []
    random = make_scheduler("random", batch_size=32)
    scheduler = aware(random, events, policy="halving", max_memory_gb=limit_bytes / 2**30)
    steps, use = train(scheduler, limit_bytes)
    assert failures(steps)
    assert {event.values["reason"] for event in events} == {"ran out of memory"}
    assert use.mean() < good_run(limit_bytes)[1].mean() - 0.1
