"""`RatioController`: sampling ratios that follow the losses, slowly.

Plans are pure functions, so what reacts to training is an object beside them. After each epoch the controller takes the
mean loss of each source and gives the next epoch's ratios, as points that `mmlab.schedule.Mixed` reads. A source whose
loss falls more slowly than the others' gets a larger share. Once all losses have settled, the ratios return to where
they began.

Four things keep the ratios from following noise. Losses are smoothed, as logarithms, so that only relative change
counts and a loss in bits weighs as much as one in nats. The ratios stay where they are while the target is within
`hysteresis`, and then follow it at that distance, so they turn round only when the target has turned by twice as much.
No share moves by more than `max_step` an epoch. No share falls below `floor`. Give held-out losses or training losses,
but the same kind throughout.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from mmlab.errors import DataError, OptionError

_MAX_GAIN = 100  # at which a loss that falls by 1 % more an update drives two shares apart by a factor of e


class RatioController:
    """Turns the losses of an epoch into the ratios of the next.

    >>> control = RatioController({"image-text": 0.5, "text-only": 0.5})
    >>> for epoch in range(4):  # the text loss stands still
    ...     ratios = control.update({"image-text": 4 * 0.8**epoch, "text-only": 2.0})
    >>> [round(shares["text-only"], 2) for epoch, shares in control.points]
    [0.5, 0.5, 0.55, 0.6, 0.65]

    Args:
        base: the shares to begin with, to which the ratios return; scaled to sum to one.
        gain: how strongly the target reacts: sources whose losses fall by 1 % and by 11 % an update are driven apart
            by a factor of exp(0.1 gain).
        smoothing: weight of the newest loss in the exponential average, above 0 to 1.
        hysteresis: distance from the target, in shares, within which nothing moves.
        max_step: most that any share moves at once.
        floor: least share of a source.

    Raises:
        OptionError: a number out of range, or a base below the floor.

    Source: the target is Dynamic Weight Average (Liu et al. 2019, arXiv:1803.10704), on smoothed logarithms; the dead
        zone of `hysteresis` is the play operator of control theory. Article C's readers asked for such ratios.
    """

    def __init__(
        self,
        base: Mapping[str, float],
        *,
        gain: float = 5.0,
        smoothing: float = 0.3,
        hysteresis: float = 0.02,
        max_step: float = 0.05,
        floor: float = 0.05,
    ) -> None:
        total = sum(base.values())
        self.base = {name: share / total for name, share in base.items()} if total > 0 else {}
        if not self.base or min(self.base.values()) < floor or floor <= 0:
            raise OptionError(
                f"every share of the base must be at least the floor of {floor}, above 0; found {dict(base)}"
            )
        bounded = {"smoothing": smoothing, "hysteresis": hysteresis, "max_step": max_step, "gain": gain}
        for name, value in bounded.items():
            limit = _MAX_GAIN if name == "gain" else 1
            if not 0 < value <= limit:
                raise OptionError(f"{name} must be above 0 and at most {limit}, found {value}")
        self.gain, self.smoothing, self.hysteresis = gain, smoothing, hysteresis
        self.max_step, self.floor = max_step, floor
        self.points = [(0, self.base)]  # ratios by epoch, what `Mixed(ratios=...)` takes
        self.target = (
            self.base
        )  # where the last update would have gone without the dead zone and the bounded step
        self._smoothed: dict[str, float] = {}  # logarithm of the loss

    @property
    def ratios(self) -> dict[str, float]:
        """Shares of the coming epoch."""
        return self.points[-1][1]

    def update(self, losses: Mapping[str, float]) -> dict[str, float]:
        """Take the mean losses of the epoch that `ratios` were for; the next epoch's ratios come back.

        Raises:
            DataError: not one loss for each source, or one that is not finite and above zero. Nothing has changed.
        """
        if losses.keys() != self.base.keys():
            raise DataError(
                f"expected a loss for each of {', '.join(self.base)}, found {', '.join(losses) or 'none'}"
            )
        for name, loss in losses.items():
            if not 0 < loss < math.inf:
                raise DataError(
                    f"the loss of {name} must be finite and above zero to follow its trend, found {loss}"
                )
        before = self._smoothed or {name: math.log(loss) for name, loss in losses.items()}
        self._smoothed = {
            name: before[name] + self.smoothing * (math.log(loss) - before[name])
            for name, loss in losses.items()
        }
        self.target = self._target({name: self._smoothed[name] - before[name] for name in self.base})
        gaps = {name: self.target[name] - share for name, share in self.ratios.items()}
        widest = max(map(abs, gaps.values()))
        step = min(max(0.0, widest - self.hysteresis), self.max_step)
        moved = {
            name: share + (gaps[name] * step / widest if step else 0.0) for name, share in self.ratios.items()
        }
        self.points.append((len(self.points), moved))
        return moved

    def state_dict(self) -> dict[str, Any]:
        """All that a resumed run needs to go on alike; plain numbers, fit for JSON."""
        return {
            "points": [[epoch, dict(shares)] for epoch, shares in self.points],
            "smoothed": dict(self._smoothed),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state_dict`."""
        self.points = [(epoch, dict(shares)) for epoch, shares in state["points"]]
        self._smoothed = dict(state["smoothed"])

    def _target(self, trend: Mapping[str, float]) -> dict[str, float]:
        """Base shares x exp(gain x trend), scaled to one; what falls below the floor is lifted at the others' cost."""
        slowest = max(trend.values())
        raw = {
            name: share * math.exp(self.gain * (trend[name] - slowest)) for name, share in self.base.items()
        }
        above = {name: max(0.0, value / sum(raw.values()) - self.floor) for name, value in raw.items()}
        spare = (1 - len(raw) * self.floor) / sum(above.values()) if any(above.values()) else 0.0
        return {name: self.floor + excess * spare for name, excess in above.items()}
