"""Weights of several objectives that adapt slowly during training: `WEIGHTINGS` by name.

The trainer multiplies each objective's mean by its weight, and passes the means on after every step. Every
`interval` steps a rule turns their averages over those steps into target shares; the weights then move part
of the way. Four things damp noise: the average, the interval, the exponential smoothing, and bounds on every
share. The weights' sum never changes, so the learning rate keeps its meaning. Costs nothing, except
`gradnorm`, which needs the norm of each objective's own gradient once an interval: one more forward and
backward pass over the window for each objective.

The means may be those of training steps or of evaluations on held-out samples, but of one kind throughout. No
rule here knows which weights are best for the model's later use.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

from mmlab.errors import OptionError, check_name, check_numbers

Numbers = Mapping[str, float]  # by objective
_STATE = ("shares", "_last_step", "_sums", "_counts", "_first", "_before")
_LEAST = 1e-8  # a smaller loss or norm counts as this


class Weighting:
    """What all rules share; alone it is `fixed`: the weights stay as they were given.

    >>> Weighting(["contrastive", "matching"]).weights()
    {'contrastive': 1.0, 'matching': 1.0}

    Args:
        start: the objectives' names, for a weight of one each, or weights by name.
        interval: steps from one update to the next.
        smoothing: how far the weights go towards their target at an update, above 0 to 1; 1 goes all the way.
        min_share, max_share: bounds on an objective's target share of the weights' sum.

    Raises:
        OptionError: no objective, a weight that is not above zero, bounds that the shares cannot all keep, or a number
            out of range.
    """

    wants_norms = False

    def __init__(
        self,
        start: Sequence[str] | Numbers,
        *,
        interval: int = 50,
        smoothing: float = 0.1,
        min_share: float = 0.05,
        max_share: float = 0.9,
    ) -> None:
        start = [start] if isinstance(start, str) else start
        weights = dict(start) if isinstance(start, Mapping) else dict.fromkeys(start, 1.0)
        if not weights or not all(0 < weight < math.inf for weight in weights.values()):
            raise OptionError(f"every objective needs a weight above 0, found {weights or 'no objective'}")
        check_numbers({"interval": interval, "smoothing": smoothing})
        min_share, max_share = (min_share, max_share) if len(weights) > 1 else (0.0, 1.0)  # one has all
        if not 0 <= min_share * len(weights) <= 1 <= max_share * len(weights):
            raise OptionError(
                f"{len(weights)} shares between {min_share} and {max_share} cannot add up to 1: min_share may be "
                f"at most {1 / len(weights):.3g}, and max_share must be at least that"
            )
        self.total = sum(weights.values())
        self.shares = {name: weight / self.total for name, weight in weights.items()}
        self.interval, self.smoothing, self.bounds = interval, smoothing, (min_share, max_share)
        self._last_step = 0
        self._sums = dict.fromkeys(weights, 0.0)
        self._counts = dict.fromkeys(weights, 0)
        self._first: dict[str, float] = {}  # averages of the first interval that each objective was seen in
        self._before: dict[str, float] = {}  # averages of the last interval that each was seen in

    def weights(self) -> dict[str, float]:
        """The factor of each objective's mean."""
        return {name: self.total * share for name, share in self.shares.items()}

    def wants_grad_norms(self, step: int) -> bool:
        """Whether `update` at this step needs gradient norms."""
        return self.wants_norms and self._is_due(step)

    def update(self, step: int, means: Numbers, grad_norms: Numbers | None = None) -> dict[str, float] | None:
        """Take in the means of a step; returns the new weights if they changed, else None.

        An objective that was not seen, or not finite, since the last update keeps its share.

        Args:
            step: optimizer steps done, this one included.
            means: unweighted, of the objectives that counted anything.
            grad_norms: unweighted, of the gradient of each mean; needed if `wants_grad_norms(step)`.

        Raises:
            OptionError: gradient norms are needed and missing.
        """
        for name, mean in means.items():
            if math.isfinite(mean):
                self._sums[name] += mean
                self._counts[name] += 1
        if not self._is_due(step):
            return None
        averages = {name: self._sums[name] / count for name, count in self._counts.items() if count}
        self._last_step = step
        self._sums, self._counts = dict.fromkeys(self.shares, 0.0), dict.fromkeys(self.shares, 0)
        self._first = averages | self._first
        scores = self._scores({name: max(mean, _LEAST) for name, mean in averages.items()}, grad_norms)
        self._before |= averages
        if not scores:
            return None
        free = sum(self.shares[name] for name in scores)
        wanted = {name: score / sum(scores.values()) for name, score in scores.items()}
        parts = _bounded(wanted, *(bound / free for bound in self.bounds))
        target = self.shares | {name: free * part for name, part in parts.items()}
        self.shares = {
            name: share + self.smoothing * (target[name] - share) for name, share in self.shares.items()
        }
        return self.weights()

    def _is_due(self, step: int) -> bool:
        return step - self._last_step >= self.interval

    def _scores(self, averages: Numbers, grad_norms: Numbers | None) -> dict[str, float]:
        """Positive numbers that the target shares are proportional to; none for objectives to leave alone."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """All that a resumed run needs to continue identically; plain numbers, for JSON."""
        return deepcopy({name: getattr(self, name) for name in _STATE})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a `state_dict` of the same objectives.

        Raises:
            OptionError: it belongs to other objectives.
        """
        if state["shares"].keys() != self.shares.keys():
            raise OptionError(
                f"the saved weights are of {', '.join(state['shares'])}, these objectives are {', '.join(self.shares)}"
            )
        for name in _STATE:
            setattr(self, name, deepcopy(state[name]))


