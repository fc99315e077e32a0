"""The ratio follows the losses' trend, never fast, never far, never back and forth with the noise."""

from __future__ import annotations

import json
import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmlab.errors import DataError, OptionError
from mmlab.schedule.ratio import RatioController

NAMES = ("image-text", "text-only", "image-only")
histories = st.lists(
    st.tuples(*[st.floats(1e-6, 1e6)] * 3), min_size=1, max_size=30
)  # losses of three sources, epoch after epoch
options = st.fixed_dictionaries(
    {
        "gain": st.floats(0.1, 50),
        "smoothing": st.floats(0.05, 1),
        "hysteresis": st.floats(0.001, 0.2),
        "max_step": st.floats(0.01, 0.5),
        "floor": st.floats(0.01, 0.15),
    }
)


@given(histories, options)
def test_every_update_is_bounded_and_goes_towards_the_target(history, chosen) -> None:
    control = RatioController({"image-text": 3, "text-only": 1, "image-only": 1}, **chosen)
    for losses in history:
        before = control.ratios
        after = control.update(dict(zip(NAMES, losses, strict=True)))
        assert sum(after.values()) == pytest.approx(1)
        assert min(after.values()) >= chosen["floor"] - 1e-12
        assert max(abs(after[name] - before[name]) for name in NAMES) <= chosen["max_step"] + 1e-12
        for name in NAMES:  # between where it was and the target: never beyond it, never away from it
            low, high = sorted((before[name], control.target[name]))
            assert low - 1e-12 <= after[name] <= high + 1e-12
    assert [epoch for epoch, _ in control.points] == list(range(len(history) + 1))


@given(histories)
def test_a_ratio_turns_round_only_after_its_target_has_turned_by_twice_the_dead_zone(history) -> None:
    control = RatioController({"a": 1, "b": 1}, hysteresis=0.03, max_step=1.0, smoothing=1.0)
    moves = []  # (direction of the ratio, target at that time)
    for losses in history:
        before = control.ratios["a"]
        moved = control.update({"a": losses[0], "b": losses[1]})["a"] - before
        if abs(moved) > 1e-12:
            moves.append((moved > 0, control.target["a"]))
    for (was_up, before), (is_up, after) in pairwise(moves):
        if was_up != is_up:
            assert abs(after - before) >= 2 * 0.03 - 1e-9


@given(st.lists(st.tuples(st.floats(-1, 1), st.floats(-1, 1)), max_size=40), st.floats(0.5, 1.0))
def test_noise_within_the_dead_zone_moves_nothing(noise, fall) -> None:
    """Losses that fall alike, each up to 0.8 % off its course: the trends differ by at most 4 x smoothing x 0.8 %, a
    target share near one half by a quarter of that x gain."""
    control = RatioController({"a": 1, "b": 1}, gain=5, smoothing=0.3, hysteresis=0.02)
    for epoch, (left, right) in enumerate(noise):
        course = 4 * fall**epoch
        control.update({"a": course * math.exp(0.008 * left), "b": course * math.exp(0.008 * right)})
    assert all(shares == control.base for _, shares in control.points)


def test_units_of_the_losses_do_not_matter() -> None:
    ones, others = RatioController({"a": 1, "b": 2}), RatioController({"a": 1, "b": 2})
    for epoch in range(10):
        losses = {"a": 2 * 0.7**epoch, "b": 5 * 0.95**epoch}
        ones.update(losses)
        others.update({"a": losses["a"] / math.log(2), "b": 1000 * losses["b"]})
    assert ones.ratios == pytest.approx(others.ratios)


def test_the_source_that_learns_more_slowly_gains_until_all_have_settled() -> None:
    control = RatioController({"a": 1, "b": 1})
    for epoch in range(60):
        control.update({"a": 4 * 0.8 ** min(epoch, 20), "b": 2.0})
        if epoch == 20:
            assert control.ratios["b"] > 0.65
    assert control.ratios["b"] == pytest.approx(0.5, abs=control.hysteresis + 0.005)


def test_in_a_closed_loop_noise_does_not_make_it_swing() -> None:
    """Each loss falls with its own share; both are measured with 3 % noise. Without its brakes the ratio swings."""

    def run(**chosen: float) -> tuple[float, int]:
        rng = np.random.default_rng(0)
        control, losses = RatioController({"a": 1, "b": 1}, **chosen), {"a": 4.0, "b": 6.0}
        for _ in range(100):
            losses = {
                name: 1 + (loss - 1) * (1 - rate * control.ratios[name])
                for (name, loss), rate in zip(losses.items(), (0.2, 0.05), strict=True)
            }
            control.update({name: loss * math.exp(rng.normal(0, 0.03)) for name, loss in losses.items()})
        moves = np.diff([shares["a"] for _, shares in control.points])
        moves = moves[np.abs(moves) > 1e-12]
        return float(np.abs(moves).sum()), int((np.diff(np.sign(moves)) != 0).sum())

    path, turns = run()
    naive_path, naive_turns = run(smoothing=1.0, hysteresis=1e-9, max_step=1.0)
    assert path < naive_path / 8
    assert turns < naive_turns / 4


def test_it_resumes_from_json() -> None:
    whole, part = RatioController({"a": 1, "b": 1}), RatioController({"a": 1, "b": 1})
    losses = [{"a": 4 * 0.8**epoch, "b": 2.0} for epoch in range(8)]
    for epoch in range(8):
        whole.update(losses[epoch])
        part.update(losses[epoch])
        state = json.loads(json.dumps(part.state_dict()))
        part = RatioController({"a": 1, "b": 1})
        part.load_state_dict(state)
    assert part.points == whole.points


@pytest.mark.parametrize(
    ("base", "chosen", "message"),
    [
        ({"a": 1, "b": 0}, {}, "at least the floor"),
        ({}, {}, "at least the floor"),
        ({"a": 1, "b": 1}, {"floor": 0.6}, "at least the floor"),
        ({"a": 1, "b": 1}, {"smoothing": 0}, "smoothing must be above 0 and at most 1, found 0"),
        ({"a": 1, "b": 1}, {"max_step": 1.5}, "max_step must be above 0"),
        ({"a": 1, "b": 1}, {"gain": math.inf}, "gain"),
    ],
)
def test_impossible_options_are_named(base, chosen, message) -> None:
    with pytest.raises(OptionError, match=message):
        RatioController(base, **chosen)


@pytest.mark.parametrize(
    "losses", [{"a": 1.0}, {"a": 1.0, "b": math.nan}, {"a": 1.0, "b": 0.0}, {"a": 1, "c": 1}]
)
def test_losses_that_show_no_trend_are_refused_and_change_nothing(losses) -> None:
    control = RatioController({"a": 1, "b": 1})
    with pytest.raises(DataError, match="loss"):
        control.update(losses)
    assert len(control.points) == 1
