"""A run from a file: killed, stopped and resumed it ends the same; what is wrong in the file is named."""

from __future__ import annotations

import inspect
import io
import json
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import fields, make_dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tqdm.auto import tqdm

from mmlab.cli.cache import cache_info
from mmlab.cli.main import main
from mmlab.comparison.config import CheckpointOptions, load_config
from mmlab.comparison.options import LoaderOptions
from mmlab.comparison.plan import _kept
from mmlab.comparison.train import load_trained, train
from mmlab.data.augment import Augment
from mmlab.data.readers import read_records
from mmlab.data.records import Records
from mmlab.errors import DataError, OptionError
from mmlab.loading.loader import PlannedLoader
from mmlab.runs.events import read_events
from mmlab.runs.folders import exclusive_folder
from mmlab.runs.follow import RunState
from mmlab.runs.summaries import progress_of
from mmlab.runs.trackers import current_events, export_run
from mmlab.schedule.classic import BatchScheduler
from mmlab.schedule.cost import PaddedTokens, batch_costs
from mmlab.schedule.schedulers import SCHEDULERS
from mmlab.training.checkpoint.files import read_checkpoint
from mmlab.training.checkpoint.keeping import Checkpoints
from tests.comparison.killed_while_training import kill_ten_times, stop_one_of_two_ranks
from tests.configs import TINY_MODEL
from tests.prices import priced_once
from tests.ranks import mmlab_command, run_ranks, started_ranks

CONFIG = (
    """
name = "{name}"
[data]
path = "{scenes}"
image = "aspect:32"
num_workers = 2
"""
    + TINY_MODEL
    + """dropout = 0.2
[scheduler]
name = "random"
batch_size = 3
[trainer]
num_epochs = 3
lr = 1e-3
objectives = ["contrastive", "matching"]
precision = "fp16"
device = "cpu"
[checkpoint]
every_steps = 2
"""
)


@pytest.fixture(scope="module")
def bytes_priced_once() -> Iterator[None]:
    """Bytes only: whether seconds were measured anew shows in their noise."""
    with priced_once("mmlab.comparison.plan.fit_memory"):
        yield


@pytest.fixture
def config(tmp_path: Path, scenes: Path) -> Path:
    path = tmp_path / "small.toml"
    path.write_text(CONFIG.format(name="small", scenes=scenes))
    return path


def steps_of(run: Path) -> list[tuple[int, float]]:
    events, _ = read_events(run / "events-rank0.jsonl")
    return [(event.step, event.values["loss"]) for event in current_events(events) if event.kind == "step"]


def final_state(run: Path) -> dict:
    return read_checkpoint(Checkpoints(run / "checkpoints").paths[-1])


def assert_equal(found: object, expected: object) -> None:
    """Bitwise, all the way down."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key in expected:
            assert_equal(found[key], expected[key])
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_equal(one, other)
    elif isinstance(expected, torch.Tensor):
        assert torch.equal(found, expected)
    else:
        assert found == expected


def test_a_held_out_image_that_cannot_be_read_is_left_out_as_in_training(
    tmp_path: Path, scenes: Path
) -> None:
    folder = tmp_path / "scenes"
    shutil.copytree(scenes.parent, folder)
    records = read_records(folder / scenes.name, progress=False)
    held_out = [row for row, split in enumerate(records.splits) if split == "val"]
    image = Path(records.image_paths[held_out[0]])
    image.write_bytes(image.read_bytes()[: image.stat().st_size // 2])
    config = CONFIG.replace("num_workers = 2", 'num_workers = 2\non_bad_sample = "skip"')
    config = config.replace("fp16", "fp32").replace("num_epochs = 3", "num_epochs = 1")
    (tmp_path / "skip.toml").write_text(config.format(name="skip", scenes=folder / scenes.name))
    on_ranks = partial(train, tmp_path / "skip.toml", runs=tmp_path, progress=False)
    result, _ = run_ranks(on_ranks, 2, joins=False)
    assert (result.status, result.evaluation["num_samples"]) == ("done", len(held_out) - 3)
    events = [
        event for rank in range(2) for event in read_events(tmp_path / f"skip/events-rank{rank}.jsonl")[0]
    ]
    told = [event.values["record_id"] for event in events if event.kind == "bad_sample"]
    assert sorted(told) == sorted(
        records.ids[row] for row in held_out if records.image_paths[row] == str(image)
    )


@pytest.mark.parametrize(
    "change",
    [
        *("augment.name=crop", "augment.hue=0.0", "augment.hue=0.1", "augment.name=none"),
        "augment={name='none', hue=0.1}",
    ],
)
def test_a_configuration_that_is_written_reads_back_as_it_was(
    change: str, config: Path, tmp_path: Path
) -> None:
    chosen = load_config(config, [change])
    (again := tmp_path / "again.toml").write_text(chosen.toml())
    assert load_config(again) == chosen


def test_a_scheduler_of_ones_own_is_configured_like_the_others(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its module may have types or, with annotations postponed, their names."""
    own = make_dataclass("Own", [("batch_size", int, 8)], bases=(BatchScheduler,), frozen=True, kw_only=True)
    monkeypatch.setitem(SCHEDULERS, "own", own)
    chosen = load_config(config, ["scheduler={name='own', batch_size=4}"])
    assert chosen.scheduler == {"name": "own", "batch_size": 4}


