"""`Lab`: configure, start, watch and steer a comparison, and save its results; from widgets or from code.

A lab is a configuration and at most one run of it in a folder. The run is a comparison of schedulers in a
process of its own: `start()` returns at once, the kernel stays free, and everything about the run is read
from its files. So the same lab can be opened again after a restart of the kernel, or from another process,
while it runs or later.

Costs: reading the state reads what is new in the runs' files, a few tenths of a millisecond, at most ten
times a second. Loads neither torch nor widgets until the panel is opened.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, is_dataclass
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmlab.comparison.background import BackgroundRun, find_run, job_of, start_compare
from mmlab.comparison.options import COMPARED, ComparisonOptions, read_options, scheduler_names
from mmlab.comparison.result import Comparison, load_comparison, page_of
from mmlab.errors import DataError, OptionError, RunError, check_is, check_name
from mmlab.runs.control import send
from mmlab.runs.figures import to_bytes
from mmlab.runs.follow import ACTIVE, ENDED, Runs, RunState, overall_status
from mmlab.runs.summaries import Progress, draw_runs, failure_of, progress_of, summarize
from mmlab.types import parse_image_policy

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    from mmlab.lab.lab_panel import LabPanel

POLL_S = 0.1  # between two reads of the runs' files


class Lab:
    """A comparison of batch schedulers that is configured, started, watched and steered from a notebook.

    Every method may be called from any thread; only `wait` and `wait_for` block.

    >>> lab = Lab("data/sample", schedulers=("random", "budget"), epochs=2, image="aspect:64")
    >>> lab.state
    'idle'
    >>> lab.configure(epochs=0)
    Traceback (most recent call last):
        ...
    mmlab.errors.OptionError: Lab: epochs must be at least 1, found 0
    >>> print(lab.code())
    from mmlab import Lab
    <BLANKLINE>
    lab = Lab(
        'data/sample',
        schedulers=('random', 'budget'),
        epochs=2,
        image='aspect:64',
    )
    lab.start()
    comparison = lab.wait()

    Args:
        data: anything that `mmlab.read_records` takes, or records.
        schedulers: names from `mmlab.SCHEDULERS`, or configured schedulers by name.
        out: folder of the results; an earlier run's files there are moved to `previous-N` when a new run
            starts.
        detached: the run continues when this process ends (the kernel is restarted); `Lab.open` finds it
            again.
        options: those of `mmlab.compare` (`mmlab.comparison.options.ComparisonOptions`): `budget`, `batch_size`,
            `epochs`, `image`, `augment`, `ratios`, `adaptive`, `model`, `precision`, `memory_gb` and others.

    Raises:
        OptionError: an unknown option or scheduler, or a value of the wrong type or out of range. What needs the data,
            the model or the device to be judged is an error of `wait`.
    """

    def __init__(
        self,
        data: Any,
        *,
        schedulers: Any = COMPARED,
        out: str | Path = "runs/lab",
        detached: bool = False,
        **options: Any,
    ) -> None:
        check_is("out", out, str | Path, "a folder's path")
        self.data, self.folder, self.detached = data, Path(out), detached
        self.options: dict[str, Any] = _checked({**_DEFAULTS, "schedulers": schedulers, **options})
        self._lock = threading.RLock()
        self._run: BackgroundRun | None = None
        self._opened = False  # the runs in the folder belong to this lab, though it did not start them
        self._runs = Runs(self.folder / "runs")
        self._polled_s = 0.0
        self._panel: LabPanel | None = None

    @classmethod
    def open(cls, folder: str | Path) -> Lab:
        """The lab of a run, active or ended, whichever process started it.

        Raises:
            DataError: no comparison was started there.
        """
        run = find_run(folder)
        if run is None and not (Path(folder) / "runs").is_dir():
            raise DataError(f"no comparison in {folder}: give the folder that was out= of Lab or compare")
        job = _job_of(Path(folder)) if run is None else run.job
        lab = cls(job["data"], out=folder)
        known = {key: value for key, value in job["options"].items() if key in _DEFAULTS}
        # not checked: of configured schedulers only the names are known
        lab.options |= {**known, "schedulers": tuple(job["schedulers"])}
        lab._run, lab._opened = run, True
        return lab

    def configure(self, **changes: Any) -> None:
        """Change options of the next run; a run in progress keeps the options it was started with.

        Raises:
            OptionError: as for a new lab; nothing is changed then.
        """
        self.options = _checked({**self.options, **changes})

    def start(self) -> Lab:
        """Start a run and return at once; does nothing if a run with the same options is already in progress.

        A run that this lab has told to stop is waited for.

        Raises:
            OptionError: an argument cannot be sent to another process, a value in the panel cannot work, or a
                run with other options is in progress in the same folder: `stop()` and the panel then control
                that run.
        """
        with self._lock:
            if self._panel is not None and self._panel.wrong:
                raise OptionError(f"not started: {'; '.join(self._panel.wrong)}; correct it in the panel")
            if (run := self._find_running()) is not None and run.asked_to_stop:
                run.stop()
            elif run is not None:
                if changes := self.differences(run.job):
                    if self._panel is None:
                        self.panel().display()  # with its Stop, before the error ends the cell
                    raise OptionError(
                        f"a run with other options is active in {self.folder} ({changes}): stop it first (Stop in "
                        "its panel, or stop()), or give another folder, out=..."
                    )
                return self
            if self.data is None:
                raise OptionError(
                    "the data of this run were not given as a path, so only the process that has them can start it "
                    "again; make a new Lab with them"
                )
            self._runs = Runs(self.folder / "runs")
            self._run = start_compare(self.data, out=self.folder, detached=self.detached, **self.options)
            if self._panel is not None:
                self._panel.list_earlier()
        return self

    def pause(self) -> None:
        """Pause the run after the current step."""
        self._tell("pause")

    def resume(self) -> None:
        """Let a paused run continue."""
        self._tell("resume")

    def stop(self) -> None:
        """End the run after the current step; the epochs that every scheduler finished are kept."""
        if self._run is not None and self._run.state == "running":
            self._run.ask_to_stop()
        else:
            self._tell("stop")

    def wait(self) -> Comparison:
        """Wait for the end and return the result. Interrupting the waiting cell stops the run cleanly.

        Raises:
            DataError, OptionError: the data or an option cannot be used.
            RunError: nothing was started, the run failed, or it was stopped before every scheduler had finished an
                epoch.
        """
        if (run := self._run) is not None:
            return run.wait()
        if self.state == "idle":
            raise RunError("nothing is running; press Start or call start() first")
        while self.state in ACTIVE:  # started without a Lab, by any process
            time.sleep(1.0)
        return load_comparison(self.folder)

    def wait_for(self, *states: str, done_ratio: float = inf, timeout_s: float = 60.0) -> str:
        """Wait for one of these states, a share `done_ratio` of the run, or its end; returns the state.

        Raises:
            RunError: it takes longer than `timeout_s`.
        """
        deadline_s = time.monotonic() + timeout_s
        while (state := self.state) not in (*states, *ENDED) and not self.progress.done_ratio >= done_ratio:
            if time.monotonic() > deadline_s:
                wanted = " or ".join(states) or f"{done_ratio:.0%} of the run"
                raise RunError(f"still {state} after {timeout_s:g} s, waited for {wanted}")
            time.sleep(POLL_S)
        return state

    @property
    def state(self) -> str:
        """`idle`, `running`, `paused`, `stopping`, `done`, `stopped`, `failed` or `unreadable`.

        A comparison that no Lab started is `waiting` until its first event. With a panel, which draws the runs in the
        folder whoever started them, it is that of a later run of another process.
        """
        run = self._run if self._panel is None else self._find_running() or self._run
        if run is not None and run.state == "running":
            if run.asked_to_stop:
                return "stopping"
            return "paused" if overall_status(self._poll().values()) == "paused" else "running"
        states = self._poll(at_once=True)
        status = overall_status(states.values()) if states else "idle"
        if self._panel is not None and status in ("running", "paused"):
            return status  # of a comparison that no Lab started
        if run is not None:
            return run.state
        return status if self._opened else "idle"

    @property
    def progress(self) -> Progress:
        """Share of the run that is done, and seconds left by the planned cost; NaN where not known yet."""
        with self._lock:
            states = self._poll()
            known = len(states) >= len((self._run.job if self._run else self.options)["schedulers"])
            return progress_of(states.values()) if known else Progress()

    @property
    def error(self) -> str | None:
        """Traceback of the error that ended the run, if there was one."""
        return failure_of(self._poll().values()) if self._run is None else self._run.error

    def figure(self) -> Figure:
        """A figure of the finished comparison, or of its runs so far."""
        found = self._comparison()
        return draw_runs(self._poll(at_once=True)) if found is None else found.figure()

    def table(self) -> pd.DataFrame:
        """One row per scheduler, with its figures so far: `mmlab.runs.summaries.summarize`.

        Raises:
            RunError: no run has written anything yet.
        """
        import pandas as pd

        states = self._poll(at_once=True)
        if not states:
            raise RunError(f"{self.state}, no step written yet; press Start or call start() first, or wait")
        return pd.DataFrame([summarize(run) for run in states.values()], index=pd.Index(states, name="run"))

    def code(self) -> str:
        """The configuration as a program that starts it and waits."""
        data = str(self.data) if isinstance(self.data, str | Path) else None
        defaults = {**_DEFAULTS, "out": "runs/lab", "detached": False}
        chosen = {**self.options, "out": str(self.folder), "detached": self.detached}
        lines = [f"    {key}={value!r}," for key, value in chosen.items() if value != defaults.get(key)]
        imports = ["from mmlab import Lab"]
        if isinstance(self.options["schedulers"], Mapping):
            planners = list(self.options["schedulers"].values())
            parts = [*planners, *(part for planner in planners for part in vars(planner).values())]
            kinds = {type(part) for part in parts if is_dataclass(part)}
            imports += sorted(f"from {kind.__module__} import {kind.__name__}" for kind in kinds)
        first = "    records,  # read_records(...)" if data is None else f"    {data!r},"
        body = ["lab = Lab(", first, *lines, ")", "lab.start()", "comparison = lab.wait()"]
        return "\n".join([*imports, "", *body])

    def to_csv(self, path: str | Path) -> Path:
        """Write every step of every run so far as a table; returns the path.

        Raises:
            DataError: no run has written anything.
        """
        from mmlab.runs.events import read_runs

        events = read_runs(self._folder_now / "runs")
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        events[events["kind"] == "step"].dropna(axis="columns", how="all").to_csv(path, index=False)
        return path

    def report(self, path: str | Path) -> Path:
        """Write one self-contained page: the comparison, or its runs so far; returns the path.

        Raises:
            RunError: no run has written anything yet.
        """
        found = self._comparison()
        if found is None:
            error = {} if self.error is None else {"Error": self.error}
            page = page_of(
                self.table(),
                to_bytes(self.figure()),
                heading="Batch schedulers side by side, so far",
                about=(str(self.data), self.state),
                details={**error, "Configuration": self.code()},
            )
        else:
            page = found.html()
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(page)
        return path

    def panel(self) -> LabPanel:
        """Widgets for the configuration above a live view of the runs; the same ones each time."""
        from mmlab.lab.lab_panel import LabPanel

        if self._panel is None or self._panel.comm is None:  # closed
            self._panel = LabPanel(self)
        return self._panel

    def differences(self, job: Mapping[str, Any]) -> str:
        """The options in which a run's job (`BackgroundRun.job`) differs from this configuration, as text."""
        own = job_of(self.data, self.options["schedulers"], {**self.options, "schedulers": None})
        own = json.loads(json.dumps(own, default=str))  # in the form in which jobs are written
        asked, ours = ({**each.get("options", {}), **each, "options": None} for each in (job, own))
        # a lab that was opened knows only the names of configured schedulers
        keys = [key for key in (ours if self._opened else asked | ours) if asked.get(key) != ours.get(key)]
        return ", ".join(f"{key}={asked.get(key)!r}" for key in keys)

    def __repr__(self) -> str:
        return f"Lab({self.data!r}, out={str(self.folder)!r}): {self.state}"

    def _tell(self, command: str) -> None:
        if self.state in (*ACTIVE, "stopping"):
            send(self.folder, command)

    @property
    def _folder_now(self) -> Path:
        return self.folder if self._run is None else self._run.folder_now

    def _find_running(self) -> BackgroundRun | None:
        """The run in progress in the folder, whoever started it; this lab steers it from now on."""
        if self._run is None or self._run.state != "running":
            found = find_run(self.folder)
            if found is None or found.state != "running":
                return None
            self._run = found
            if self._panel is not None:  # what was in the folder has been moved aside
                self._panel.list_earlier()
        return self._run

    def _poll(self, *, at_once: bool = False) -> dict[str, RunState]:
        """The runs; reads what is new in their files, unless that was done a moment ago."""
        with self._lock:
            if at_once or time.monotonic() - self._polled_s > POLL_S:
                self._polled_s = time.monotonic()
                if (source := self._folder_now / "runs") != self._runs.source:
                    self._runs = Runs(source)
                self._runs.poll()
            return self._runs.states

    def _comparison(self) -> Comparison | None:
        """The finished comparison; None if there is none yet."""
        if self.state in ("done", "stopped"):
            with suppress(DataError):
                return load_comparison(self._folder_now)
        return None


_DEFAULTS: dict[str, Any] = {"schedulers": COMPARED, **asdict(ComparisonOptions())}


def _checked(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options as they will be used; raises OptionError if one cannot work."""
    for name in options:
        check_name("option of Lab", name, _DEFAULTS)
    found = dict(options)
    schedulers = found.pop("schedulers")
    read_options(ComparisonOptions, found, "Lab")
    parse_image_policy(found["image"])
    names = scheduler_names(schedulers)
    return {"schedulers": schedulers if isinstance(schedulers, Mapping) else names, **found}


def _job_of(folder: Path) -> dict[str, Any]:
    """The job of a comparison that no Lab started, from the first events of its runs."""
    runs = Runs(folder / "runs")
    runs.poll()
    starts = [state.latest("start") for state in runs.states.values()]
    config: dict[str, Any] = next((start["config"] for start in starts if "config" in start), {})
    return {"data": config.get("data"), "schedulers": tuple(runs.states), "options": config}
