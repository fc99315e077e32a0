"""For notebooks: train one model under several settings, one after the other, and compare the runs.

Every run is a `FusionTrainer` on a copy of the same model and on the same batches. It writes its events to
its own folder below a common one, where a `LivePanel` can draw them. `Lab`, by contrast, compares schedulers,
and trains in a process of its own.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from torch import nn

from mmlab.comparison.run import Run
from mmlab.runs.events import EVENT_FILES
from mmlab.runs.figures import colours_of
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
        One row per run in the folder: steps, skipped steps, the median time of a step, the held-out loss.

    Raises:
        OptionError: an option cannot work.
    """
    window, rule = options.accumulation_steps, options.weighting
    name = " ".join([options.precision] + [f"x{window}"] * (window > 1) + [rule] * (rule != "fixed"))
    weighting = make_weighting(rule, list(objectives), interval=5, smoothing=0.3)
    with Run(move_earlier_aside(Path(folder) / name, (EVENT_FILES,))) as run:
        run.start(run_name=name, precision=options.precision, num_steps=-(-len(batches) // window))
        learner = copy.deepcopy(model)
        trainer = FusionTrainer(learner, options, objectives=objectives, weighting=weighting, emit=run.emit)
        run.fit(trainer, batches)
        run.write("eval", **trainer.evaluate(held_out))
    rows = {}
    for each, state in _runs(folder).items():
        rows[each] = {
            "steps": state.count(),
            "skipped": int(state.column("skipped").sum()),
            "step, ms": round(1e3 * np.median(state.column("step_s", start=min(1, state.count() - 1))), 1),
            "held-out loss": state.latest("eval").get("loss"),
        }
    return pd.DataFrame.from_dict(rows, orient="index")


def settings_figure(folder: str | Path) -> Figure:
    """Loss by objective, weights and loss scale of every run in a folder, over the samples seen."""
    figure = Figure(figsize=(12, 3.2), layout="constrained")
    loss, weight, scale = figure.subplots(1, 3)
    begun = {name: run for name, run in _runs(folder).items() if run.count()}
    for name, colour in colours_of(begun).items():
        run = begun[name]
        seen, scales = run.column("num_samples").cumsum(), run.column("loss_scale")
        parts = [key for key in run.keys("step") if key.endswith("_loss")]
        for style, key in zip(("-", "--", ":"), parts, strict=False):
            loss.plot(seen, run.column(key), ls=style, color=colour, label=name if style == "-" else None)
            weight.plot(seen, run.column(key.replace("_loss", "_weight")), ls=style, color=colour)
        scale.step(seen, scales, where="post", color=colour)
        skipped = run.column("skipped").astype(bool)
        scale.plot(seen[skipped], scales[skipped], "x", color=colour)
    loss.set(title="loss by objective, without its weight", xlabel="samples", ylabel="nats")
    weight.set(title="weights of the objectives", xlabel="samples", ylim=(0, None))
    scale.set(title="loss scale (x: step skipped)", xlabel="samples", yscale="log")
    if begun:
        figure.legend(loc="outside right upper", frameon=False, fontsize="small")
    return figure


def _runs(folder: str | Path) -> dict[str, RunState]:
    runs = Runs(folder)
    runs.poll()
    return runs.states