@pytest.mark.parametrize("value", ["9" * 5000, "[" * 5000 + "]" * 5000, "[" * 300 + "]" * 300])
def test_values_that_no_parser_takes_are_bad_input(value: str, config: Path) -> None:
    with pytest.raises(OptionError, match="trainer"):
        load_config(config, [f"trainer.freeze={value}"])
    config.write_text(config.read_text().replace("[trainer]", f"[trainer]\nfreeze = {value}"))
    with pytest.raises((DataError, OptionError), match=re.escape(str(config))):
        load_config(config)


def test_text_without_an_encoding_is_bad_input(config: Path) -> None:
    with pytest.raises(OptionError, match="keeps UTF-8 only"):
        load_config(config, ["data.path=a\udcff"])


@pytest.mark.parametrize(
    "change",
    [
        'name="./."',
        'name="a\\u0000"',
        f"trainer.accumulation_steps={10**30}",
        "augment.crop_ratio=[1.0, inf]",
        "augment.brightness=inf",
        f"augment.num_operations={10**30}",
        *(
            f"model.{size}={value}"
            for size in ("embed_dim", "fusion_heads", "head_dim")
            for value in (0, -1, 10**30)
        ),
        "model.fusion_levels=-1",
        "model.fusion_layers=-1",
        "model.image_depth=-1",
    ],
)
def test_values_that_cannot_work_are_refused_before_anything_is_loaded(change: str, config: Path) -> None:
    with pytest.raises(OptionError, match=change.partition("=")[0].split(".")[-1]):
        load_config(config, [change])


