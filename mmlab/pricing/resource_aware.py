"""`ResourceAwareScheduler`: adapts batches to the memory that a run uses.

It stands between a planner and a loader. `observe` takes each step's values. When a policy
(`mmlab.pricing.memory_policies`) settles on another budget or batch size, the samples that have not been
handed out yet are planned anew (`mmlab.schedule.live`), and a `decision` event says why. With a good memory
model no decision is made. A step costs some tens of microseconds, a decision the time to plan the rest.
Out-of-memory errors are caught by the trainer, not here; it reports them in its step's values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from mmlab.errors import DataError, OptionError, check_name, check_numbers
from mmlab.machine import GIB, available_memory_bytes
from mmlab.pricing.memory_policies import Halving, MemoryPolicy, Predictive
from mmlab.runs.events import RunEvent
from mmlab.schedule.base import Scheduler, sizes_of
from mmlab.schedule.live import LivePlan
from mmlab.types import Samples, SampleSizes

POLICIES = ("predictive", "halving")


class ResourceAwareScheduler:
    """Plans epochs, and plans the rest of an epoch again when memory use calls for it.

    >>> ResourceAwareScheduler(max_memory_gb=2**20).adjust_batch_size(8)  # far below 30 % of a pebibyte
    16

    A `PlannedLoader` takes it in place of a scheduler. A plain torch `DataLoader` takes each epoch's
    `plan(sizes, epoch=epoch)` as its `batch_sampler`; then call `observe` after each step.

    Args:
        max_memory_gb: GiB that training may use; None takes the planner's budget, or 16 as in the article.
        planner: a scheduler with a budget in bytes (`memory`) for policy `predictive`, one with a
            `batch_size` for `halving`.
        policy: "predictive" corrects the planner's memory model; "halving" is the article's rule.
        rank: of this process, among the planner's `world_size`.
        emit: called with a `RunEvent` for each decision.
        agree: returns the largest of the ranks' numbers, for example by an all-reduce; called once a step,
            once more at a decision, and when a later epoch is planned, so every rank must observe every step
            and plan every epoch.

    Raises:
        OptionError: an unknown policy, a planner that does not suit it, no limit, or several ranks without `agree`.

    Source: article A, which reads the memory that is allocated between two steps. Here the peak within a step
        is used if the step's values include it.
    """

    def __init__(
        self,
        max_memory_gb: float | None = None,
        *,
        planner: Scheduler | None = None,
        policy: str = "predictive",
        rank: int = 0,
        emit: Callable[[RunEvent], object] | None = None,
        agree: Callable[[float], float] | None = None,
    ) -> None:
        check_name("policy", policy, POLICIES)
        check_numbers({"max_memory_gb": max_memory_gb})
        usual = getattr(planner, "budget", None) or 16 * GIB
        limit_bytes = usual if max_memory_gb is None else max_memory_gb * GIB
        if planner is not None and planner.world_size > 1 and agree is None:
            raise OptionError(
                f"{planner.world_size} ranks would decide independently; give agree=, a function that returns the largest of their numbers"
            )
        self.planner, self.limit_bytes, self.rank = planner, float(limit_bytes), rank
        self.seed = 0 if planner is None else planner.seed
        self.num_steps = 0  # observed
        self._emit = emit or (lambda event: None)
        self._agree = agree or float
        self._policy_name = policy
        self._policy: MemoryPolicy = (
            Halving(planner, self.limit_bytes)
            if policy == "halving" or planner is None
            else Predictive(planner, self.limit_bytes)
        )
        self._epoch = 0
        self._sizes: SampleSizes | None = None
        self._live: LivePlan | None = None

    @property
    def value(self) -> float:
        """The budget in predicted bytes, or the batch size, that the next plan gets."""
        return self._policy.value

    def get_available_resources(self) -> dict[str, float]:
        """The article's call: GiB free on this machine, of the limit, and in use by the article's rule."""
        used_bytes = self._article_rule().used_bytes()
        found = {"free": available_memory_bytes(), "limit": self.limit_bytes, "used": used_bytes}
        return {f"{name}_gb": num_bytes / GIB for name, num_bytes in found.items()}

    def adjust_batch_size(self, current: int) -> int:
        """The article's rule, whatever the policy: half above 80 % of the limit, twice (up to 64) below 30 %.

        Under policy `halving` memory use is the highest peak since the last decision. Without one it is what
        the whole system has in use, or the CUDA device's peak if that is more.
        """
        return self._article_rule().adjust(current)

    def plan(self, samples: Samples, *, epoch: int = 0) -> LivePlan:
        """This rank's share of an epoch. A second call for the same epoch includes all decisions made so far.

        Raises:
            OptionError: no planner, or a sample that no batch may hold.
        """
        sizes = sizes_of(samples)
        if self._sizes is None or not _are_equal(sizes, self._sizes):
            self._sizes, self._live = sizes, None
            self._policy.bind(sizes)
        elif epoch != self._epoch:
            wanted, reason = self._policy.next_epoch()
            self._settle(self._agree_least(wanted), reason, replan=False)
        if self._live is None or epoch != self._epoch:
            self._epoch = epoch
            self._live = self._make_live([(0, self.value)])
        assert self.planner is not None
        return self._live.shard(self.rank, self.planner.world_size)

    def observe(self, values: Mapping[str, Any]) -> None:
        """Take the values of a `step` event; this may plan the rest of the epoch anew.

        Args:
            values: `num_out_of_memory`, `peak_bytes` with its `memory_source`, `predicted_bytes` (or the batch's
                `num_samples`, `num_batches`, `num_tokens`, `height` and `width`).
        """
        self.num_steps += 1
        wanted, reason = self._policy.observe(values)
        if wanted > (agreed := self._agree_least(wanted)):
            reason = "another rank needs it"
        if not self._settle(agreed, reason, replan=True) and values.get("num_out_of_memory"):
            self._tell("hold", reason, self.value, 0)

    def state_dict(self) -> dict[str, Any]:
        """All decisions of this epoch and the policy's numbers, but not the reader's position."""
        return {
            **self._identity(),
            "epoch": self._epoch,
            "history": [list(pair) for pair in self._live.history] if self._live else [],
            "num_steps": self.num_steps,
            **{f"policy_{name}": number for name, number in self._policy.state_dict().items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a `state_dict`: `plan` gives the same batches again; `skip` those already trained on.

        Call `plan` with the samples first.

        Raises:
            DataError: the state belongs to other samples, another planner or another policy.
        """
        for name, value in self._identity().items():
            if state[name] != value:
                raise DataError(f"cannot resume: the state has another {name}; keep data, options and ranks")
        self._epoch, self.num_steps = state["epoch"], state["num_steps"]
        self._policy.load_state_dict({name.removeprefix("policy_"): number for name, number in state.items()})
        self._live = self._make_live([(first, value) for first, value in state["history"]])

    def _identity(self) -> dict[str, Any]:
        """What must be the same when a state is saved and when it is loaded."""
        planner = repr(self._planner_of(1))
        return {"policy": self._policy_name, "num_samples": len(self._bound()), "planner": planner}

    def _bound(self) -> SampleSizes:
        if self._sizes is None:
            raise OptionError("nothing to plan yet; call plan(sizes) first")
        return self._sizes

    def _article_rule(self) -> Halving:
        return self._policy if isinstance(self._policy, Halving) else Halving(None, self.limit_bytes)

    def _make_live(self, history: Sequence[tuple[int, float]]) -> LivePlan:
        epoch = self._epoch
        return LivePlan(
            lambda sizes, value: self._planner_of(value).plan(sizes, epoch=epoch), self._bound(), history
        )

    def _planner_of(self, value: float) -> Scheduler:
        if self.planner is None:
            raise OptionError("no planner; give planner=, for example make_scheduler('memory', ...)")
        return self._policy.planner(self.planner, value)

    def _agree_least(self, number: float) -> float:
        return -self._agree(-number)

    def _settle(self, agreed: float, reason: str, *, replan: bool) -> bool:
        """Let the policy settle on a value, given what the ranks agreed on; returns whether it changed."""
        old, new = self.value, self._policy.settle(agreed)
        if new == old:
            return False
        self._policy.value = new
        num_replanned = 0
        if replan and self._live is not None:
            try:
                num_replanned = self._live.replan(new, agree=self._agree)
            except OptionError as error:  # too few samples left for the ranks; the next epoch takes the value
                reason = f"{reason}; the rest of this epoch stays as it is: {error}"
        self._tell("lower" if new < old else "raise", reason, old, num_replanned)
        return True

    def _tell(self, action: str, reason: str, old: float, num_replanned: int) -> None:
        what = {"action": action, "reason": reason, "limit_bytes": round(self.limit_bytes)}
        what |= {"old_value": old, "new_value": self.value, "num_replanned": num_replanned}
        self._emit(RunEvent.now("decision", self.num_steps, what | self._policy.figures(), self.rank))


def _are_equal(one: SampleSizes, other: SampleSizes) -> bool:
    columns = ((getattr(one, name), getattr(other, name)) for name in one.__slots__)
    return one is other or all(np.array_equal(*pair) for pair in columns)
