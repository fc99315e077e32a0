"""A comparison is fair and says what it measured: same start, same samples, everything kept, errors that help."""

from __future__ import annotations

import atexit
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryFile
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest

from mmlab.comparison.background import start_compare
from mmlab.comparison.experiment import _warm_page_cache, compare
from mmlab.comparison.options import ComparisonOptions
from mmlab.comparison.preparation import hold_out
from mmlab.comparison.result import Comparison, load_comparison
from mmlab.comparison.run import Run
from mmlab.comparison.sizing import size_schedulers
from mmlab.comparison.turns import COUNT_EVERY, ComparisonRun
from mmlab.data.dataset import MultimodalDataset
from mmlab.data.records import Records
from mmlab.errors import DataError, OptionError
from mmlab.machine import resolve_device
from mmlab.pricing.equal_memory import EqualMemory
from mmlab.pricing.time_model import TimeModel
from mmlab.runs.events import read_runs
from mmlab.runs.figures import colours_of
from mmlab.runs.folders import exclusive_folder
from mmlab.runs.meters import LiveBytes
from mmlab.schedule.cost import MaxPolynomial, batch_costs
from mmlab.schedule.schedulers import make_scheduler
from mmlab.types import BatchShape, SampleSizes, parse_image_policy
from tests.prices import priced_once, speck

SMALL = {"image": "aspect:48", "batch_size": 8, "epochs": 2, "num_workers": 0, "progress": False}
SMALL |= {"equal": "batch_size", "model": "speck"}
SHORT = {**SMALL, "epochs": 1, "limit": 40}


@pytest.fixture(scope="module", autouse=True)
def small_and_priced_once() -> Iterator[None]:
    fits = ("mmlab.comparison.sizing.fit_memory", "mmlab.comparison.sizing.fit_time")
    with speck(), priced_once(*fits, "mmlab.comparison.plan.fit_memory"):
        yield