def test_a_cache_is_filled_before_training_and_changes_no_step(config: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    for folder, changes in (("plain", []), ("cached", [f"data.cache={cache}"])):
        train(load_config(config, ["trainer.num_epochs=1", *changes]), runs=tmp_path / folder, progress=False)
    assert steps_of(tmp_path / "cached" / "small") == steps_of(tmp_path / "plain" / "small")
    assert cache_info(cache).document["num_images"] == 24  # those held out too
    events, _ = read_events(tmp_path / "cached" / "small" / "events-rank0.jsonl")
    ratios = [event.values["cache_hit_ratio"] for event in events if "cache_hit_ratio" in event.values]
    assert ratios
    assert set(ratios) == {1.0}


def test_augmentation_and_sampling_are_chosen_in_the_file(
    config: Path, records: Records, tmp_path: Path
) -> None:
    pairs = zip(records.image_paths, records.texts, records.splits, strict=True)
    rows = [{"image": Path(path).name, "text": text, "split": split} for path, text, split in pairs]
    rows.append({"text": "without an image", "split": "train"})
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    mixed = [f"data.path={tmp_path / 'data.jsonl'}", f"data.images={Path(records.image_paths[0]).parent}"]
    shares = 'sampling.ratios=[[0, {"image-text" = 1, "text-only" = 0}]]'
    small, found = ["trainer.num_epochs=1", "data.limit=40"], []
    for name, changes in (
        ("plain", []),
        ("colour", ["augment.name=colour"]),
        ("drawn", ["sampling.adaptive=sampling", "sampling.correct=true", "scheduler.name=random"]),
        ("mixed", [*mixed, shares, "sampling.length=undersample"]),
    ):
        train(load_config(config, [*small, f"name={name}", *changes]), runs=tmp_path, progress=False)
        found.append(steps_of(tmp_path / name))
    assert len({tuple(steps) for steps in found}) == 4
    assert len({len(steps) for steps in found}) == 1, "as many samples an epoch"
    assert 'name = "colour"' in (tmp_path / "colour" / "config.toml").read_text()
    assert "brightness = 0.4" in (tmp_path / "colour" / "config.toml").read_text()
    assert load_config(tmp_path / "drawn" / "config.toml").sampling.correct


GROWING = '[[0, {"image-text" = 1, "text-only" = 0}], [3, {"image-text" = 1, "text-only" = 1}]]'


@pytest.mark.parametrize("ratios", [None, GROWING])
def test_the_steps_and_the_cost_of_all_epochs_are_known_from_the_start(
    config: Path, records: Records, tmp_path: Path, ratios: str | None
) -> None:
    changes = ["trainer.num_epochs=4", "scheduler.batch_size=16", 'trainer.objectives=["masked_language"]']
    if ratios:
        pairs = zip(records.image_paths, records.texts, records.splits, strict=True)
        rows = [{"image": Path(path).name, "text": text, "split": split} for path, text, split in pairs]
        rows += [{"text": f"text {number}", "split": "train"} for number in range(30)]
        (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
        changes += [
            f"data.path={tmp_path / 'data.jsonl'}",
            f"data.images={Path(records.image_paths[0]).parent}",
            f"sampling.ratios={ratios}",
            "sampling.length=oversample",
        ]
    train(load_config(config, changes), runs=tmp_path, progress=False)
    run = RunState(tmp_path / "small")
    run.poll()
    costs, start = run.column("predicted_cost"), run.latest("start")
    steps_of_epochs = np.unique(run.column("epoch"), return_counts=True)[1]
    assert start["num_steps"] == len(costs)
    assert start["planned_cost"] == pytest.approx(costs.sum(), rel=1e-6 if ratios else 0.1)
    assert (len(set(steps_of_epochs)) > 1) == bool(ratios)

    before_last = Checkpoints(tmp_path / "small" / "checkpoints").paths[-2]
    train(load_config(config, changes), runs=tmp_path, resume=str(before_last), progress=False)
    run = RunState(tmp_path / "small")
    run.poll()
    begun = run.event("start")
    steps, costs = run.done(("step", "predicted_cost"))
    assert begun.step > 0
    assert begun.values["num_steps"] == len(costs)
    assert begun.values["planned_cost"] == pytest.approx(costs[steps > begun.step].sum())
    assert progress_of([run]).done_ratio == 1


def test_the_options_of_the_file_are_those_of_loader_and_checkpoints() -> None:
    for options, configured in ((LoaderOptions, PlannedLoader), (CheckpointOptions, Checkpoints)):
        known = inspect.signature(configured).parameters
        for option in fields(options):
            assert known[option.name].default == option.default, option.name


def test_a_run_killed_ten_times_ends_bitwise_like_one_that_was_not(config: Path, tmp_path: Path) -> None:
    found = run_ranks(kill_ten_times, 1, config, tmp_path, joins=False)
    assert found == [{"num_killed": 10, "exit_code": 0}]
    assert len(steps_of(tmp_path / "whole")) == 54
    assert steps_of(tmp_path / "killed") == steps_of(tmp_path / "whole")
    assert_equal(final_state(tmp_path / "killed"), final_state(tmp_path / "whole"))


def test_two_ranks_stop_together_and_go_on_bitwise(config: Path, tmp_path: Path) -> None:
    found = run_ranks(stop_one_of_two_ranks, 1, config, tmp_path, joins=False)
    assert found == [{"whole": [0, 0], "stopped": [0, 15], "resumed": [0, 0]}]
    first, second = (read_events(tmp_path / "stopped" / f"events-rank{rank}.jsonl")[0] for rank in range(2))
    stops = [next(event for event in events if event.kind == "end") for events in (first, second)]
    assert stops[0].step == stops[1].step < 27
    assert [event.values["status"] for event in stops] == ["stopped", "stopped"]
    assert steps_of(tmp_path / "stopped") == steps_of(tmp_path / "whole")
    assert_equal(final_state(tmp_path / "stopped"), final_state(tmp_path / "whole"))


@pytest.mark.parametrize(
    ("number", "exit_code"),
    [(signal.SIGTERM, 128 + signal.SIGTERM), (signal.SIGHUP, 128 + signal.SIGHUP), (signal.SIGINT, 1)],
)
def test_a_signal_leaves_a_checkpoint_of_the_last_step(
    config: Path, tmp_path: Path, number: int, exit_code: int
) -> None:
    events, printed = tmp_path / "runs" / "small" / "events-rank0.jsonl", tmp_path / "stderr.txt"
    command = ["train", str(config), "--runs", str(tmp_path / "runs")]
    command += ["--set", "checkpoint.every_steps=1000", "--set", "trainer.num_epochs=100"]
    with started_ranks(mmlab_command, 1, command, printed, joins=False) as ranks:
        while not events.exists() or b'"kind":"step"' not in events.read_bytes():
            assert ranks.processes[0].is_alive()
            time.sleep(0.01)
        os.kill(ranks.processes[0].pid, number)
        assert ranks.results(60) == [exit_code]
    assert "resume with auto" in printed.read_text()
    step = steps_of(events.parent)[-1][0]
    assert final_state(events.parent)["progress"]["step"] == step
    *_, saved, end = (
        event for event in read_events(events)[0] if event.kind in ("step", "checkpoint", "end")
    )
    assert (saved.kind, saved.step) == ("checkpoint", step)
    assert (end.step, end.values["status"]) == (step, "stopped")


def test_a_run_says_what_it_found_and_goes_on_when_it_gets_more_epochs(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = ["trainer.num_epochs=1", "data.limit=40", "trainer.total_steps=1000"]
    first = train(load_config(config, small), runs=tmp_path, progress=False)
    assert first.resumed_from is None
    assert (first.num_epochs, first.num_steps) == (1, len(steps_of(tmp_path / "small")))
    assert {"loss", "image_to_text_r1", "chance_r1"} <= first.evaluation.keys()
    assert f"R@1 image > text {first.evaluation['image_to_text_r1']:.1%}, " in str(first)
    assert f"chance {100 * first.evaluation['chance_r1']:.1f}%" in str(first)
    written = (tmp_path / "small" / "config.toml").read_bytes()
    again = load_config(config, [*small, "trainer.lr=0.5"])
    done_already = train(again, runs=tmp_path, resume="auto", progress=False)
    assert done_already.num_steps == first.num_steps
    assert (done_already.loss, done_already.evaluation) == (first.loss, first.evaluation)
    assert (tmp_path / "small" / "config.toml").read_bytes() == written, "it says how the weights were made"
    events, _ = read_events(tmp_path / "small" / "events-rank0.jsonl")
    planned = [event.values["num_steps"] for event in events if event.kind == "start"]
    assert planned == [first.num_steps] * 2, "steps of the run, not of the learning rate's schedule"

    shutil.rmtree(Checkpoints(tmp_path / "small" / "checkpoints").paths[-1])
    at_last_step = train(load_config(config, small), runs=tmp_path, resume="auto", progress=False)
    assert (at_last_step.num_epochs, at_last_step.loss) == (1, first.loss)

    small[0] = "trainer.num_epochs=2"
    more = train(
        load_config(config, [*small, "trainer.lr=1e-4"]), runs=tmp_path, resume="auto", progress=False
    )
    assert more.resumed_from is not None
    assert more.num_steps == 2 * first.num_steps
    warnings = [
        event.values["message"]
        for event in read_events(tmp_path / "small" / "events-rank0.jsonl")[0]
        if event.kind == "warning"
    ]
    assert warnings == [
        "resumed with other options than before: - lr = 0.001; - num_epochs = 1; + num_epochs = 2"
    ]
    best = Path(str(more.best_checkpoint))
    monkeypatch.chdir(best.parent)
    here = train(load_config(config, small), runs=tmp_path, resume=best.name, progress=False)
    assert (here.resumed_from, here.num_epochs) == (best.name, 2)
    differs = r"- embed_dim = 16; \+ embed_dim = 24; \+ lr = 0.001"
    with pytest.raises(DataError, match=rf"another model: .{{250,300}}; options of that run .*: {differs}$"):
        train(
            load_config(config, [*small, "model.embed_dim=24"]), runs=tmp_path, resume="auto", progress=False
        )
    model, tokenizer = load_trained(tmp_path / "small")
    assert (model.training, len(tokenizer) > 4) == (False, True)
    assert_equal(model.state_dict(), read_checkpoint(str(more.best_checkpoint))["model"])
    with pytest.raises(DataError, match="no run of mmlab train there; a comparison keeps no models"):
        load_trained(tmp_path / "small" / "checkpoints")
    kept = (tmp_path / "small" / "config.toml").read_text()
    (tmp_path / "small" / "config.toml").write_text(kept.replace("embed_dim = 16", "embed_dim = 24"))
    with pytest.raises(DataError, match=r"is of another model than .*config\.toml; restore that"):
        load_trained(tmp_path / "small")
    (tmp_path / "small" / "config.toml").write_text(kept)
    with pytest.raises(OptionError, match=r"trainer\.seed was \d+, which held samples out"):
        train(load_config(config, [*small, "trainer.seed=5"]), runs=tmp_path, resume="auto", progress=False)
    monkeypatch.chdir(tmp_path / "small")  # where "never" could be the name of a folder of the run
    anew = train(load_config(config, [*small[1:], "trainer.num_epochs=1"]), runs=tmp_path, progress=False)
    assert anew.loss == first.loss
    assert (tmp_path / "small" / "previous-1" / "checkpoints").is_dir()

    other = load_config(config, [*small, "name=other"])
    assert train(other, runs=tmp_path, resume=str(anew.best_checkpoint), progress=False).num_epochs == 2
    with pytest.raises(DataError, match=r"no checkpoint there; give a checkpoint's folder"):
        train(other, runs=tmp_path, resume=str(tmp_path / "none"), progress=False)


def test_a_second_run_in_a_folder_is_refused_and_touches_nothing(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["train", str(config), "--runs", str(tmp_path)]
    command += ["--set", "trainer.num_epochs=1", "--set", "data.limit=40"]
    with exclusive_folder(tmp_path / "small"):
        (tmp_path / "small" / "config.toml").touch()
        for resume in ("never", "auto"):
            assert main([*command, "--resume", resume]) == 2
            assert f"another run is active in {tmp_path / 'small'}" in capsys.readouterr().err
        assert [path.name for path in (tmp_path / "small").iterdir()] == ["config.toml"]
    assert main(command) == 0
    assert (tmp_path / "small" / "previous-1" / "config.toml").exists()


@pytest.mark.parametrize("change", ["data.path=nowhere", "data.limit=1", "trainer.objectives=[]"])
def test_a_run_that_is_refused_leaves_the_earlier_one_in_its_place(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], change: str
) -> None:
    folder = tmp_path / "small"
    for name in ("checkpoints", "tokenizer"):
        (folder / name).mkdir(parents=True)
    (folder / "config.toml").write_text("of the earlier run")
    assert main(["train", str(config), "--runs", str(tmp_path), "--set", change]) == 2
    assert f"they are back in {folder}: no run has begun" in capsys.readouterr().err
    assert sorted(path.name for path in folder.iterdir()) == ["checkpoints", "config.toml", "tokenizer"]
    assert (folder / "config.toml").read_text() == "of the earlier run"
    assert not list((folder / "tokenizer").iterdir())
    if change == "data.path=nowhere":
        assert (
            main(["train", str(config), "--runs", str(tmp_path), "--set", change, "--set", "name=new"]) == 2
        )
        assert not list((tmp_path / "new").iterdir()), "mmlab watch would wait for a run that never began"


def test_a_mistyped_checkpoint_leaves_the_run_where_it_is(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "small").mkdir()
    (tmp_path / "small" / "config.toml").touch()
    assert main(["train", str(config), "--runs", str(tmp_path), "--resume", str(tmp_path / "smal")]) == 2
    assert "smal: no checkpoint there; give a checkpoint's folder" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "small").iterdir()] == ["config.toml"]


def test_a_run_goes_on_with_its_own_words_and_without_its_configuration(config: Path, tmp_path: Path) -> None:
    """Token ids keep their meaning where a text has changed meanwhile; a damaged file costs no training."""
    records = read_records(load_config(config).data.path, progress=False)
    lines = ["id,image,text,split"]
    lines += [
        f"{row},{path},{text},{'val' if group % 5 == 0 else 'train'}"
        for row, (path, text, group) in enumerate(
            zip(records.image_paths, records.texts, records.group, strict=True)
        )
    ]
    data = tmp_path / "pairs.csv"
    data.write_text("\n".join(lines[:60]) + "\n")
    folder = os.path.dirname(str(records.image_paths[0]))
    changes = [
        f"data.path={data}",
        "trainer.num_epochs=1",
        "checkpoint.every_steps=100",
        f"data.images={folder}",
    ]
    assert train(load_config(config, changes), runs=tmp_path, progress=False).status == "done"
    kept = (tmp_path / "small/tokenizer/tokenizer.json").read_text()
    word = records.texts[0].split()[1]
    data.write_text(data.read_text().replace(word, f"q{word[1:]}"))
    (tmp_path / "small/config.toml").write_text("")
    changes[1] = "trainer.num_epochs=2"
    result = train(load_config(config, changes), runs=tmp_path, resume="auto", progress=False)
    assert (result.num_epochs, result.resumed_from is None) == (2, False)
    assert (tmp_path / "small/tokenizer/tokenizer.json").read_text() == kept
    (tmp_path / "small/tokenizer").rename(tmp_path / "gone")
    with pytest.raises(DataError, match=r"small/checkpoints/.*: the vocabulary differs.* folder tokenizer/"):
        train(load_config(config, changes), runs=tmp_path, resume="auto", progress=False)
    assert not (tmp_path / "small/tokenizer").exists(), "load_trained would give words of other texts"
    events, _ = read_events(tmp_path / "small/events-rank0.jsonl")
    said = [event.values["message"] for event in events if event.kind == "warning"]
    assert any(message.startswith("resumed with other options than before: + name") for message in said), said


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("trainer.learning=1", r"unknown key in \[trainer\] of .*small.toml 'learning'"),
        ("checkpoint.keep_lst=1", r"'keep_lst'; did you mean 'keep_last'\?"),
        ("schedular.name=random", r"unknown section in .* 'schedular'; did you mean 'scheduler'\?"),
        ("scheduler.name=rndom", r"unknown \[scheduler\] name 'rndom'; did you mean 'random'\?"),
        ("scheduler.budget=100", r"unknown key in \[scheduler\] of .* 'budget'"),
        ("scheduler.world_size=2", r"'world_size'"),
        ("model.preset=tinny", r"unknown \[model\] preset 'tinny'; did you mean 'tiny'\?"),
        ("trainer.lr=fast", r"\[trainer\] of .*small.toml lr: expected a valid number, found 'fast'"),
        ("trainer.num_epochs=0", r"\[trainer\] of .*: num_epochs must be at least 1, found 0"),
        ("trainer.num_epochs=true", r"num_epochs: expected a valid integer, found True"),
        ("trainer.objectives=contrastive", r"objectives: expected a valid array, found 'contrastive'"),
        ("data.num_workers=many", r"num_workers: expected a valid integer or 'auto', found 'many'"),
        ("data.backend=thread", r"\[data\] of .* backend: expected 'threads' or 'torch', found 'thread'"),
        ("data.on_bad_sample=drop", r"on_bad_sample: expected 'raise' or 'skip', found 'drop'"),
        ("name=3", r"name must be that of a folder inside the runs, found 3"),
        ("augment.hue=2", r"\[augment\] of .*: hue must be at most 0.5, found 2"),
        ("augment={name='none', hues=0.1}", r"unknown key in \[augment\] of .* 'hues'; did you mean 'hue'"),
        ("augment.name=colours", r"unknown augmentation 'colours'; did you mean 'colour'\?"),
        ("sampling.adaptive=loses", r"adaptive: expected 'off', 'sampling' or 'loss', found 'loses'"),
        ("sampling.correct=true", r"\[sampling\] of .*: correct needs adaptive='sampling'"),
        ("name=", r"name must be that of a folder inside the runs, found ''"),
        ("name=../other", r"name must be that of a folder inside the runs, found '../other'"),
        ("trainer=3", r"trainer must be a section, \[trainer\]"),
        ("trainer.lr", r"--set takes section.key=value, found 'trainer.lr'"),
        ("data.path=/a\udcff", r"--set data.path: config.toml keeps UTF-8 only, found '/a\\udcff'"),
    ],
)
def test_what_is_wrong_in_the_file_is_named(config: Path, change: str, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        load_config(config, [change])


def test_options_beside_the_augmentation_none_are_all_that_changes_an_image(config: Path) -> None:
    chosen = load_config(config, ["augment={name='none', hue=0.1}"])
    assert chosen.augment == Augment(crop_scale=None, hue=0.1)
    assert load_config(config, ["augment.name=none"]).augment is None


def test_a_file_that_is_not_there_or_not_toml_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none.toml: No such file"):
        load_config(tmp_path / "none.toml")
    with pytest.raises(DataError, match=r" is a folder; give the TOML file"):
        load_config(tmp_path)
    broken = tmp_path / "broken.toml"
    broken.write_text("[data]\npath = \n")
    with pytest.raises(DataError, match=r"broken.toml is not TOML: .*line 2"):
        load_config(broken)
    broken.write_text("[trainer]\nnum_epochs = 1")
    with pytest.raises(OptionError, match=r"\[data\] of .* path is missing"):
        load_config(broken)
    broken.write_text('[data]\npath = "x"\n[trainer]\nnum_epoch = 1')
    with pytest.raises(
        OptionError, match=r"unknown key in \[trainer\] of .* 'num_epoch'; did you mean 'num_epochs'"
    ):
        load_config(broken)


def test_a_saved_configuration_is_the_same_configuration(config: Path, tmp_path: Path) -> None:
    given = load_config(
        config, ['trainer.max_grad_norm={image = 1.0, "text" = 2}', 'data.path="a \\"b\\" é"']
    )
    (tmp_path / "again.toml").write_text(given.toml(), "utf-8")
    assert load_config(tmp_path / "again.toml") == given
    never = load_config(
        config, ["checkpoint.every_minutes=none", "augment.name=crop", "augment.crop_scale=none"]
    )
    (tmp_path / "again.toml").write_text(never.toml(), "utf-8")
    assert (never.checkpoint.every_minutes, never.augment.crop_scale) == (None, None)
    assert load_config(tmp_path / "again.toml") == never


def test_an_odd_character_and_a_byte_order_mark_are_no_obstacle(config: Path, tmp_path: Path) -> None:
    given = load_config(config, ["data.path=a\x7fb"])
    (tmp_path / "again.toml").write_text(given.toml(), "utf-8")
    assert load_config(tmp_path / "again.toml") == given
    config.write_text(config.read_text(), "utf-8-sig")
    assert load_config(config, ["data.path=a\x7fb"]) == given


def test_the_example_configuration_is_valid() -> None:
    config = load_config(Path(__file__).parents[2] / "examples" / "train.toml")
    assert config.name == "sample"


def test_trackers_get_every_number_once(config: Path, tmp_path: Path) -> None:
    train(load_config(config, ["trainer.num_epochs=1", "data.limit=40"]), runs=tmp_path, progress=False)
    with pytest.raises(OptionError, match=r"unknown tracker 'tensorbord'; did you mean 'tensorboard'"):
        export_run(tmp_path / "small", "tensorbord", tmp_path)
    with pytest.raises(DataError, match=r"give the folder of a run"):
        export_run(tmp_path, "tensorboard", tmp_path)
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for _ in range(2):  # the second export replaces the first
        assert export_run(tmp_path / "small", "tensorboard", tmp_path / "board") > 0
    folder = tmp_path / "board" / tmp_path.name / "small"  # apart from runs of this name in other folders
    board = accumulator.EventAccumulator(str(folder)).Reload()
    assert [(scalar.step, pytest.approx(scalar.value)) for scalar in board.Scalars("step/loss")] == steps_of(
        tmp_path / "small"
    )


@pytest.mark.usefixtures("bytes_priced_once")
def test_batches_are_planned_for_the_memory_given_and_resumed_alike(config: Path, tmp_path: Path) -> None:
    text = config.read_text().replace('name = "random"', 'name = "memory"\nmemory_gb = 1.02')
    config.write_text(text.replace("batch_size = 3\n", "").replace("fp16", "fp32"))
    train(load_config(config), runs=tmp_path / "runs", progress=False)
    folder = tmp_path / "runs" / "small"
    steps = [event for event in read_events(folder / "events-rank0.jsonl")[0] if event.kind == "step"]
    limit_bytes = 0.02 * 2**30  # after the stated gibibyte for Python and torch
    assert max(event.values["predicted_bytes"] for event in steps) <= 0.97 * limit_bytes
    assert {event.values["num_out_of_memory"] for event in steps} == {0}

    saved = (folder / "memory.json").read_text()
    longer = load_config(config, ["trainer.num_epochs=4"])
    train(longer, runs=tmp_path / "runs", resume="auto", progress=False)
    assert (folder / "memory.json").read_text() == saved
    with pytest.raises(OptionError, match=r"key in \[scheduler\].*'budget'"):
        load_config(config, ["scheduler.budget=5"])


def test_the_limit_of_the_start_is_kept_and_a_damaged_file_of_it_named(tmp_path: Path) -> None:
    path = tmp_path / "limit_bytes.txt"
    assert [_kept(path, limit_bytes) for limit_bytes in (500, 700)] == [500, 500]
    path.write_text("many")
    with pytest.raises(DataError, match=r"limit_bytes.txt is damaged: .*; remove it to plan anew"):
        _kept(path, 500)


@pytest.mark.usefixtures("bytes_priced_once")
def test_the_fastest_batches_within_memory_are_resumed_alike(config: Path, tmp_path: Path) -> None:
    text = config.read_text().replace('name = "random"', 'name = "fastest"\nmemory_gb = 1.02')
    config.write_text(text.replace("batch_size = 3\n", "").replace("fp16", "fp32"))
    train(load_config(config), runs=tmp_path / "runs", progress=False)
    folder = tmp_path / "runs" / "small"
    steps = [event for event in read_events(folder / "events-rank0.jsonl")[0] if event.kind == "step"]
    assert max(event.values["predicted_bytes"] for event in steps) <= 0.97 * 0.02 * 2**30
    saved = (folder / "time_model.json").read_text()
    train(
        load_config(config, ["trainer.num_epochs=4"]), runs=tmp_path / "runs", resume="auto", progress=False
    )
    assert (folder / "time_model.json").read_text() == saved
    with pytest.raises(OptionError, match=r"key in \[scheduler\].*'follow'"):
        load_config(config, ["scheduler.follow=false"])


def test_packed_batches_train_without_padding(config: Path, tmp_path: Path) -> None:
    config.write_text(
        config.read_text().replace('name = "random"\nbatch_size = 3', 'name = "packed"\nbudget = 60')
    )
    train(load_config(config, ["trainer.num_epochs=1"]), runs=tmp_path, progress=False)
    events, _ = read_events(tmp_path / "small" / "events-rank0.jsonl")
    assert {event.values["combined_waste"] for event in events if event.kind == "step"} == {0.0}


def test_the_bar_follows_what_the_batches_cost(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shares = []

    class Bar(tqdm):
        def __init__(self, *, show: bool, **options: Any) -> None:
            super().__init__(**options, disable=not show, file=io.StringIO())

        def update(self, n: float | None = 1) -> bool | None:
            shown = super().update(n)
            shares.append(self.n / self.total)
            return shown

    monkeypatch.setattr(sys.modules["mmlab.comparison.train"], "progress_bar", Bar)
    train(load_config(config, ["trainer.num_epochs=1", "scheduler.batch_size=5"]), runs=tmp_path)
    steps = [event.values for event in read_events(tmp_path / "small/events-rank0.jsonl")[0]]
    names = ("num_samples", "num_tokens", "height", "width")
    shapes = [[values[name] for name in names] for values in steps if "step_s" in values]
    costs = batch_costs(PaddedTokens(), np.array(shapes))
    assert shares == pytest.approx(list(costs.cumsum() / costs.sum()))
    assert len(set(costs)) > 1, "batches of one cost cannot tell steps from costs"
