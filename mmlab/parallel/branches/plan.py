"""`plan_branches`: which device computes which branch, by measured times, and what a step would then take.

Image and text rarely take the same time, so giving each a device leaves one idle. The plan compares, for the devices
there are:

one device             everything on the first: what the others are compared with
one process            a device for each branch, `BranchParallel`
two ranks              the same in two processes, the image rank ahead, `FusionTrainer(parallel="branch")`
replicas               several devices share a branch's batch: the same with more ranks, where it is the images'
layers moved           a branch is cut, its first layers on the one device and the rest on the other: `image_layers=` of
                       the same; of texts, and of encoders that cannot be cut, only planned

Each is simulated with its dependencies, transfers (bytes / bandwidth + latency) and, for replicas, the sum of their
gradients. What a simulation leaves out: memory, kernels that slow each other down, and a host that cannot queue kernels
fast enough. Bandwidth and latency are assumptions unless they are given.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from torch import nn

from mmlab.errors import OptionError
from mmlab.model.fusion_model import FusionModel
from mmlab.parallel.branches.measure import BranchCost, BranchCosts, measure_branches
from mmlab.parallel.branches.placement import BranchPlacement
from mmlab.training.losses.base import Objective
from mmlab.types import Batch, BatchShape

ONE_DEVICE, ONE_PROCESS, TWO_RANKS = "one device", "one process", "two ranks"
REPLICAS, LAYERS_MOVED = "replicas", "layers moved"
BANDWIDTH_GIB_S, LATENCY_S = 8.0, 30e-6  # assumed: PCI Express


@dataclass(frozen=True, slots=True, kw_only=True)
class BranchOption:
    """One way to use the devices, and what a step would take."""

    kind: str
    what: str  # which device does what
    step_s: float
    speed_up: float  # against one device
    idle_shares: Mapping[str, float]  # of the step, by device
    transfer_bytes: int  # over all micro-batches of a step
    runs_with: str | None  # what does it; None is only planned
    image_layers: int | None = None  # of `ParallelOptions`, for that
    placement: BranchPlacement | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BranchPlan:
    """What was measured, what was compared, the fastest first, and why. `print` shows it as a table."""

    costs: BranchCosts
    options: tuple[BranchOption, ...]
    reasons: tuple[str, ...]
    num_micro_batches: int

    @property
    def best(self) -> BranchOption:
        """The fastest that can be run."""
        return next(option for option in self.options if option.runs_with)

    @property
    def placement(self) -> BranchPlacement:
        """For `BranchParallel`: the fastest in one process."""
        return next(option.placement for option in self.options if option.placement is not None)

    def __str__(self) -> str:
        costs = self.costs
        lines = [
            f"One micro-batch of {tuple(costs.shape)} on {costs.measured_on}, {self.num_micro_batches} a step:",
            f"{'':8}{'forward ms':>12}{'backward ms':>13}{'output MiB':>12}{'weights MiB':>13}",
        ]
        lines += [
            f"{name:8}{cost.forward_s * 1e3:12.1f}{cost.backward_s * 1e3:13.1f}"
            f"{cost.output_bytes / 2**20:12.2f}{cost.weight_bytes / 2**20:13.1f}"
            for name, cost in (("image", costs.image), ("text", costs.text))
        ]
        lines.append(f"{'fusion':8}{costs.fusion_forward_s * 1e3:12.1f}{costs.fusion_backward_s * 1e3:13.1f}")
        width = max(len(option.what) for option in self.options)
        lines += ["", f"{'way':14}{'devices':{width}}  {'step ms':>9}{'speed-up':>10}{'MiB sent':>10}  idle"]
        for option in self.options:
            idle = ", ".join(f"{name} {share:.0%}" for name, share in option.idle_shares.items())
            lines.append(
                f"{option.kind:14}{option.what:{width}}  {option.step_s * 1e3:9.1f}{option.speed_up:10.2f}"
                f"{option.transfer_bytes / 2**20:10.2f}  {idle}; {option.runs_with or 'only planned'}"
            )
        return "\n".join([*lines, "", *self.reasons])


@dataclass(slots=True)
class _Task:
    device: int
    seconds: float
    order: tuple[int, int]  # micro-batch, rank among its tasks: decides between tasks that could start
    after: list[tuple[int, float]] = field(default_factory=list)  # tasks, and seconds to wait behind each


def plan_branches(
    model: nn.Module,
    devices: Sequence[str],
    *,
    batch: Batch | BatchShape | None = None,
    costs: BranchCosts | None = None,
    num_micro_batches: int = 1,
    ahead: int = 1,
    objectives: Sequence[str] | Mapping[str, Objective] = ("contrastive", "matching"),
    precision: str = "fp32",
    measure_on: str | None = None,
    bandwidth_gib_s: float = BANDWIDTH_GIB_S,
    latency_s: float = LATENCY_S,
) -> BranchPlan:
    """Compare the ways to put a model's branches on devices.

    Args:
        devices: two or more, alike; they need not be on this machine. "cpu" twice means two threads.
        batch: what to measure with, see `measure_branches`; or give `costs`.
        num_micro_batches: in an optimizer step.
        ahead: as in `BranchRanks`.
        measure_on: None takes the first device.
        bandwidth_gib_s, latency_s: between two devices, one way.

    Raises:
        OptionError: fewer than two devices, neither batch nor costs, or a number out of range.
    """
    if len(devices) < 2:
        raise OptionError(
            f"a plan needs at least two devices, found {list(devices)}; 'cpu' twice means two threads"
        )
    if num_micro_batches < 1 or bandwidth_gib_s <= 0 or latency_s < 0 or ahead < 0:
        raise OptionError(
            "num_micro_batches must be at least 1, bandwidth_gib_s above 0, latency_s and ahead at least 0, found "
            f"{num_micro_batches}, {bandwidth_gib_s}, {latency_s}, {ahead}"
        )
    if costs is None:
        if batch is None:
            raise OptionError("give plan_branches a batch or its shape to measure with, or costs")
        costs = measure_branches(
            model, batch, objectives=objectives, precision=precision, device=measure_on or devices[0]
        )
    fusion = model if isinstance(model, FusionModel) else None
    planner = _Planner(
        costs,
        tuple(devices),
        num_micro_batches,
        ahead,
        bandwidth_gib_s * 2**30,
        latency_s,
        can_cut_images=fusion is not None and _can(partial(fusion.require_cut, 1)),
        can_share_images=fusion is not None and _can(fusion.require_rows),
    )
    options = sorted(planner.options(), key=lambda option: option.step_s)
    return BranchPlan(
        costs=costs,
        options=tuple(options),
        reasons=tuple(_reasons(costs, options, bandwidth_gib_s, latency_s)),
        num_micro_batches=num_micro_batches,
    )


@dataclass(frozen=True, slots=True)
class _Planner:
    costs: BranchCosts
    devices: tuple[str, ...]
    num_micro_batches: int
    ahead: int
    bandwidth: float  # bytes a second
    latency_s: float
    can_cut_images: bool  # that runs
    can_share_images: bool

    def options(self) -> list[BranchOption]:
        """All ways, in any order."""
        costs, names = self.costs, self.devices
        one_s = self.num_micro_batches * costs.total_s
        found = [self._option(ONE_DEVICE, [(0, 1.0)], [(0, 1.0)], 0, "FusionTrainer", one_s)]
        for fusion in (0, 1):
            place = BranchPlacement(image=names[0], text=names[1], fusion=names[fusion])
            found.append(
                self._option(
                    ONE_PROCESS, [(0, 1.0)], [(1, 1.0)], fusion, "BranchParallel", one_s, placement=place
                )
            )
        found.append(self._option(TWO_RANKS, [(0, 1.0)], [(1, 1.0)], 1, 'parallel="branch"', one_s))
        for name, cost in (("image", costs.image), ("text", costs.text)):
            moved = [self._moved(name, number, cost, one_s) for number in range(1, len(cost.layers))]
            found += [min(moved, key=lambda option: option.step_s)] if moved else []
        return found + self._replicated(one_s)

    def _moved(self, name: str, number: int, cost: BranchCost, one_s: float) -> BranchOption:
        """The first layers of a branch on the first device, the rest on the second."""
        first = sum(cost.layers[:number])
        cut = [(0, first), (1, 1 - first)]
        runs = name == "image" and self.can_cut_images
        option = self._option(
            LAYERS_MOVED,
            cut if name == "image" else [(0, 1.0)],
            cut if name == "text" else [(1, 1.0)],
            1,
            f'parallel="branch", image_layers={number}' if runs else None,
            one_s,
            note=f"first {number} of {len(cost.layers)} {name} layers on the first",
        )
        return replace(option, image_layers=number) if runs else option

    def _replicated(self, one_s: float) -> list[BranchOption]:
        """Devices dealt out in proportion: each branch at least one, several share its batch."""
        found = []
        for num_image in range(1, len(self.devices)):
            num_text = len(self.devices) - num_image
            if num_image == num_text == 1:
                continue
            runs_with = 'parallel="branch"' if num_text == 1 and self.can_share_images else None
            found.append(
                self._option(
                    REPLICAS, [(0, 1.0)], [(1, 1.0)], 1, runs_with, one_s, copies=(num_image, num_text)
                )
            )
        return found

    def _option(
        self,
        kind: str,
        image: list[tuple[int, float]],
        text: list[tuple[int, float]],
        fusion: int,
        runs_with: str | None,
        one_s: float,
        *,
        copies: tuple[int, int] = (1, 1),
        note: str = "",
        placement: BranchPlacement | None = None,
    ) -> BranchOption:
        """Simulate one way: the stages of each branch as (device, share of its time), and the fusion's device."""
        pipelined = kind in (TWO_RANKS, REPLICAS, LAYERS_MOVED)
        tasks, num_bytes = self._tasks(image, text, fusion, copies, pipelined)
        step_s, busy = _simulated(tasks)
        step_s += sum(
            2 * (count - 1) / count * cost.weight_bytes / self.bandwidth + 2 * (count - 1) * self.latency_s
            for count, cost in zip(copies, (self.costs.image, self.costs.text), strict=True)
        )
        groups = self._names(kind, copies)
        doing = [[] for _ in groups]  # type: list[list[str]]
        for name, stages in (("image", image), ("text", text), ("fusion", [(fusion, 1.0)])):
            for device, _ in stages:
                doing[device].append(name)
        what = "; ".join(
            f"{group}: {' + '.join(names)}" for group, names in zip(groups, doing, strict=True) if names
        )
        return BranchOption(
            kind=kind,
            what=f"{what} ({note})" if note else what,
            step_s=step_s,
            speed_up=one_s / step_s,
            idle_shares={
                group: max(0.0, 1 - busy.get(number, 0.0) / step_s)
                for number, group in enumerate(groups)
                if number in busy
            },
            transfer_bytes=num_bytes,
            runs_with=runs_with,
            placement=placement,
        )

    def _names(self, kind: str, copies: tuple[int, int]) -> list[str]:
        if kind == REPLICAS:
            return ["+".join(self.devices[: copies[0]]), "+".join(self.devices[copies[0] :])]
        if self.devices[0] == self.devices[1]:
            return [f"{self.devices[0]} ({number})" for number in ("first", "second")]
        return [*self.devices[:2]]

    def _tasks(
        self,
        image: list[tuple[int, float]],
        text: list[tuple[int, float]],
        fusion: int,
        copies: tuple[int, int],
        pipelined: bool,
    ) -> tuple[list[_Task], int]:
        """The work of a step with its dependencies, and the bytes that cross from device to device."""
        costs, tasks, num_bytes = self.costs, list[_Task](), 0
        shared = not pipelined and self.devices[0] == self.devices[1] == "cpu"  # threads share their memory

        def add(device: int, seconds: float, order: tuple[int, int], *after: tuple[int, int]) -> int:
            nonlocal num_bytes
            task = _Task(device, seconds, order)
            for before, sent in after:
                crosses = tasks[before].device != device and not shared
                task.after.append((before, sent / self.bandwidth + self.latency_s if crosses else 0.0))
                num_bytes += sent if crosses else 0
            tasks.append(task)
            return len(tasks) - 1

        firsts: list[list[int]] = []  # of each micro-batch, the last backward task of every branch
        for number in range(self.num_micro_batches):
            ends, branches = [], ((image, costs.image, copies[0]), (text, costs.text, copies[1]))
            for place, (stages, cost, count) in enumerate(branches):
                gate = self._gate(firsts, number, place, pipelined)
                last = -1
                for device, share in stages:
                    after = gate if last < 0 else [(last, cost.layer_bytes // count)]
                    last = add(device, share * cost.forward_s / count, (number, 1), *after)
                ends.append((last, cost.output_bytes))
            forward = add(fusion, costs.fusion_forward_s, (number, 0), *ends)
            joined = add(fusion, costs.fusion_backward_s, (number, 0), (forward, 0))
            done = []
            for (stages, cost, count), (_, sent) in zip(branches, ends, strict=True):
                last, moved = joined, sent
                for device, share in reversed(stages):
                    last = add(device, share * cost.backward_s / count, (number, 0), (last, moved))
                    moved = cost.layer_bytes // count
                done.append(last)
            firsts.append(done)
        return tasks, num_bytes

    def _gate(
        self, firsts: list[list[int]], number: int, place: int, pipelined: bool
    ) -> list[tuple[int, int]]:
        """What the first forward task of a micro-batch waits for, without transfers."""
        if not pipelined:
            return [(task, 0) for task in firsts[number - 1]] if number else []
        behind = number - 1 - (self.ahead if place == 0 else 0)
        return [(firsts[behind][place], 0)] if behind >= 0 else []


def _can(require: Callable[[], None]) -> bool:
    try:
        require()
    except OptionError:
        return False
    return True


def _simulated(tasks: Sequence[_Task]) -> tuple[float, dict[int, float]]:
    """Seconds until all is done, and seconds that each device works; of what could start, the first in order does."""
    ends: dict[int, float] = {}
    free: dict[int, float] = {}
    busy: dict[int, float] = {}
    left = list(range(len(tasks)))
    while left:
        starts = [
            (
                max(
                    [
                        free.get(tasks[number].device, 0.0),
                        *(ends[before] + wait for before, wait in tasks[number].after),
                    ]
                ),
                tasks[number].order,
                number,
            )
            for number in left
            if all(before in ends for before, _ in tasks[number].after)
        ]
        start, _, number = min(starts)
        task = tasks[number]
        ends[number] = free[task.device] = start + task.seconds
        busy[task.device] = busy.get(task.device, 0.0) + task.seconds
        left.remove(number)
    return max(ends.values()), busy


def _reasons(
    costs: BranchCosts, options: Sequence[BranchOption], bandwidth_gib_s: float, latency_s: float
) -> list[str]:
    heavy, light = ("image", "text") if costs.image.both_s >= costs.text.both_s else ("text", "image")
    times: Mapping[str, BranchCost] = {"image": costs.image, "text": costs.text}
    ratio = times[heavy].both_s / times[light].both_s
    can = next(option for option in options if option.runs_with)
    reasons = [
        f"The {heavy} branch takes {ratio:.1f} times the {light} branch; fusion and losses are "
        f"{costs.fusion_s / costs.total_s:.0%} of the work.",
        f"Two devices cannot do better than {costs.total_s / max(times[heavy].both_s, costs.total_s / 2):.2f} times "
        f"one while the {heavy} branch stays whole.",
        f"Fastest that runs: {can.kind} ({can.what}), {can.speed_up:.2f} times one device.",
        f"Transfers are priced at {bandwidth_gib_s:g} GiB/s and {latency_s * 1e6:g} us.",
    ]
    if options[0].runs_with is None:
        reasons.insert(3, f"Faster but only planned: {options[0].kind} ({options[0].what}).")
    return reasons
