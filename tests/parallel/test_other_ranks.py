"""A run goes on with another number of ranks: no sample is lost or repeated, and the schedule ends with the run."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from mmlab.runs.follow import RunState
from tests.parallel.resumed_on_other_ranks import train_and_note
from tests.ranks import run_ranks

NUM_TRAINED = 54  # samples of `scenes` that are not held out
CONFIG = """
[data]
path = "{scenes}"
image = "aspect:48"
num_workers = 0
[model]
preset = "tiny"
image_dim = 32
image_depth = 2
text_dim = 32
text_depth = 1
hidden_dim = 32
embed_dim = 8
[scheduler]
name = "random"
batch_size = 4
[trainer]
num_epochs = 2
lr = 1e-3
accumulation_steps = 2
device = "cpu"
[checkpoint]
every_minutes = 60.0
"""


def steps_of(config: str, stages, folder: Path) -> list[list]:
    """Train in stages; a line for every step and rank: stage, epoch, step, learning rate and the samples' ids."""
    path, runs = folder / "run.toml", folder / "runs"
    path.write_text(config)
    runs.mkdir()
    for stage, (num_ranks, strategy, stop_after) in enumerate(stages):
        run_ranks(train_and_note, num_ranks, path, runs, stage, strategy, stop_after, joins=False)
    files = sorted(runs.glob("seen-*.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


@pytest.mark.parametrize(
    "stages",
    [
        pytest.param([(2, "ddp", 2), (1, "ddp", 4), (4, "fsdp", None)], id="2 to 1 to 4"),
        pytest.param(
            [(2, "fsdp", 2), (1, "ddp", 4), (2, "fsdp", None)], id="shared out, in one process, shared out"
        ),
        pytest.param(
            [(2, "branch", 2), (2, "ddp", 3), (2, "branch", None)], id="by branches, by samples, by branches"
        ),
        pytest.param([(2, "fsdp", 1), (4, "fsdp", 2), (2, "ddp", None)], id="shared out by 2, by 4, by none"),
    ],
)
def test_every_sample_comes_once_an_epoch_on_whatever_ranks(stages, scenes: Path, tmp_path: Path) -> None:
    lines = steps_of(CONFIG.format(scenes=scenes), stages, tmp_path)
    assert {line[0] for line in lines if line[1] == 0} == {0, 1, 2}  # the first epoch is shared by all stages
    for epoch in (0, 1):
        seen = Counter(record for line in lines if line[1] == epoch for record in line[4])
        assert set(seen.values()) == {1}
        assert len(seen) == NUM_TRAINED
    for stage, (num_ranks, _, _) in enumerate(stages):
        steps = Counter(line[2] for line in lines if line[0] == stage)
        assert set(steps.values()) == {num_ranks}  # as many steps on every rank
    rates = dict(sorted((line[2], line[3]) for line in lines))
    assert list(rates) == list(range(1, len(rates) + 1))
    late = [rate for step, rate in rates.items() if step > 1]
    assert late == sorted(late, reverse=True)
    assert late[-1] < 0.2 * max(late)


@pytest.mark.parametrize(
    ("scheduler", "stages"),
    [
        pytest.param(
            'name = "budget"\n[sampling]\nratios = { image-text = 1.0 }',
            [(2, "ddp", 1), (1, "ddp", None)],
            id="ratios",
        ),
        pytest.param(
            'name = "fastest"', [(2, "ddp", 1), (2, "ddp", None)], id="the limit of the start is kept"
        ),
    ],
)
def test_a_plan_goes_on_where_the_scheduler_is_wrapped_or_measured(
    scheduler: str, stages, scenes: Path, tmp_path: Path
) -> None:
    config = CONFIG.format(scenes=scenes).replace('name = "random"\nbatch_size = 4', scheduler)
    lines = steps_of(config.replace("accumulation_steps = 2", ""), stages, tmp_path)
    for epoch in (0, 1):
        seen = Counter(record for line in lines if line[1] == epoch for record in line[4])
        assert set(seen.values()) == {1}
        assert len(seen) == NUM_TRAINED
    (run,) = (tmp_path / "runs").glob("*/config.toml")
    state = RunState(run.parent)
    state.poll()
    assert state.status == "done", "a rank that the second start did without does not count"