class Uncertainty(Weighting):
    """Shares in inverse proportion to the losses.

    Kendall's loss, the sum of exp(-s) L + s, is least at exp(-s) = 1 / L. This rule computes that minimum
    from averages; Kendall learns s together with the model's weights.

    Source: Kendall et al. 2018 (arXiv:1705.07115).
    """

    def _scores(self, averages: Numbers, grad_norms: Numbers | None) -> dict[str, float]:
        return {name: 1 / mean for name, mean in averages.items()}


class Trend(Weighting):
    """Larger shares for objectives whose loss falls more slowly than the others': dynamic weight average.

    Source: Liu et al. 2019 (arXiv:1803.10704).
    """

    temperature = 2.0  # as in the source; the larger, the more equal the shares

    def _scores(self, averages: Numbers, grad_norms: Numbers | None) -> dict[str, float]:
        seen = {name: mean for name, mean in averages.items() if name in self._before}
        ratios = {name: mean / max(self._before[name], _LEAST) for name, mean in seen.items()}
        most = max(ratios.values(), default=0.0)
        return {name: math.exp((ratio - most) / self.temperature) for name, ratio in ratios.items()}


class GradNorm(Weighting):
    """Gradients of similar size, a little larger for an objective whose loss has fallen less since the start.

    The source learns the weights by gradient descent towards w g = mean(w g) r^alpha; this takes the
    solution, w proportional to r^alpha / g, as its target. g is the gradient's norm, r the loss over its
    value in the first interval.

    Source: Chen et al. 2018 (arXiv:1711.02257).
    """

    wants_norms = True
    # how strongly slower objectives are favoured; 0 makes all gradients equal; the source has 0.12 to 1.5
    alpha = 0.5

    def _scores(self, averages: Numbers, grad_norms: Numbers | None) -> dict[str, float]:
        if grad_norms is None:
            raise OptionError("gradnorm needs the gradient norm of each objective: update(grad_norms=...)")
        return {
            name: (mean / max(self._first[name], _LEAST)) ** self.alpha / max(grad_norms[name], _LEAST)
            for name, mean in averages.items()
            if math.isfinite(grad_norms.get(name, math.inf))
        }


WEIGHTINGS = {"fixed": Weighting, "uncertainty": Uncertainty, "trend": Trend, "gradnorm": GradNorm}


def make_weighting(name: str, start: Sequence[str] | Numbers, **options: Any) -> Weighting:
    """A weighting by name, with its options.

    >>> make_weighting("trend", ["contrastive", "matching"], interval=10).interval
    10

    Raises:
        OptionError: an unknown name or option, or a number out of range.
    """
    check_name("weighting", name, WEIGHTINGS)
    for option in options:
        check_name("option of a weighting", option, ("interval", "smoothing", "min_share", "max_share"))
    return WEIGHTINGS[name](start, **options)


def _bounded(shares: Numbers, least: float, most: float) -> dict[str, float]:
    """Shares that add up to one, in [least, most]; those not at a bound keep their proportions.

    >>> bounded = _bounded({"a": 0.98, "b": 0.01, "c": 0.01}, 0.05, 0.9)
    >>> {name: round(share, 6) for name, share in bounded.items()}
    {'a': 0.9, 'b': 0.05, 'c': 0.05}
    """
    shares = {name: max(share, _LEAST) for name, share in shares.items()}

    def scaled(factor: float) -> dict[str, float]:
        return {name: min(most, max(least, factor * share)) for name, share in shares.items()}

    low, high = _LEAST, most / min(shares.values())
    for _ in range(60):  # bisection: the sum grows with the factor
        factor = math.sqrt(low * high)
        low, high = (factor, high) if sum(scaled(factor).values()) < 1 else (low, factor)
    bounded = scaled(high)
    return {name: share / sum(bounded.values()) for name, share in bounded.items()}
