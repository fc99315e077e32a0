"""For notebooks: train one model under several settings, one after the other, and compare the runs.

Every run is a `FusionTrainer` on a copy of the same model and on the same batches. It writes its events to
its own folder below a common one, where a `LivePanel` can draw them. `Lab`, by contrast, compares schedulers,
and trains in a process of its own.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from torch import nn

from mmlab.comparison.run import Run
from mmlab.errors import OptionError, check_name
from mmlab.runs.events import EVENT_FILES
from mmlab.runs.figures import as_label, colours_of
from mmlab.runs.folders import move_earlier_aside
from mmlab.runs.follow import Runs, RunState
from mmlab.training.loop import FusionTrainer
from mmlab.training.losses.base import Objective
from mmlab.training.options import TrainOptions
from mmlab.training.weighting import make_weighting
from mmlab.types import Batch


def train_with(
    folder: str | Path,
    model: nn.Module,
    batches: Sequence[Batch],
    held_out: Sequence[Batch],
    objectives: Mapping[str, Objective],
    options: TrainOptions,
) -> pd.DataFrame:
    """Train a copy of the model for one pass over the batches, and evaluate it.

    The run is named after precision, accumulation and weighting. An earlier run of that name is moved to
    `previous-N`.

    Args:
        folder: holds a folder for every run.
        batches: micro-batches, in order.
        options: of the trainer. Weights of the objectives are updated every five steps.

    Returns:
        One row per run that took a step: steps, skipped steps, the median time of a step, the held-out loss.

    Raises:
        OptionError: an option cannot work.
    """
    window, rule = options.accumulation_steps, options.weighting
    parts = (options.precision, f"x{window}" if window > 1 else "", rule if rule != "fixed" else "")
    name = " ".join(filter(None, parts))
    weighting = make_weighting(rule, list(objectives), interval=5, smoothing=0.3)
    with Run(move_earlier_aside(Path(folder) / name, (EVENT_FILES,))) as run:
        learner = copy.deepcopy(model)
        trainer = FusionTrainer(learner, options, objectives=objectives, weighting=weighting, emit=run.emit)
        # after what may refuse an option, which would leave a failed run in a panel
        run.start(run_name=name, precision=options.precision, num_steps=-(-len(batches) // window))
        run.fit(trainer, batches)
        run.write("eval", **trainer.evaluate(held_out))
    rows = {}
    for state in (run for run in _runs(folder) if run.count()):
        rows[state.name] = {
            "steps": state.count(),
            "skipped": int(state.column("skipped").sum()),
            "step, ms": round(1e3 * np.median(state.column("step_s", start=min(1, state.count() - 1))), 1),
            "held-out loss": state.latest("eval").get("loss"),
        }
    return pd.DataFrame.from_dict(rows, orient="index")


def settings_figure(folder: str | Path, names: Sequence[str] = ()) -> Figure:
    """Loss by objective of runs over the samples seen, and the objectives' weights and the loss scale if they vary.

    Args:
        names: of the runs shown (default: all in the folder). The first is drawn wide and pale, so that runs which
            follow it closely can be seen.

    Raises:
        OptionError: no such run has begun, or none at all.
    """
    begun = {run.name: run for run in _runs(folder) if run.count()}
    if not begun:
        raise OptionError(f"no run in {folder} has taken a step")
    for name in names:
        check_name(f"run in {folder}", name, begun)
    colours, shown = colours_of(begun), {name: begun[name] for name in names or begun}
    parts = {name: [key for key in run.keys("step") if key.endswith("_loss")] for name, run in shown.items()}
    weights = {name: [key.replace("_loss", "_weight") for key in keys] for name, keys in parts.items()}
    scales = {name: ["loss_scale"] for name in shown}
    figure = Figure(figsize=(12, 3.2), layout="constrained")
    drawn = [parts, *(keys for keys in (weights, scales) if _vary(shown, keys))]
    for keys, axis in zip(drawn, figure.subplots(1, len(drawn), squeeze=False)[0], strict=True):
        for name, run in shown.items():
            seen, skipped = run.column("num_samples").cumsum(), run.column("skipped").astype(bool)
            look: Any = {"drawstyle": "steps-post" if keys is scales else "default"}
            look |= {"lw": 5, "alpha": 0.35} if name == next(iter(shown)) else {}
            for style, key in zip(("-", "--", ":"), keys[name], strict=False):
                label = as_label(name) if keys is parts and style == "-" else None
                axis.plot(seen, run.column(key), ls=style, color=colours[name], label=label, **look)
                if keys is scales:
                    axis.plot(seen[skipped], run.column(key)[skipped], "x", color=colours[name])
        axis.set_xlabel("samples")
        if keys is scales:
            axis.set(title="loss scale (x: step skipped)", yscale="log")
        elif keys is weights:
            axis.set(title="weights of the objectives", ylim=(0, 1.05 * axis.get_ylim()[1]))
        else:
            axis.set(title="loss by objective, without its weight", ylabel="nats")
    kinds = zip(("solid", "dashed", "dotted"), next(iter(parts.values())), strict=False)
    title = "\n".join(f"{style}: {key.removesuffix('_loss')}" for style, key in kinds)
    figure.legend(loc="outside right upper", frameon=False, fontsize=8, title=title, title_fontsize=8)
    return figure


def _vary(runs: Mapping[str, RunState], keys: Mapping[str, list[str]]) -> bool:
    """Whether these values are not the same in all steps of all runs; a step that learnt nothing has none."""
    values = np.concatenate([[], *(run.column(key) for name, run in runs.items() for key in keys[name])])
    return len(np.unique(values[np.isfinite(values)])) > 1


def _runs(folder: str | Path) -> list[RunState]:
    runs = Runs(folder)
    runs.poll()
    return runs.ordered
