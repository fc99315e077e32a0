"""Adaptive weights: the rules by hand, the brakes, and a state that resumes exactly."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from mmlab.errors import OptionError
from mmlab.training.weighting import WEIGHTINGS, GradNorm, Trend, Uncertainty, Weighting, make_weighting

NAMES = ["contrastive", "matching", "masked_language"]
RAW = {"interval": 1, "smoothing": 1.0, "min_share": 0.0, "max_share": 1.0}  # no brake at all


def noisy_run(name: str, num_steps: int = 600, seed: int = 0, **options) -> tuple[Weighting, np.ndarray]:
    """Losses that fall at different rates, with noise; the weights after every step."""
    weighting, rng = make_weighting(name, NAMES, **options), np.random.default_rng(seed)
    seen = []
    for step in range(1, num_steps + 1):
        noise = np.exp(0.3 * rng.standard_normal(6))
        means = dict(zip(NAMES, noise[:3] * [3 * 0.998**step, 0.7, 4 * 0.999**step], strict=True))
        norms = dict(zip(NAMES, noise[3:] * [1.0, 0.2, 3.0], strict=True))
        weighting.update(step, means, norms if weighting.wants_grad_norms(step) else None)
        seen.append(list(weighting.weights().values()))
    return weighting, np.array(seen)


def test_uncertainty_is_the_inverse_of_the_loss():
    weighting = Uncertainty(NAMES, **RAW)
    weights = weighting.update(1, {"contrastive": 1.0, "matching": 0.5, "masked_language": 0.25})
    assert weights == pytest.approx({"contrastive": 3 / 7, "matching": 6 / 7, "masked_language": 12 / 7})


def test_trend_is_the_softmax_of_how_little_each_loss_fell():
    weighting = Trend(NAMES[:2], **RAW)
    assert weighting.update(1, {"contrastive": 2.0, "matching": 0.5}) is None  # no trend yet
    weights = weighting.update(2, {"contrastive": 1.0, "matching": 0.5})
    share = 1 / (1 + math.exp((0.5 - 1.0) / 2))
    assert weights == pytest.approx({"contrastive": 2 * (1 - share), "matching": 2 * share})


def test_gradnorm_makes_gradients_alike_and_helps_the_slower():
    weighting = GradNorm(NAMES[:2], **RAW)
    means, norms = {"contrastive": 2.0, "matching": 4.0}, {"contrastive": 3.0, "matching": 1.0}
    weights = weighting.update(1, means, norms)
    assert weights == pytest.approx({"contrastive": 0.5, "matching": 1.5})
    assert weights["contrastive"] * 3.0 == pytest.approx(weights["matching"] * 1.0)
    weights = weighting.update(2, {"contrastive": 2.0, "matching": 1.0}, norms)  # matching is at a quarter
    assert weights["contrastive"] * 3.0 == pytest.approx(4**0.5 * weights["matching"] * 1.0)


def test_an_update_takes_the_average_of_its_interval_and_goes_part_of_the_way():
    weighting = Uncertainty(NAMES[:2], interval=3, smoothing=0.5, min_share=0.0, max_share=1.0)
    for step, loss in ((1, 1.0), (2, 3.0)):
        assert weighting.update(step, {"contrastive": loss, "matching": 1.0}) is None
    weights = weighting.update(3, {"contrastive": 5.0, "matching": 1.0})  # averages 3 and 1: target 1/4, 3/4
    assert weights == pytest.approx({"contrastive": 2 * 0.375, "matching": 2 * 0.625})
    assert weighting.update(4, {"contrastive": 1.0, "matching": 1.0}) is None
    assert weighting.weights() == weights


@pytest.mark.parametrize("name", WEIGHTINGS)
@pytest.mark.parametrize("start", [NAMES, {"contrastive": 2.0, "matching": 0.5, "masked_language": 1.0}])
def test_the_sum_stays_and_every_share_keeps_its_bounds(name, start):
    weighting = make_weighting(name, start, interval=1, smoothing=0.7, min_share=0.1, max_share=0.6)
    total = sum(weighting.weights().values())
    rng = np.random.default_rng(0)
    for step in range(1, 200):
        extremes = dict(zip(NAMES, 10 ** rng.uniform(-12, 12, 3), strict=True))
        weighting.update(step, extremes, extremes)
        assert sum(weighting.weights().values()) == pytest.approx(total)
        assert all(0.1 - 1e-9 <= share <= 0.6 + 1e-9 for share in weighting.shares.values())


def test_fixed_weights_stay_as_given():
    weighting = make_weighting("fixed", {"contrastive": 1.0, "matching": 0.001}, interval=1)
    assert weighting.update(1, {"contrastive": 9.0, "matching": 1.0}) is None
    assert weighting.weights() == pytest.approx({"contrastive": 1.0, "matching": 0.001})


def test_what_was_not_seen_or_not_finite_keeps_its_share():
    weighting = Uncertainty(NAMES, **RAW)
    weighting.update(1, {"contrastive": 1.0, "matching": 3.0, "masked_language": math.nan})
    assert weighting.shares == pytest.approx(
        {"contrastive": 0.5, "matching": 1 / 6, "masked_language": 1 / 3}
    )
    assert weighting.update(2, {}) is None


@pytest.mark.parametrize("name", ["uncertainty", "trend", "gradnorm"])
def test_the_brakes_take_out_nine_tenths_of_the_oscillation(name):
    braked, raw = (np.abs(np.diff(noisy_run(name, **options)[1], axis=0)).mean() for options in ({}, RAW))
    assert 0 < braked < 0.1 * raw


@pytest.mark.parametrize("name", WEIGHTINGS)
def test_a_resumed_weighting_goes_on_alike(name):
    def step_of(weighting: Weighting, step: int) -> None:
        means = {key: 1 + math.sin(step * (place + 1)) ** 2 for place, key in enumerate(NAMES)}
        weighting.update(step, means, means)

    whole, first = (make_weighting(name, NAMES, interval=7) for _ in range(2))
    for step in range(1, 101):
        step_of(whole, step)
    for step in range(1, 46):  # in the middle of an interval
        step_of(first, step)
    second = make_weighting(name, NAMES, interval=7)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    step_of(first, 46)  # the saved state is a copy
    for step in range(46, 101):
        step_of(second, step)
    assert second.state_dict() == whole.state_dict()


def test_gradient_norms_are_wanted_when_an_update_is_due_and_only_by_gradnorm():
    weighting = GradNorm(NAMES, interval=3)
    assert [weighting.wants_grad_norms(step) for step in (1, 2, 3)] == [False, False, True]
    assert not Trend(NAMES, interval=3).wants_grad_norms(3)
    means = dict.fromkeys(NAMES, 1.0)
    assert weighting.update(1, means) is None
    with pytest.raises(OptionError, match="gradnorm needs the gradient norm of each objective"):
        weighting.update(3, means)


def test_bad_options_say_why():
    with pytest.raises(OptionError, match="unknown weighting 'trnd'; did you mean 'trend'"):
        make_weighting("trnd", NAMES)
    with pytest.raises(OptionError, match=r"3 shares between 0.4 and 0.9 cannot add up to 1.*at most 0.333"):
        Weighting(NAMES, min_share=0.4)
    with pytest.raises(OptionError, match="every objective needs a weight above 0, found no objective"):
        Weighting([])
    with pytest.raises(
        OptionError, match="unknown option of a weighting 'intervall'; did you mean 'interval'"
    ):
        make_weighting("trend", NAMES, intervall=5)
    with pytest.raises(OptionError, match=r"interval must be a whole number, found nan"):
        Weighting(NAMES, interval=math.nan)
    for name in WEIGHTINGS:  # a single objective has all, whatever the bounds
        assert make_weighting(name, ["matching"], interval=5).weights() == {"matching": 1.0}
    with pytest.raises(OptionError, match="smoothing must be above 0, found 0"):
        Weighting(NAMES, interval=5, smoothing=0)
    with pytest.raises(OptionError, match="the saved weights are of a, b, these objectives are contrastive"):
        Weighting(NAMES).load_state_dict(Weighting(["a", "b"]).state_dict())


def test_an_objective_that_was_not_seen_keeps_its_weight_where_the_others_reach_their_bounds():
    weighting = Uncertainty(dict.fromkeys(NAMES, 1.0), interval=1, smoothing=1.0)
    weights = weighting.update(1, {"contrastive": 1.0, "matching": 1000.0})
    assert weights["masked_language"] == pytest.approx(1.0)
    assert weights["matching"] == pytest.approx(3 * 0.05)