@pytest.fixture(scope="module")
def comparison(records: Records, tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    out = tmp_path_factory.mktemp("runs") / "first"
    return compare(records, ("budget", "random"), out=out, **SMALL)


def test_every_arm_sees_every_sample_once_an_epoch(comparison: Comparison) -> None:
    steps = comparison.steps
    seen = steps.groupby(["run", "epoch"])["num_samples"].sum()
    assert set(seen.index.get_level_values("run")) == {"random", "budget"}
    assert (seen == comparison.config["num_train"]).all()
    assert len(seen) == 2 * SMALL["epochs"]


def test_the_plan_was_right_and_the_budget_held(comparison: Comparison) -> None:
    by_name = {arm.scheduler: arm for arm in comparison.arms}
    for arm in comparison.arms:
        assert arm.shape_mismatches == 0
        assert arm.combined_waste == pytest.approx(arm.planned_combined_waste, abs=1e-9)
        assert len(arm.epochs) == SMALL["epochs"]
        assert 0 <= arm.data_wait_ratio < 1
    assert by_name["budget"].batches_over_budget == 0
    assert by_name["budget"].peak_over_budget <= 1
    assert by_name["random"].peak_over_budget > 1
    assert by_name["budget"].combined_waste < by_name["random"].combined_waste
    assert by_name["budget"].peak_bytes < by_name["random"].peak_bytes


def test_predicted_bytes_and_their_limit_stand_beside_every_arms_steps(
    records: Records, tmp_path: Path
) -> None:
    cost = MaxPolynomial([[1000.0, 1000.0]], [(1, 1, 0), (1, 0, 1)], unit="bytes")
    planners = {
        "random": make_scheduler("random", batch_size=8),
        "memory": make_scheduler("memory", cost=cost, budget=200_000),
    }
    steps = compare(records, planners, out=tmp_path, **{**SMALL, "epochs": 1}).steps
    assert (steps["limit_bytes"] == 200_000).all()
    shapes = steps[["num_samples", "num_tokens", "height", "width"]].astype(int)
    assert steps["predicted_bytes"].tolist() == [int(cost(BatchShape(*row))) for row in shapes.values]
    within = steps["predicted_bytes"] <= steps["limit_bytes"]
    assert within[steps["run"] == "memory"].all()


def test_peak_memory_is_measured_on_the_batch_that_needs_the_most_bytes(
    records: Records, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_texts, measured = MaxPolynomial([[1000.0]], [(1, 2, 0)], unit="bytes"), {}

    def peak_of_one_step(setup: Any, plan: Any, rows: list[int]) -> tuple[int, str]:
        place = [sorted(batch) for batch in plan].index(sorted(rows))
        costs = plan.costs(of_texts)
        measured[type(plan.source.scheduler).__name__] = costs[place] / costs.max()
        return 1, "nothing"

    monkeypatch.setattr("mmlab.comparison.turns.ComparisonSetup.peak_of_one_step", peak_of_one_step)
    planners = {
        "random": make_scheduler("random", batch_size=8),
        "memory": make_scheduler("memory", cost=of_texts, budget=2_000_000),
    }
    compare(records, planners, **{**SMALL, "epochs": 1})
    assert list(measured.values()) == [1, 1]


def test_peak_memory_of_packs_is_that_of_the_most_tokens_or_of_the_most_pixels(
    records: Records, monkeypatch: pytest.MonkeyPatch
) -> None:
    areas: list[float] = []

    def peak_of_one_step(setup: Any, plan: Any, rows: list[int]) -> tuple[int, str]:
        place = [sorted(batch) for batch in plan].index(sorted(rows))
        area = plan.shape_columns[:, [0, 2, 3]].prod(axis=1)
        assert place in (area.argmax(), plan.costs().argmax())
        areas.append(area[place] / area.max())
        return int(area[place]), "pixels"

    monkeypatch.setattr("mmlab.comparison.turns.ComparisonSetup.peak_of_one_step", peak_of_one_step)
    planners = {f"seed {seed}": make_scheduler("packed", budget=300, seed=seed) for seed in range(5)}
    found = compare(records, planners, **{**SMALL, "epochs": 1})
    assert len(areas) == 2 * len(planners)
    assert min(areas) < 1, "of one plan, another pack has the most tokens"
    for arm, two in zip(found.arms, np.reshape(areas, (-1, 2)), strict=True):
        assert max(two) == 1
        assert arm.peak_source == "pixels"
    assert "fixed batch size" not in str(found.notes()), "each scheduler has what it was configured with"


def test_a_run_has_the_device_to_itself_in_its_turn(records: Records) -> None:
    peaks = []
    for names in (("one",), ("one", "two", "three")):
        planners = {name: make_scheduler("random", batch_size=8) for name in names}
        with LiveBytes() as live:
            found = compare(records, planners, **SHORT)
        assert len({arm.peak_bytes for arm in found.arms}) == 1
        peaks.append(live.peak_bytes)
    assert peaks[1] <= 1.01 * peaks[0], "models that wait are still there"


def test_memory_is_chosen_by_name_with_a_stated_limit(records: Records, tmp_path: Path) -> None:
    found = compare(records, ("random", "memory"), out=tmp_path, memory_gb=1.05, **{**SMALL, "epochs": 1})
    limit_bytes = found.config["memory_limit_bytes"]
    assert 0 < limit_bytes <= 0.05 * 2**30 + 1
    steps = found.steps[found.steps["run"] == "memory"]
    assert (steps["limit_bytes"] == limit_bytes).all()
    assert (steps["predicted_bytes"] <= limit_bytes).all()
    assert found.arms[1].peak_bytes <= limit_bytes
    assert steps["num_samples"].max() > 8, "larger batches than those of a fixed size"


@pytest.fixture(scope="module")
def at_equal_memory(records: Records, tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    names = ("random", "sorted", "budget", "fastest", "packed")
    return compare(records, names, out=tmp_path_factory.mktemp("equal"), **{**SMALL, "equal": "memory"})


def test_at_equal_memory_every_scheduler_fills_the_same_bytes(at_equal_memory: Comparison) -> None:
    config, arms = at_equal_memory.config, {arm.scheduler: arm for arm in at_equal_memory.arms}
    limit_bytes = config["memory_limit_bytes"]
    assert (config["equal"], config["budget"]) == ("memory", None)
    assert arms["random"].peak_over_budget == 1, "the limit is its own peak"
    assert arms["random"].options["batch_size"] == "8"
    assert int(arms["sorted"].options["batch_size"]) > 8, "it pads less, so more samples fit"
    for arm in arms.values():
        assert arm.batches_over_budget == arm.shape_mismatches == 0
        assert arm.peak_bytes <= 1.02 * limit_bytes
    assert arms["sorted"].peak_over_budget > 0.8
    steps = at_equal_memory.steps
    assert (steps["limit_bytes"] == limit_bytes).all()
    assert (steps["predicted_bytes"].dropna() <= limit_bytes).all()
    assert all(arm.options["allow_collisions"] == "False" for arm in arms.values())
    assert "No batch of any scheduler holds two captions of one image." in at_equal_memory.notes()
    (said,) = [note for note in at_equal_memory.notes() if "at most: " in note]
    sizes = said.split("at most: ")[1].split(", ")
    assert len(sizes) == len(arms)
    assert sizes[-2:] == [
        "fastest whatever fits",
        f"packed {arms['packed'].options['budget']} padded tokens.",
    ]
    assert "packed, whose bytes are not predicted" in str(at_equal_memory.notes())


def test_predicted_speed_stands_beside_the_measured_one(at_equal_memory: Comparison) -> None:
    assert at_equal_memory.folder is not None
    time = TimeModel.load(at_equal_memory.folder / "time_model.json")
    for arm in at_equal_memory.arms:
        assert arm.predicted_samples_per_s is not None
        own = at_equal_memory.steps[at_equal_memory.steps["run"] == arm.scheduler]
        if arm.scheduler != "packed":
            shapes = own[["num_samples", "num_tokens", "height", "width"]].astype(int)
            is_new = ~own[["epoch", "num_samples", "height", "width"]].duplicated()  # which takes longer
            expected = [time(BatchShape(*shape)) for shape in shapes.values] + is_new * time.new_shape_s
            expected += time.shared_s_per_sample * shapes["num_samples"]  # for loading, on the same cores
            assert own["predicted_cost"].tolist() == pytest.approx(expected.tolist())
        speeds = [epoch["num_samples"] / epoch["predicted_epoch_s"] for epoch in _by_epoch(own)]
        assert arm.predicted_samples_per_s == pytest.approx(np.median(speeds))
    assert "predicted samples/s" in at_equal_memory.summary().columns
    assert load_comparison(at_equal_memory.folder).as_dict() == at_equal_memory.as_dict()


def _by_epoch(steps: pd.DataFrame) -> list[dict[str, float]]:
    epochs = steps.groupby("epoch")
    return [
        {"num_samples": one["num_samples"].sum(), "predicted_epoch_s": one["predicted_cost"].sum()}
        for _, one in epochs
    ]


def test_pairs_that_were_ranked_the_wrong_way_are_named(at_equal_memory: Comparison) -> None:
    first, second, third, *_ = at_equal_memory.arms
    speeds = ((first, 100.0, 90.0), (second, 120.0, 80.0), (third, 103.0, 95.0))
    arms = [
        replace(
            arm,
            samples_per_s=measured,
            predicted_samples_per_s=predicted,
            epochs=[{**arm.epochs[0], "samples_per_s": measured}],
        )
        for arm, measured, predicted in speeds
    ]
    found = replace(at_equal_memory, arms=arms)
    found = replace(found, arms=[replace(arm, num_batches=20) for arm in arms])
    assert found.misranked == [("sorted", "random"), ("sorted", "budget")]
    assert "sorted is faster than random, sorted is faster than budget" in "".join(found.notes())
    assert "Predicted samples/s are -33% to -8% off those measured." in found.notes()
    for factor, pace in ((0.5, "slower"), (2.0, "faster")):
        changed = [replace(arm, predicted_samples_per_s=factor * arm.samples_per_s) for arm in arms]
        said = " ".join(replace(found, arms=changed).notes())
        assert f"the machine was probably {pace} when steps were timed." in said
    assert not any("too short to judge speed" in note for note in found.notes())
    short = replace(found, arms=[found.arms[0], replace(arms[1], num_batches=19)])
    assert any(note.startswith("An epoch of 19 steps is too short to judge speed") for note in short.notes())
    assert "The number of optimizer steps differs between schedulers." in short.notes()
    assert short.headline.endswith("as random, but an epoch of 19 steps is too short to judge speed")
    assert "is faster than" not in "".join(short.notes())
    assert replace(found, arms=arms[::2]).misranked == []
    wide = [replace(arm, epochs=[{"samples_per_s": speed} for speed in (90.0, 130.0)]) for arm in arms]
    assert replace(found, arms=wide).misranked == []  # their epochs overlap


def test_a_memory_limit_bounds_every_scheduler(records: Records) -> None:
    options = {**SMALL, "epochs": 1, "equal": "memory"}
    found = compare(records, ("random", "bucket", "memory"), memory_gb=1.05, **options)
    assert found.config["memory_limit_bytes"] <= 0.05 * 2**30 + 1
    assert all(arm.peak_over_budget <= 1 for arm in found.arms)
    assert int(found.arms[0].options["batch_size"]) > 8
    with pytest.raises(
        OptionError, match=r"sample \d+ alone .* costs [\d.]+ MiB, above the budget of .*raise memory_gb"
    ):
        compare(records, ("random",), memory_gb=1.001, **options)


def test_the_limit_holds_in_late_epochs_too(records: Records) -> None:
    """Sizes are sought by three epochs; under this limit five samples a batch fit these, and not a later one."""
    options = ComparisonOptions(image="aspect:48", epochs=30, memory_gb=1.004, model="speck", device="cpu")
    dataset = MultimodalDataset(records, image_policy=parse_image_policy(options.image))
    memory = size_schedulers(["random"], options, dataset, progress=False).memory
    five = make_scheduler("random", batch_size=5, allow_collisions=False)
    peaks = [
        float(five.plan(dataset.sizes, epoch=epoch).costs(memory).max()) for epoch in range(options.epochs)
    ]
    limit_bytes = (max(peaks[:3]) + max(peaks)) / 2
    assert max(peaks[:3]) < limit_bytes
    tight = replace(options, memory_gb=1 + limit_bytes / 2**30)
    sized = size_schedulers(["random"], tight, dataset, progress=False)
    assert sized.limit_bytes == pytest.approx(limit_bytes, abs=2)
    assert sized.planners["random"].batch_size == 4


def test_a_scheduler_that_cannot_keep_within_the_limit_is_named() -> None:
    """One large image with few words: a budget of its padded tokens lets so many small samples together need more."""
    side = np.where(np.arange(400) == 0, 512, 16)
    words = np.random.default_rng(0).integers(5, 40, 400)
    sizes = SampleSizes(num_tokens=words, height=side, width=side, group=np.arange(400))
    exponents = np.array([[0, 0, 0], [1, 0, 0], [1, 1, 0], [1, 0, 1], [2, 0, 0]])
    memory: Any = MaxPolynomial([[1e6, 2e5, 1e3, 1e3, 2e4]], exponents, "bytes")
    equal = EqualMemory(
        sizes=sizes, memory=memory, plans_of=lambda kind: iter([kind.plan(sizes)]), batch_size=2, options={}
    )
    alone = float(batch_costs(memory, sizes.alone).max())
    random, _ = equal.baseline(1.02 * alone)
    assert random.batch_size >= 1
    with pytest.raises(OptionError, match=r"'budget' cannot stay within .* raise memory_gb, or leave"):
        equal.schedulers(["budget"], random, 1.02 * alone, time=None)
    budget = equal.schedulers(["budget"], random, 64 * alone, time=None)["budget"]
    assert budget.plan(sizes).costs(memory).max() <= 64 * alone
    # without a margin of its own, which the others do not have
    own = equal.schedulers(["memory"], random, 1.01 * alone, time=None)["memory"]
    assert alone <= own.plan(sizes).costs(memory).max() <= 1.01 * alone


def test_a_budget_in_tokens_takes_the_place_of_equal_memory(records: Records) -> None:
    found = compare(records, ("budget",), budget=300, **{**SMALL, "epochs": 1, "equal": "memory"})
    assert (found.config["equal"], found.config["budget"]) == ("batch_size", 300)
    assert found.arms[0].predicted_samples_per_s is None


def test_augmentation_ratios_and_difficulty_are_chosen_by_name(records: Records) -> None:
    plain = compare(records, ("random",), **SHORT).arms[0]
    changed = compare(records, ("random",), augment="colour", **SHORT).arms[0]
    assert changed.shape_mismatches == 0
    assert changed.final_loss != plain.final_loss
    drawn = compare(records, ("random",), adaptive="sampling", correct=True, **SHORT).arms[0]
    weighted = compare(records, ("random",), adaptive="loss", precision="fp16", **SHORT).arms[0]
    assert weighted.peak_bytes > 0.8 * plain.peak_bytes, (
        "with the optimizer's state, although fp16 skips its first steps"
    )
    assert len({plain.final_loss, drawn.final_loss, weighted.final_loss}) == 3
    whole = {**SMALL, "epochs": 1}
    pairs = zip(records.image_paths, records.texts, records.splits, strict=True)
    rows = [{"image": str(path), "text": text, "split": split} for path, text, split in pairs]
    rows.append({"text": "without an image", "split": "train"})
    shares = {"image-text": 1, "text-only": 0}
    mixed = compare(rows, ("budget",), ratios=shares, length="oversample", **whole).arms[0]
    assert (mixed.num_unlearnt_samples, mixed.num_samples) == (0, 54), "without the one that is left out"
    with pytest.raises(OptionError, match="unknown augmentation 'colours'; did you mean 'colour'"):
        compare(records, ("random",), augment="colours", **SHORT)
    with pytest.raises(OptionError, match="ratios and adaptive='sampling' both choose"):
        compare(records, ("random",), ratios={"image-text": 1.0}, adaptive="sampling", **SHORT)


def test_no_peak_is_counted_before_the_optimizer_has_its_state() -> None:
    trainer = SimpleNamespace(optimizer=SimpleNamespace(state={}), meter=SimpleNamespace(live=None))
    run: Any = SimpleNamespace(_trainer=trainer, _epoch=SimpleNamespace(count=lambda: 2), _counted={2})
    ComparisonRun._choose_counting(run)  # fp16 has skipped the steps so far
    assert (trainer.meter.live, run._counted) == (None, {2, 3})


def test_arms_start_from_the_same_weights(records: Records, tmp_path: Path) -> None:
    planners = {"one": make_scheduler("random", batch_size=8), "two": make_scheduler("random", batch_size=8)}
    twins = compare(records, planners, out=tmp_path / "twins", **{**SMALL, "epochs": 1})
    losses = twins.steps.pivot(index="step", columns="run", values="loss")
    np.testing.assert_array_equal(losses["one"], losses["two"])
    assert twins.arms[0].final_loss == twins.arms[1].final_loss


def test_what_is_saved_reads_back_and_is_complete(comparison: Comparison) -> None:
    assert comparison.folder is not None
    again = load_comparison(comparison.folder)
    assert again.as_dict() == comparison.as_dict()
    saved = json.loads((comparison.folder / "comparison.json").read_text())
    needed = "scheduler num_samples num_batches samples_per_s step_s data_wait_ratio text_waste image_waste"
    needed += " combined_waste peak_bytes peak_source final_loss"
    for arm in saved["arms"]:
        assert set(needed.split()) <= set(arm)
    assert (comparison.folder / "figure.png").read_bytes().startswith(b"\x89PNG")
    page = (comparison.folder / "report.html").read_text()
    assert "data:image/png;base64" in page
    assert "://" not in page.split("<details>")[0]  # not in the picture, whose letters are any
    assert "random" in (comparison.folder / "table.csv").read_text()
    assert "combined waste" in comparison._repr_html_()
    strange = replace(comparison, arms=[replace(arm, peak_source="<b>") for arm in comparison.arms])
    assert "Peak memory is &lt;b&gt;." in strange._repr_html_()
    assert repr(comparison) == comparison.summary().to_string()


def test_names_of_a_users_own_schedulers_are_no_formulas(comparison: Comparison) -> None:
    names = [r"a$\frac{b$", "_c"]
    arms = [replace(arm, scheduler=name) for arm, name in zip(comparison.arms, names, strict=True)]
    waste, *_, loss = replace(comparison, arms=arms).figure().axes
    assert [text.get_text() for text in waste.get_xticklabels()] == [r"a\$\frac{b\$", " _c"]
    assert [text.get_text() for text in loss.get_legend().get_texts()] == [r"a\$\frac{b\$", " _c"]
    many = [replace(arms[0], scheduler=f"scheduler {number}") for number in range(6)]
    waste, *_ = replace(comparison, arms=many).figure().axes
    assert {text.get_ha() for text in waste.get_xticklabels()} == {"right"}, "tilted, a name ends at its bars"


def test_a_folder_of_data_whose_name_is_not_utf8_is_drawn_and_shown(
    comparison: Comparison, tmp_path: Path
) -> None:
    strange = replace(comparison, config={**comparison.config, "data": os.fsdecode(b"caf\xe9")})
    assert r"caf\udce9" in (strange.save(tmp_path) / "report.html").read_text()


@pytest.mark.parametrize(
    ("fast", "headline", "noted"),
    [
        ((300.0, 310.0), "budget trains 3.05 times as many samples/s as random", False),
        (
            (90.0, 120.0),
            "budget trains 1.05 times as many samples/s as random, but their epochs overlap",
            True,
        ),
        ((80.0, 85.0), "random trains 1.21 times as many samples/s as budget", False),
        ((101.0, 112.0), "budget trains 1.06 times as many samples/s as random", False),  # in every pair
    ],
)
def test_schedulers_whose_epochs_overlap_are_said_to_be_alike(
    fast: tuple[float, float], headline: str, noted: bool, comparison: Comparison
) -> None:
    budget, random = comparison.arms
    arms = [
        replace(
            arm,
            samples_per_s=sum(speeds) / 2,
            epochs=[{**arm.epochs[0], "samples_per_s": s} for s in speeds],
            num_batches=20,
        )
        for arm, speeds in ((budget, fast), (random, (95.0, 105.0)))
    ]
    found = replace(comparison, arms=arms, config=comparison.config | {"data": r"a$\frac{b$"})
    assert not any("optimizer steps" in note for note in found.notes()), "both have 20"
    assert found.headline == f"At the batch sizes given, {headline}"
    figure = found.figure()
    assert figure.get_suptitle().replace("\n", " ").startswith(found.headline)
    figure.draw_without_rendering()
    assert max(text.get_window_extent().width for text in figure.texts) < figure.bbox.width
    assert any(note.startswith("No scheduler is faster than another") for note in found.notes()) == noted
    both = replace(found, arms=[*arms, replace(arms[0], scheduler="bucket")])
    assert ("budget (level with bucket) trains" in both.headline) == (sum(fast) > 200)
    assert any(note.endswith("in samples/s: budget and bucket.") for note in both.notes()) != noted
    without = replace(found, arms=[replace(arms[1], scheduler="sorted"), *both.arms[::2]])
    assert ("samples/s as sorted" in without.headline) == (sum(fast) > 200), "the first, as in the panel"


def test_the_figure_has_the_schedulers_in_their_order_and_colours(comparison: Comparison) -> None:
    drawn = {line.get_label(): line.get_color() for line in comparison.figure().axes[-1].lines}
    assert list(drawn.items()) == [*colours_of(["budget", "random"]).items()]


def test_the_figure_draws_batches_in_the_unit_of_their_limit_also_where_seconds_were_predicted(
    records: Records, tmp_path: Path
) -> None:
    found = compare(records, ("random", "fastest"), out=tmp_path, **SHORT)
    costs = found.figure().axes[4]
    assert costs.get_ylabel() == "padded tokens"
    for arm, line in zip(found.arms, costs.lines, strict=False):
        steps = found.steps[found.steps["run"] == arm.scheduler]
        drawn = steps["padded_tokens"] + steps["padded_patches"]
        assert line.get_ydata().tolist() == drawn.tolist()
        assert drawn.max() / found.config["budget"] == pytest.approx(arm.peak_over_budget)


def test_each_run_has_a_start_with_what_is_to_come_device_readings_and_an_end(comparison: Comparison) -> None:
    assert comparison.folder is not None
    events = read_runs(comparison.folder / "runs")
    assert len({len(epoch) for _, epoch in comparison.steps.groupby(["run", "epoch"])}) > 1
    for _, run in events.groupby("run"):
        kinds, first = run["kind"].tolist(), run.iloc[0]
        assert first["num_steps"] == kinds.count("step"), "epochs differ in length"
        assert first["planned_cost"] == pytest.approx(run["predicted_cost"].sum())
        assert kinds[0] == "start"
        assert kinds[-1] == "end"
        assert kinds.count("start") == kinds.count("end") == 1
        assert "device" in kinds


def test_an_earlier_comparison_is_moved_aside(records: Records, tmp_path: Path) -> None:
    compare(records, ("random",), out=tmp_path, **SHORT)
    first = (tmp_path / "comparison.json").read_text()
    compare(records, ("sorted",), out=tmp_path, **SHORT)
    assert (tmp_path / "previous-1" / "comparison.json").read_text() == first
    assert [arm.scheduler for arm in load_comparison(tmp_path).arms] == ["sorted"]


def test_a_second_comparison_in_a_folder_is_refused_and_moves_nothing(
    records: Records, tmp_path: Path
) -> None:
    (tmp_path / "table.csv").write_text("of the first")
    refused = f"another run is active in {tmp_path}.*; stop it, or name another folder"
    with exclusive_folder(tmp_path):
        with pytest.raises(OptionError, match=refused):
            compare(records, ("random",), out=tmp_path, **SHORT)
        with pytest.raises(OptionError, match=refused):
            start_compare("pairs.csv", out=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["table.csv"]


def test_held_out_images_are_never_trained_on(records: Records) -> None:
    train, held_out = hold_out(records)
    assert len(train) + len(held_out) == len(records)
    assert not set(train.group.tolist()) & set(held_out.group.tolist())
    assert set(held_out.splits or ()) == {"val"}
    unmarked = records.select(range(len(records)))
    train, held_out = unmarked.split("train").hold_out(0.2)
    assert not set(train.group.tolist()) & set(held_out.group.tolist())


@pytest.mark.parametrize("name", ["Val", "valid", "VALIDATION", "dev", "eval", "Test"])
def test_usual_names_of_splits_are_held_out_in_any_case(records: Records, name: str) -> None:
    splits = [("train", None, name)[group % 3] for group in records.group]
    train, held_out = hold_out(replace(records, splits=splits))
    assert (set(train.splits or ()), set(held_out.splits or ())) == ({"train", None}, {name})
    with_test = replace(records, splits=["TEST" if split == "train" else split for split in splits])
    train, held_out = hold_out(with_test)
    assert set(train.splits or ()) == {None}
    assert set(held_out.splits or ()) == ({name, "TEST"} if name == "Test" else {name})
    train, held_out = hold_out(with_test.split(name))  # nothing else: as without splits
    assert len(train) + len(held_out) == splits.count(name)


def test_an_image_that_is_held_out_is_not_trained_on_by_another_caption(records: Records) -> None:
    splits = list(records.splits or ())
    splits[splits.index("val")] = "train"
    with pytest.warns(UserWarning, match="1 training pairs show images held out too; they are left out"):
        train, held_out = hold_out(replace(records, splits=splits))
    assert not set(train.group.tolist()) & set(held_out.group.tolist())
    assert len(train) + len(held_out) == len(records) - 1


def test_too_few_images_on_either_side_are_refused(records: Records) -> None:
    train, held_out = records.split("train"), records.split("val")
    one = [train.group[0], *np.unique(held_out.group)]
    with pytest.raises(DataError, match=r"3 are left to train on, in 1 group \("):
        hold_out(records.select(np.flatnonzero(np.isin(records.group, one))))
    some = [*np.unique(train.group)[:4], held_out.group[0]]
    with pytest.raises(
        DataError, match=r"of 15 samples 3 are left to hold out, in 1 group \(.*\), at least 2"
    ):
        hold_out(records.select(np.flatnonzero(np.isin(records.group, some))))
    _, two = hold_out(train.select(np.flatnonzero(np.isin(train.group, some))))
    assert len(np.unique(two.group)) == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epochs": 0}, "epochs must be at least 1, found 0"),
        ({"batch_size": 0}, "batch_size must be at least 1, found 0"),
        ({"seed": -3}, "seed must be at least 0, found -3"),
        ({"limit": 1}, "limit must be at least 2 samples"),
        ({"batch_size": 1.5}, "compare batch_size: expected a valid integer, found 1.5"),
        ({"batch_size": 100_000}, "compare: batch_size must be at most 65,536, found 100000"),
        ({"memory_gb": float("inf")}, "memory_gb"),
        ({"memory_gb": 2.0, "equal": "batch_size"}, "memory_gb needs schedulers by name, at equal memory"),
        ({"memory_gb": 2.0, "budget": 3000.0}, "memory_gb needs schedulers by name, at equal memory"),
        ({"lr": -1.0}, "compare: lr must be at least 0, found -1.0"),
        ({"seed": 2**64}, "seed must be at most"),
        ({"num_workers": -1}, "num_workers must be at least 0, found -1"),
        ({"images": "x"}, "images= applies only to data given as a path"),
        ({"budget": 3}, "budget"),
        ({"image": "round:3"}, "image policy 'round:3'"),
        ({"device": "cuda:77"}, "device 'cuda:77' cannot be used here"),
        ({"precision": "fp8"}, "fp8"),
        ({"model": "gigantic"}, "gigantic"),
    ],
)
def test_impossible_options_are_refused_by_name(records: Records, options: dict, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        compare(records, ("random", "budget"), **{**SMALL, **options})


def test_memory_that_configured_schedulers_would_not_fill_is_refused(records: Records) -> None:
    with pytest.raises(OptionError, match="memory_gb needs schedulers by name"):
        compare(records, {"mine": make_scheduler("random", batch_size=4)}, memory_gb=2.0)


def test_schedulers_must_be_known_and_named_once(records: Records) -> None:
    with pytest.raises(OptionError, match="unknown scheduler 'rndom'; did you mean 'random'"):
        compare(records, ("rndom",), **SMALL)
    with pytest.raises(OptionError, match="'random' is named twice"):
        compare(records, ("random", "random"), **SMALL)
    with pytest.raises(OptionError, match="cannot be packed: image_encoder ResNet"):
        compare(records, ("packed",), **{**SMALL, "model": "resnet18"})
    with pytest.raises(OptionError, match="no schedulers"):
        compare(records, (), **SMALL)
    planner = make_scheduler("random", batch_size=8)
    for planners in ({"mine": "random"}, {"../mine": planner}, {"": planner}, {"..": planner}, {1: planner}):
        with pytest.raises(OptionError, match="expected a name that a folder can have, and a scheduler"):
            compare(records, planners, **SMALL)  # type: ignore[arg-type]


def test_auto_device_is_usable() -> None:
    assert resolve_device("auto") in ("cpu", "cuda")
    assert resolve_device("cpu") == "cpu"
    for name in ("meta", "cuda:99", "abacus"):
        with pytest.raises(OptionError, match=f"device '{name}' cannot be used here"):
            resolve_device(name)


def test_errors_of_a_background_run_are_raised_by_wait(tmp_path: Path) -> None:
    run = start_compare(tmp_path / "nowhere", out=tmp_path / "out")
    with pytest.raises(DataError, match="nowhere"):
        run.wait()
    assert run.state == "failed"
    assert run.error is not None
    assert "Traceback" in run.error
    assert "nowhere" in (run.folder / "log.txt").read_text()


class SlowToEnd:
    """Data that keep the process that reads them from ending."""

    def __reduce__(self) -> tuple[Any, ...]:
        return atexit.register, (time.sleep, 120)


def test_a_run_has_ended_once_its_outcome_is_written(tmp_path: Path) -> None:
    """The teardown of torch takes seconds, for which a panel would show a run that goes on."""
    run = start_compare(SlowToEnd(), out=tmp_path)
    run.sleep(60)
    assert run.state == "failed"
    with pytest.raises(DataError):
        run.wait()


def test_an_error_in_training_names_its_scheduler(
    records: Records, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(ComparisonRun, "run_epoch", fail)
    with pytest.raises(RuntimeError, match="no such kernel"):
        compare(records, ("random", "sorted"), out=tmp_path, **SHORT)
    told = set(read_runs(tmp_path / "runs")["message"].dropna())
    assert told == {"no such kernel (while scheduler random trained)"}
    monkeypatch.setattr("mmlab.comparison.experiment._warm_page_cache", fail)
    with pytest.raises(RuntimeError, match="no such kernel"):
        compare(records, ("random", "sorted"), out=tmp_path, **SHORT)
    assert not list(tmp_path.glob("runs/*/*")), "views would wait for these runs"


def test_every_image_file_is_read_once_before_training_also_where_a_group_has_several() -> None:
    read: list[int] = []
    records = SimpleNamespace(image_paths=["a", "a", "b", None, "c"], group=np.array([0, 0, 0, 1, 1]))
    _warm_page_cache(SimpleNamespace(records=records, read=read.append), progress=False)
    assert sorted(str(records.image_paths[row]) for row in read) == ["a", "b", "c"]


def test_only_a_comparison_can_be_loaded(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no comparison in"):
        load_comparison(tmp_path)
    for content in ('{"arms": [{}]}', '{"arms": [], "interrupted": false}', "null", "[" * 100_000):
        (tmp_path / "comparison.json").write_text(content)
        with pytest.raises(DataError, match="not a comparison"):
            load_comparison(tmp_path)
    with pytest.raises(DataError, match="no comparison in"):
        load_comparison(tmp_path / "comparison.json")


def test_seconds_of_packed_pairs_are_those_of_steps_on_packs(
    records: Records, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ComparisonOptions(image="aspect:48", batch_size=8, epochs=1, model="speck", device="cpu")
    dataset = MultimodalDataset(records, image_policy=parse_image_policy("aspect:48"))
    seconds = {}
    for step_s in (1.0, 3.0):
        monkeypatch.setattr("mmlab.comparison.sizing.timed_step", lambda *of, step_s=step_s: step_s)
        sized = size_schedulers(("random", "packed"), options, dataset, progress=False)
        _, time = sized.prices(sized.planners["packed"].plan(dataset.sizes))
        assert time is not None
        assert sized.time is not None
        seconds[step_s] = time.rows.coefficients[0, 0] / sized.time.rows.coefficients[0, 0]
    assert seconds[3.0] == pytest.approx(3 * seconds[1.0])


def test_packed_plans_train_without_padding_within_their_budget(records):
    comparison = compare(records, ("budget", "packed"), **SMALL)
    padded, packed = comparison.arms
    assert packed.planned_combined_waste == packed.combined_waste == 0 < padded.combined_waste
    assert packed.num_samples == padded.num_samples
    assert packed.batches_over_budget == packed.shape_mismatches == 0
    assert packed.final_loss == pytest.approx(padded.final_loss, rel=0.5)


def test_rows_that_cannot_be_used_are_left_out_if_asked_for(records: Records) -> None:
    rows = [{"image": record.image_path, "text": record.text} for record in records[:60]]
    rows.append({"image": "gone.jpg", "text": "no such image"})
    with pytest.raises(DataError, match=r"(?s)item 60: gone.jpg: file not found.*skip_bad_rows"):
        compare(rows, ("random",), **SHORT)
    with pytest.warns(UserWarning, match="1 of 61 rows cannot be used and are left out"):
        found = compare(rows, ("random",), skip_bad_rows=True, **SHORT)
    assert "Rows that cannot be used, and are left out: 1." in found.notes()


def test_a_limit_keeps_the_split_to_hold_out_and_is_told(records: Records) -> None:
    found = compare(records, ("random",), **{**SMALL, "epochs": 1, "limit": 30, "batch_size": 60})
    assert 6 <= found.config["num_held_out"] < 12 < found.config["num_train"]
    notes = "\n".join(found.notes())
    assert "limit=30: pairs drawn by seed 0 from every split." in notes
    assert "batch_size 60 is more than the training pairs: no batch is that large." in notes


def test_on_a_cpu_live_tensors_are_counted_in_the_costliest_step_and_in_few_others(
    records: Records, tmp_path: Path
) -> None:
    planners = {"random": make_scheduler("random", batch_size=4)}
    found = compare(records, planners, out=tmp_path, **{**SMALL, "epochs": 3})
    steps = found.steps.reset_index(drop=True)
    counted = steps[steps["peak_bytes"].notna()]
    assert 1 <= len(counted) <= 1 + len(steps) / COUNT_EVERY
    assert set(steps["memory_source"]) == {"live tensors"}
    first_epoch = steps[steps["epoch"] == 0]
    assert first_epoch["predicted_cost"][1:].idxmax() == counted.index[0]
    assert counted["peak_bytes"].max() == pytest.approx(found.arms[0].peak_bytes, rel=0.1)
    assert steps["rss_bytes"].min() > counted["peak_bytes"].max(), "Python and torch are no tensors"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_request_to_end_after_the_last_epoch_loses_nothing(
    scenes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    measure = ComparisonRun.result
    monkeypatch.setattr(ComparisonRun, "result", lambda *of: (signal.raise_signal(number), measure(*of))[1])
    before = signal.signal(number, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            compare(
                scenes,
                ["random"],
                out=tmp_path,
                epochs=1,
                equal="batch_size",
                image="aspect:32",
                device="cpu",
            )
    finally:
        signal.signal(number, before)
    assert len(load_comparison(tmp_path).arms[0].epochs) == 1


def test_on_a_full_disk_the_epochs_that_all_have_finished_are_shown(
    scenes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def run_epoch(run: ComparisonRun, epoch: int, held_out: Any) -> None:
        return full() if epoch == fails_in else real(run, epoch, held_out)

    real, fails_in = ComparisonRun.run_epoch, 1
    monkeypatch.setattr(ComparisonRun, "run_epoch", run_epoch)
    rooms: list[Any] = []

    def leave(run: Run, *error: Any) -> None:
        assert rooms[-1].closed, "the room kept for them is not free when the ends are written"
        write_end(run, *error)

    def reserve(**where: Any) -> Any:
        rooms.append(TemporaryFile(**where))  # noqa: SIM115 (the comparison closes it)
        return rooms[-1]

    write_end = Run.__exit__
    monkeypatch.setattr(Run, "__exit__", leave)
    monkeypatch.setattr("mmlab.comparison.experiment.TemporaryFile", reserve)
    small: dict[str, Any] = {"epochs": 2, "equal": "batch_size", "image": "aspect:32", "device": "cpu"}
    with pytest.warns(UserWarning, match="stopped early, .*No space left"):
        found = compare(scenes, ["random", "sorted"], out=tmp_path, progress=False, **small)
    assert found.interrupted
    assert [len(arm.epochs) for arm in load_comparison(tmp_path).arms] == [1, 1]

    monkeypatch.setattr("mmlab.comparison.result.replace_file", full)  # to the end
    with pytest.raises(OSError, match="No space left"), pytest.warns(UserWarning, match="stopped early"):
        compare(scenes, ["random"], out=tmp_path / "other", progress=False, **small)
    assert "samples/s" in capsys.readouterr().err

    fails_in = 0
    with pytest.raises(OSError, match="No space left"):
        compare(scenes, ["random"], out=tmp_path / "third", progress=False, **small)


def test_an_error_loses_no_epoch_that_all_have_finished(scenes: Path, tmp_path: Path) -> None:
    copied, out = shutil.copytree(scenes.parent, tmp_path / "scenes"), tmp_path / "out"

    def remove_the_images() -> None:
        while not (out / "comparison.json").exists():
            time.sleep(0.01)
        for image in copied.rglob("*.jpg"):
            image.unlink()

    remover = threading.Thread(target=remove_the_images, daemon=True)
    remover.start()
    with pytest.raises(DataError) as caught:
        compare(copied, ["random", "sorted"], out=out, **{**SMALL, "epochs": 40})
    kept = f"load_comparison({str(out)!r}) has the epochs that all schedulers finished"
    assert kept in caught.value.__notes__
    remover.join()
    found = load_comparison(out)
    assert found.interrupted
    assert found.steps["run"].nunique() == 2
    assert len({len(arm.epochs) for arm in found.arms}) == 1
    assert found.figure().axes


def test_a_request_to_end_keeps_the_epochs_that_all_have_finished(scenes: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = [
        sys.executable,
        "-m",
        "mmlab",
        "compare",
        "--data",
        str(scenes),
        "--out",
        str(out),
        "--epochs",
        "100",
    ]
    command += [
        "--schedulers",
        "random,sorted",
        "--equal",
        "batch_size",
        "--batch-size",
        "8",
        "--image",
        "aspect:32",
        "--device",
        "cpu",
    ]
    with subprocess.Popen(
        command, stderr=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"}
    ) as process:
        events = out / "runs" / "sorted" / "events-rank0.jsonl"
        while not events.exists() or b'"kind":"eval"' not in events.read_bytes():
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 1
    found = load_comparison(out)
    assert found.interrupted
    assert 1 <= len(found.arms[0].epochs) < 100
    assert f"cover the {len(found.arms[0].epochs)} of 100 epochs" in found.notes()[0]
    for arm in found.arms:  # epochs that only one scheduler finished do not count
        assert arm.peak_over_budget == max(epoch["peak_over_budget"] for epoch in arm.epochs)
        assert arm.batches_over_budget == sum(epoch["batches_over_budget"] for epoch in arm.epochs)
        assert arm.shape_mismatches == 0
