"""Simulated steps: exact where the answer is known, and ordered as physics orders them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmlab.errors import OptionError
from mmlab.parallel.bench import BenchOptions
from mmlab.parallel.bench_report import DEVICES, ParallelBench
from mmlab.parallel.predict import PARTS, STRATEGIES, Line, Network, StepCosts, exchange_s, predict, ring
from mmlab.parallel.probe import probe_costs
from tests.batches import make_batch
from tests.parallel.ranks_branch import DEEP, SIZES, build, trainer_of

WORK = StepCosts(
    forward={"image": Line(0.01, 0.02), "text": Line(0.005, 0.01), "fusion": Line(0.0, 0.002)},
    backward={"image": Line(0.01, 0.04), "text": Line(0.005, 0.02), "fusion": Line(0.0, 0.004)},
    gradient_bytes={"image": 40e6, "text": 100e6, "fusion": 10e6},
    optimizer_s=0.03,
    other_s=0.004,
    image_output_bytes=300e3,
    image_layer_bytes=0.0,
)
ALL_BYTES = 150e6


def links(latency_s: float, bytes_per_s: float) -> Network:
    collectives = ("all_reduce", "all_gather", "reduce_scatter", "send")
    return dict.fromkeys(collectives, Line(latency_s, 1 / bytes_per_s))


FREE = links(0.0, 1e18)


def step_s(
    strategy: str, network: Network, num_devices: int = 2, work: StepCosts = WORK, **options: object
) -> float:
    found = predict(strategy, work, network, num_devices=num_devices, batch_size=8, **options)  # type: ignore[arg-type]
    return found.step_s


def test_lines_and_links_come_back_from_their_own_points() -> None:
    line = Line.fit([(1, size, Line(0.02, 0.005)(size)) for size in (4, 8, 16)])
    assert (line.fixed_s, line.each_s) == pytest.approx((0.02, 0.005))
    link = Line.fit([(6, size, 6 * 5e-5 + size / 2e9) for size in (1e3, 1e5, 1e7)])
    assert (link.fixed_s, link.each_s) == pytest.approx((5e-5, 1 / 2e9))


def test_no_part_of_a_line_is_negative_whatever_the_noise() -> None:
    falling = Line.fit([(1, 1, 3.0), (1, 2, 2.0), (1, 4, 1.0)])
    assert falling.each_s == 0
    assert falling.fixed_s > 0
    steep = Line.fit([(1, 1, 0.5), (1, 2, 2.0), (1, 4, 8.0)])
    assert steep.fixed_s == 0


@pytest.mark.parametrize("strategy", ["reduce", "ddp"])
def test_free_links_leave_the_step_of_one_device(strategy: str) -> None:
    assert step_s(strategy, FREE, 64) == pytest.approx(WORK.step_s(8))


def test_free_links_leave_shards_less_to_update() -> None:
    saved = WORK.optimizer_s * (1 - 1 / 8)
    assert step_s("fsdp", FREE, 8) == pytest.approx(WORK.step_s(8) - saved)


def test_free_links_leave_branches_the_longer_of_the_two() -> None:
    size = 16  # of both devices together
    computing = WORK.part_s("image", size) + WORK.part_s("fusion", size)
    update = WORK.optimizer_s * WORK.gradient_bytes["image"] / ALL_BYTES
    assert step_s("branch", FREE) == pytest.approx(computing + update + WORK.other_s)


def branches(image_s: float, text_s: float, layers: int = 0) -> StepCosts:
    """Seconds forward and again backward of a micro-batch of one sample; fusion and losses take one each."""
    lines = {"image": Line(0.0, image_s), "text": Line(0.0, text_s), "fusion": Line(0.0, 1.0)}
    return StepCosts(
        forward=lines,
        backward=lines,
        gradient_bytes={"image": 2.0**31, "text": 0.0, "fusion": 0.0},
        optimizer_s=0.0,
        other_s=0.0,
        image_output_bytes=2.0**30,
        image_layer_bytes=2.0**30,
        num_image_layers=layers,
    )


def branch_s(
    costs: StepCosts, num_micro_batches: int, network: Network = FREE, num_devices: int = 2, ahead: int = 1
):
    samples = num_micro_batches / num_devices
    options = {"num_micro_batches": num_micro_batches, "ahead": ahead}
    return predict("branch", costs, network, num_devices=num_devices, batch_size=samples, **options)


def test_an_image_rank_that_is_ahead_never_waits_for_the_fusion() -> None:
    heavy = branches(3.0, 1.0)
    assert branch_s(heavy, 1).step_s == pytest.approx(8.0)
    assert branch_s(heavy, 2).step_s == pytest.approx(12.0)  # image 0, image 1, back 0, back 1 without a gap
    assert branch_s(heavy, 2, ahead=0).step_s == pytest.approx(16.0)


def test_features_and_their_gradients_take_time_to_cross() -> None:
    found = branch_s(branches(3.0, 1.0), 1, links(0.25, 2 * 2**30))
    assert found.step_s == pytest.approx(8.0 + 2 * 0.75)
    assert found.sent_bytes == 2**30


def test_layers_move_to_where_they_balance_the_devices() -> None:
    costs = branches(8.0, 1.0, layers=4)
    found, whole = branch_s(costs, 8, ahead=3), branch_s(branches(8.0, 1.0), 8, ahead=3)
    assert found.image_layers == 3  # 12 against 4 + 4: nearer than 8 against 12
    assert 8 * 20 / 2 <= found.step_s < whole.step_s
    assert whole.image_layers is None


def test_pairs_of_branches_add_their_gradients() -> None:
    slow = links(0.0, 2**30)
    crossing_s, summed_s = 2 * 1.0, 2.0  # a ring over two: half of 2 GiB twice
    found = predict("branch", branches(3.0, 1.0), slow, num_devices=4, batch_size=0.5)
    assert found.step_s == pytest.approx(8.0 + crossing_s + summed_s)
    with pytest.raises(OptionError, match="branch takes pairs of devices: num_devices must be even, found 3"):
        branch_s(branches(3.0, 1.0), 1, num_devices=3)


def test_what_a_step_costs_is_measured_part_by_part() -> None:
    trainer = trainer_of(build(**DEEP))
    batches = [make_batch(SIZES[:4], seed=1), make_batch(SIZES, seed=2)]
    costs = probe_costs(trainer, batches)
    assert costs.num_image_layers == 3
    assert costs.forward.keys() == costs.backward.keys() == set(PARTS)
    assert costs.step_s(4) > 0
    learning = [weight for weight in trainer.model.parameters() if weight.requires_grad]
    assert sum(costs.gradient_bytes.values()) == sum(weight.nbytes for weight in learning)
    alone = probe_costs(trainer_of(build(), ["contrastive"]), batches)
    assert alone.image_output_bytes == 16 * 4  # embeddings alone are sent for a contrastive loss
    assert costs.image_output_bytes > alone.image_output_bytes
    assert probe_costs(trainer_of(build(image="resnet18")), batches).num_image_layers == 0


def test_nothing_hides_without_overlap_and_only_the_last_bucket_shows_with_it() -> None:
    network = links(0.0, 5e9)
    whole_s = exchange_s(network, "all_reduce", ALL_BYTES)
    assert step_s("ddp", network, hides=False) == pytest.approx(WORK.step_s(8) + whole_s)
    hidden = step_s("ddp", network, hides=True)
    last_s = exchange_s(network, "all_reduce", 25 * 2**20)
    assert WORK.step_s(8) < hidden <= WORK.step_s(8) + last_s + 1e-9


def test_shards_send_half_as_much_again_as_whole_gradients() -> None:
    sent = {
        name: predict(name, WORK, FREE, num_devices=4, batch_size=8).sent_bytes
        for name in ("reduce", "ddp", "fsdp")
    }
    assert sent["reduce"] == sent["ddp"] == pytest.approx(1.5 * ALL_BYTES)
    assert sent["fsdp"] == pytest.approx(1.5 * sent["ddp"])


@given(
    strategy=st.sampled_from(STRATEGIES),
    num_devices=st.sampled_from(DEVICES),
    slow=st.floats(1e6, 1e11),
    factor=st.floats(1.0, 1e3),
    hides=st.booleans(),
)
def test_faster_links_never_hurt_and_no_link_beats_the_computation(
    strategy: str, num_devices: int, slow: float, factor: float, hides: bool
) -> None:
    times = [
        step_s(strategy, links(1e-4, bandwidth), num_devices, hides=hides)
        for bandwidth in (slow, slow * factor)
    ]
    assert times[1] <= times[0] * (1 + 1e-9)
    assert times[1] >= step_s(strategy, FREE, num_devices) * (1 - 1e-9)


@given(bandwidth=st.floats(1e6, 1e12), num_devices=st.sampled_from(DEVICES[1:]))
def test_reducing_behind_the_backward_pass_is_never_later_with_free_starts(
    bandwidth: float, num_devices: int
) -> None:
    network = links(0.0, bandwidth)
    assert step_s("ddp", network, num_devices) <= step_s("reduce", network, num_devices) * (1 + 1e-9)


def test_no_strategy_beats_linear_but_by_sharing_the_update() -> None:
    work = replace(WORK, optimizer_s=0.0)
    alone = predict("single", work, FREE, num_devices=1, batch_size=8).samples_per_s
    for strategy in STRATEGIES:
        assert predict(strategy, work, FREE, num_devices=1, batch_size=8).samples_per_s == pytest.approx(
            alone
        )
        # a pair of branches takes both devices' samples at once, and so half as many fixed costs
        for count in DEVICES if strategy != "branch" else ():
            found = predict(strategy, work, FREE, num_devices=count, batch_size=8)
            assert found.samples_per_s <= found.num_devices * alone * (1 + 1e-9)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(OptionError, match="pipeline"):
        predict("pipeline", WORK, FREE, num_devices=2, batch_size=8)
    with pytest.raises(OptionError, match="num_devices must be at least 1, found 0"):
        predict("ddp", WORK, FREE, num_devices=0, batch_size=8)
    with pytest.raises(OptionError, match="micro_batches must be at least 1, found 0"):
        predict("ddp", WORK, FREE, num_devices=2, batch_size=8, num_micro_batches=0)
    with pytest.raises(OptionError, match="batch_size must be above 0, found -5"):
        predict("ddp", WORK, FREE, num_devices=2, batch_size=-5)


def test_a_ring_of_one_sends_nothing() -> None:
    assert ring("all_reduce", 1e6, 1) == (0, 0)
    assert exchange_s(links(1e-3, 1e9), "all_gather", 1e6, 1) == 0


def test_the_bound_of_whole_branches_is_not_taken_for_that_of_a_cut_one() -> None:
    bench = ParallelBench(
        options=BenchOptions(),
        device="cpu",
        num_cores=2,
        costs=WORK,
        network={},
        image_layers=1,
        turns={"branch": []},
    )
    row = {"strategy": "branch", "samples_per_s": 9.0, "devices": 1, "sent_bytes": 0}
    vars(bench)["rows"] = [row]
    assert bench.sentence.endswith(" at most; cut after image layer 1, as here, they may give more.")
    whole = replace(bench, image_layers=None)
    vars(whole)["rows"] = [row]
    assert whole.sentence.endswith(" at most.")
