"""Checkpoints: a resumed run is bitwise the same run; damage is found; the right ones are kept."""

from __future__ import annotations

import json
import math
import os
import resource
import signal
import weakref
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from mmlab.data.dataset import MultimodalDataset
from mmlab.data.records import Records
from mmlab.errors import DataError, OptionError
from mmlab.loading.loader import PlannedLoader
from mmlab.model.presets import build_model
from mmlab.schedule.schedulers import make_scheduler
from mmlab.training.checkpoint.files import read_checkpoint
from mmlab.training.checkpoint.keeping import Checkpoints
from mmlab.training.loop import FusionTrainer
from mmlab.types import Aspect
from tests.batches import make_batch
from tests.training.test_trainer import tiny_model

FILES = ["weights.safetensors", "optimizer.safetensors", "state.json", "manifest.json"]
SIZES = [(4, 32, 48), (9, 16, 16), (3, 48, 32), (6, 32, 32)]
SCHEDULERS = {"random": {"batch_size": 6}, "sorted": {"batch_size": 6}, "bucket": {"batch_size": 6}}
SCHEDULERS |= {name: {"batch_size": 6} for name in ("length_grouped", "aspect_bucket")}
SCHEDULERS |= {"budget": {"budget": 200}}


@pytest.fixture(autouse=True)
def one_thread():
    """Tiny models gain nothing from more, and other tests' threads would be in the way."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def dataset(records: Records) -> MultimodalDataset:
    return MultimodalDataset(records[:40], tokenizer="builtin", image_policy=Aspect(32**2))


def make_run(
    dataset: MultimodalDataset,
    scheduler: str = "budget",
    *,
    precision: str = "fp32",
    accumulation_steps: int = 1,
    **loading,
) -> tuple[FusionTrainer, PlannedLoader]:
    torch.manual_seed(0)
    sizes = {
        "image_dim": 32,
        "image_depth": 1,
        "text_dim": 32,
        "text_depth": 1,
        "hidden_dim": 32,
        "embed_dim": 16,
    }
    model = build_model("tiny", vocab_size=len(dataset.tokenizer), dropout=0.2, **sizes)
    trainer = FusionTrainer(
        model,
        objectives=["contrastive", "matching"],
        precision=precision,
        accumulation_steps=accumulation_steps,
        channels_last=accumulation_steps > 1,  # moments then lie as the weights do, after a resume too
        lr=1e-3,
        device="cpu",
    )
    planner = make_scheduler(scheduler, seed=1, **SCHEDULERS[scheduler])
    return trainer, PlannedLoader(dataset, planner, **{"num_workers": 0, **loading})


def stop_at(trainer: FusionTrainer, *steps: int) -> None:
    def emit(event):
        if event.kind == "step" and event.step in steps:
            trainer.stop()

    trainer._emit = emit


def stopped_twice(folder: Path, steps: tuple[int, int], dataset: MultimodalDataset, *arguments, **options):
    """A run of two epochs that is stopped after two of its steps and resumed each time by new objects."""
    rows = []
    for _ in range(3):
        trainer, loader = make_run(dataset, *arguments, **options)
        checkpoints = Checkpoints(folder, every_minutes=None)
        checkpoints.restore(trainer, loader)
        stop_at(trainer, *(step for step in steps if step > trainer.step))
        rows += trainer.fit(loader, num_epochs=2 - trainer.epoch, checkpoints=checkpoints)
    return trainer, rows


@pytest.mark.parametrize(
    ("scheduler", "precision", "accumulation_steps", "loading"),
    [
        *((name, "fp32", 1, {}) for name in SCHEDULERS),
        ("budget", "fp16", 3, {"num_workers": 2}),
        ("random", "bf16", 2, {"num_workers": 2, "backend": "torch"}),
    ],
)
def test_a_run_resumed_twice_is_bitwise_the_same_run(
    tmp_path, dataset, scheduler, precision, accumulation_steps, loading
):
    options = {"precision": precision, "accumulation_steps": accumulation_steps, **loading}
    whole, loader = make_run(dataset, scheduler, **options)
    expected = whole.fit(loader, num_epochs=2)
    trainer, rows = stopped_twice(tmp_path, (2, len(expected) - 1), dataset, scheduler, **options)
    for column in ("loss", "lr", "grad_norm", "loss_scale", "epoch"):
        assert [repr(row[column]) for row in rows] == [repr(row[column]) for row in expected]
    for resumed, weight in zip(trainer.parameters, whole.parameters, strict=True):
        assert torch.equal(resumed, weight)


def test_a_loader_without_a_state_of_its_own_is_read_from_the_start_again(tmp_path):
    batches = [make_batch(SIZES, seed=number) for number in range(5)]
    whole = FusionTrainer(tiny_model(dropout=0.2), device="cpu")
    expected = whole.fit(batches)
    first = FusionTrainer(tiny_model(dropout=0.2), device="cpu")
    stop_at(first, 2)
    first.fit(batches, checkpoints=Checkpoints(tmp_path))
    second = FusionTrainer(tiny_model(seed=1, dropout=0.2), device="cpu")
    assert Checkpoints(tmp_path).restore(second, batches) == tmp_path / "000001-step-2"
    rest = second.fit(batches)
    assert [row["loss"] for row in rest] == [row["loss"] for row in expected[2:]]
    for changes, length in (
        ({"accumulation_steps": 3}, 3),
        ({"total_steps": 4}, 4),
    ):  # the schedule fits what is left
        other = FusionTrainer(tiny_model(dropout=0.2), device="cpu", **changes)
        Checkpoints(tmp_path).restore(other, batches)
        other._plan_schedule(batches, other.epoch + 1)
        assert other.total_steps == length
        assert other.learning_rate(length) == 0 < other.learning_rate(length - 1)


def save_some(folder: Path, scores: list[float], **options) -> tuple[Checkpoints, FusionTrainer]:
    """A checkpoint for each score, one step further each."""
    trainer = FusionTrainer(tiny_model(), device="cpu")
    checkpoints = Checkpoints(folder, **options)
    for score in scores:
        trainer.step += 1
        checkpoints.save(trainer.state_dict(), values={"loss": score})
    return checkpoints, trainer


def steps(checkpoints: Checkpoints) -> list[int]:
    return [int(path.name.split("-")[-1]) for path in checkpoints.paths]


def test_the_newest_and_the_best_are_kept(tmp_path):
    scores = [5.0, 1.0, math.nan, 4.0, 2.0, 3.0]
    checkpoints, _ = save_some(tmp_path / "lowest", scores, keep_last=2, keep_best=1)
    assert steps(checkpoints) == [2, 5, 6]
    assert checkpoints.best == tmp_path / "lowest" / "000002-step-2"
    checkpoints, _ = save_some(tmp_path / "highest", scores, keep_last=1, keep_best=2, maximize=True)
    assert steps(checkpoints) == [1, 4, 6]
    checkpoints, _ = save_some(tmp_path / "none", scores, keep_last=2, keep_best=0)
    assert steps(checkpoints) == [5, 6]


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "name"),
    [
        *((truncate, name) for name in FILES),
        *((Path.unlink, name) for name in FILES),
        *((flip_a_bit, name) for name in FILES[:3]),
    ],
)
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(tmp_path, damage, name):
    checkpoints, trainer = save_some(tmp_path, [1.0, 2.0])
    damage(checkpoints.paths[-1] / name)
    with pytest.warns(RuntimeWarning, match=rf"000002-step-2 is .*{name}.*; using the checkpoint before it"):
        assert checkpoints.restore(trainer) == checkpoints.paths[0]
    assert trainer.step == 1
    events = []
    assert Checkpoints(tmp_path, emit=events.append).restore(trainer) == checkpoints.paths[0]
    assert [event.kind for event in events] == ["warning"]
    checkpoints.save(trainer.state_dict())
    assert checkpoints.restore(trainer) == checkpoints.paths[-1]


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"files": []}, "manifest.json"),
        ({"files": {}}, "manifest.json"),
        ({"files": {"state.json": {}}}, "manifest.json"),
        ({"values": [1]}, "manifest.json"),
        ({"values": {"loss": "x"}}, "manifest.json"),
        ("[" * 100_000, "manifest.json"),
        (None, "state.json"),
    ],
)
def test_valid_json_that_is_no_manifest_and_folders_for_files_are_damage(tmp_path, change, name):
    checkpoints, trainer = save_some(tmp_path, [1.0, 2.0])
    path = checkpoints.paths[-1] / name
    if change is None:
        path.unlink()
        path.mkdir()
    elif isinstance(change, str):
        path.write_text(change)
    else:
        path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.warns(RuntimeWarning, match=rf"000002-step-2 is .*{name}.*; using the checkpoint before it"):
        assert checkpoints.restore(trainer) == checkpoints.paths[0]
    checkpoints.save(trainer.state_dict(), values={"loss": 0.5})
    assert checkpoints.best == checkpoints.paths[-1]


def test_what_is_no_checkpoint_is_left_alone_and_an_unfinished_one_is_cleared_away(tmp_path):
    checkpoints, trainer = save_some(tmp_path, [1.0])
    foreign = [tmp_path / name for name in ("9notes-step-x", ".unfinished-x")]
    foreign[0].mkdir()
    foreign[1].touch()
    (tmp_path / ".unfinished-000002-step-1").mkdir()
    assert checkpoints.restore(trainer) == tmp_path / "000001-step-1"
    checkpoints.save(trainer.state_dict())
    assert sorted(tmp_path.iterdir()) == sorted([*foreign, *checkpoints.paths])
    assert steps(checkpoints) == [1, 1]


def test_a_damaged_manifest_is_never_taken_for_another(tmp_path):
    checkpoints, _ = save_some(tmp_path, [1.0])
    manifest = checkpoints.paths[0] / "manifest.json"
    content = manifest.read_bytes()
    num_found = 0
    for position in range(len(content)):
        manifest.write_bytes(content[:position] + bytes([content[position] ^ 4]) + content[position + 1 :])
        with suppress(DataError):
            assert read_checkpoint(checkpoints.paths[0])["progress"]["step"] == 1
            num_found += 1
    assert num_found < 40  # only where a bit makes no difference: in spaces and in the score


def test_when_all_are_damaged_nothing_is_restored(tmp_path):
    checkpoints, trainer = save_some(tmp_path, [1.0])
    truncate(checkpoints.paths[0] / "state.json")
    with (
        pytest.warns(RuntimeWarning, match="state.json"),
        pytest.raises(DataError, match="none of the 1 checkpoints is whole"),
    ):
        checkpoints.restore(trainer)
    assert Checkpoints(tmp_path / "empty").restore(trainer) is None


def test_a_full_disk_leaves_the_checkpoints_as_they_were(tmp_path):
    checkpoints, trainer = save_some(tmp_path, [1.0])
    before = sorted(tmp_path.rglob("*"))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
    try:
        with pytest.raises(Exception, match=r"File too large|file write failed"):
            checkpoints.save(trainer.state_dict())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_checkpoint_of_another_model_or_version_is_refused(tmp_path):
    checkpoints, trainer = save_some(tmp_path, [1.0])
    state = trainer.state_dict()
    state["progress"].pop("num_samples")
    old = Checkpoints(tmp_path / "old")
    old.save(state)
    with pytest.raises(DataError, match="is of another version of mmlab: it has no 'num_samples'"):
        old.restore(trainer)
    with pytest.raises(DataError, match=r"000001-step-1 is of another model: .*size mismatch"):
        checkpoints.restore(FusionTrainer(tiny_model(embed_dim=8), device="cpu"))


def test_moments_never_go_to_other_weights_and_only_a_trainers_state_is_loaded(tmp_path):
    first, second = (f"image_encoder.embed.convs.{number}.weight" for number in (0, 1))
    state = FusionTrainer(tiny_model(), device="cpu", freeze=[first]).state_dict()
    trainer = FusionTrainer(tiny_model(), device="cpu", freeze=[second])
    with pytest.raises(DataError, match=f"{first} was frozen in the saved run; give the same freeze"):
        trainer.load_state_dict(state)
    with pytest.raises(DataError, match=r"this is not a trainer's state_dict\(\): found OrderedDict.*log"):
        trainer.load_state_dict(trainer.model.state_dict())


def test_a_run_without_a_loss_scale_can_be_resumed_with_one(tmp_path):
    checkpoints, trainer = save_some(tmp_path, [1.0])
    resumed = FusionTrainer(tiny_model(), device="cpu", precision="fp16")
    checkpoints.restore(resumed)
    assert (resumed.step, resumed.precision.scaler.get_scale()) == (trainer.step, 65536.0)


def test_weights_are_a_plain_safetensors_file_with_tied_weights_once(tmp_path):
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False), nn.Linear(4, 2))
    model[1].weight = model[0].weight
    model[2].weight.data = torch.randn(4, 2).t()  # not contiguous
    state = {"model": model.state_dict(), "progress": {"step": 0, "epoch": 0}}
    path = tmp_path / Checkpoints(tmp_path / "c").save(state)["path"]
    assert load_file(path / "weights.safetensors").keys() == {"0.weight", "2.weight", "2.bias"}
    found = read_checkpoint(path)["model"]
    assert found.keys() == model.state_dict().keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in model.state_dict().items())
    assert json.loads((path / "manifest.json").read_text())["files"].keys() == {
        "weights.safetensors",
        "optimizer.safetensors",
        "state.json",
    }


def test_an_interval_in_steps_or_minutes_is_kept(tmp_path):
    trainer = FusionTrainer(tiny_model(), device="cpu")
    trainer.fit(
        [make_batch(SIZES)] * 5, checkpoints=Checkpoints(tmp_path / "steps", every_steps=2, keep_last=9)
    )
    assert steps(Checkpoints(tmp_path / "steps")) == [2, 4, 5]
    assert Checkpoints(tmp_path / "minutes", every_minutes=1e-9).due(1)
    assert not Checkpoints(tmp_path / "minutes", every_minutes=60).due(1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keep_last": 0}, "keep_last must be at least 1, found 0"),
        ({"keep_best": -1}, "keep_best must be at least 0, found -1"),
        ({"every_steps": 0}, "every_steps must be at least 1, found 0"),
        ({"every_minutes": -1.0}, "every_minutes must be above 0"),
    ],
)
def test_numbers_out_of_range_are_refused(tmp_path, options, message):
    with pytest.raises(OptionError, match=message):
        Checkpoints(tmp_path, **options)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_while_waiting_for_data_ends_after_the_step_with_a_checkpoint(tmp_path, number):
    delivered = []
    previous = signal.signal(number, lambda *arguments: delivered.append(arguments[0]))

    class Interrupted(list):
        def __iter__(self):
            for position, batch in enumerate(super().__iter__()):
                if position == 1:
                    signal.raise_signal(number)
                yield batch

    try:
        trainer = FusionTrainer(tiny_model(), device="cpu")
        trainer.fit(Interrupted([make_batch(SIZES)] * 4), checkpoints=Checkpoints(tmp_path))
    finally:
        signal.signal(number, previous)
    assert delivered == [number]
    assert trainer.step == 2
    assert steps(Checkpoints(tmp_path)) == [2]


def test_a_request_to_end_is_not_lost_in_a_finalizer():
    """An exception in a finalizer is ignored; tensors that are counted live have one each."""

    def requested():
        for _ in range(3):
            weakref.finalize(Temporary(), signal.raise_signal, signal.SIGTERM)
            yield make_batch(SIZES)

    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)  # as `mmlab compare` does
    try:
        trainer = FusionTrainer(tiny_model(), total_steps=3, device="cpu")
        with pytest.raises(KeyboardInterrupt):
            trainer.fit(requested())
    finally:
        signal.signal(signal.SIGTERM, previous)
    assert trainer.step == 1


class Temporary:
    """Something that ends at once."""


def test_a_second_interrupt_does_not_wait():
    def interrupted_twice():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        yield make_batch(SIZES)

    trainer = FusionTrainer(tiny_model(), total_steps=1, device="cpu")
    with pytest.raises(KeyboardInterrupt):
        trainer.fit(interrupted_twice())
    assert trainer.step == 0
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_best_key_that_no_evaluation_has_is_refused_once_a_checkpoint_is_kept(tmp_path):
    with pytest.raises(OptionError, match="unknown best_key 'los'; did you mean 'loss'"):
        Checkpoints(tmp_path, best_key="los")
    checkpoints = Checkpoints(tmp_path, best_key="modality_gap")
    trainer = FusionTrainer(tiny_model(), device="cpu", total_steps=4)
    checkpoints.save(trainer.state_dict())
    with pytest.raises(OptionError, match="unknown best_key of evaluations 'modality_gap'"):
        checkpoints.save(trainer.state_dict(), values={"loss": 1.0})
    assert len(checkpoints.paths) == 2
    Checkpoints(tmp_path, best_key="los", keep_best=0).save(trainer.state_dict(), values={"loss": 1.0})
