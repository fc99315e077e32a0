"""The search adds workers while that pays, within its limit, and stops."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import numpy as np
import pytest
import torch

from mmlab.loading import tuning
from mmlab.loading.backends import Setting
from mmlab.loading.tuning import Tuner
from mmlab.schedule.schedulers import make_scheduler
from tests.loading.loaders import Slow, assert_same, make_loader


@pytest.fixture(autouse=True)
def _short_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "_WINDOW_S", 0.1)


def test_workers_are_added_as_long_as_batches_come_faster(dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each sample takes 20 ms of waiting, so that twice the threads are twice as fast, up to the limit of 8."""
    monkeypatch.setattr("mmlab.loading.loader.default_num_workers", lambda: 2)  # whatever cores are here
    reference = make_loader(dataset, scheduler=make_scheduler("random", batch_size=1))
    loader = make_loader(
        dataset,
        "threads",
        scheduler=make_scheduler("random", batch_size=1),
        num_workers="auto",
        prefetch=None,
        augment=Slow(0.02),
    )
    start = loader._backend.setting.num_workers
    for epoch in range(60):
        loader.set_epoch(epoch)
        batches = list(loader)
        if loader._tuner.done:
            break
    assert loader._tuner.done, loader.tuning
    assert loader._backend.setting.num_workers > start
    trials = loader.tuning
    assert trials[0].verdict == "start"
    assert any(trial.verdict.startswith("kept: x") for trial in trials)
    assert "verdict" in str(trials)
    assert "<th>verdict</th>" in trials._repr_html_()
    reference.set_epoch(epoch)
    assert_same(batches, list(reference))  # whatever was tried


@pytest.mark.parametrize("backend", ["threads", "torch"])
def test_tuning_in_mid_epoch_changes_no_batch(dataset, backend: str) -> None:
    loader = make_loader(dataset, backend, num_workers=1, prefetch=2, augment=Slow(0.002))
    iterator = iter(loader)
    batches = [next(iterator) for _ in range(3)]
    for setting in (Setting(3, 6), Setting(1, 1)):
        loader._backend.resize(setting)
        batches += [next(iterator) for _ in range(3)]
    assert_same([*batches, *iterator], list(make_loader(dataset)))


@dataclass
class Counted:
    """Notes in a file each sample that is made, whichever process makes it."""

    path: Path

    def __call__(self, image: torch.Tensor, *, seed: int, epoch: int, record_id: str) -> torch.Tensor:
        with self.path.open("a") as file:
            file.write(f"{record_id}\n")
        return image


@pytest.mark.parametrize("backend", ["threads", "torch"])
def test_tuning_in_mid_epoch_makes_nothing_twice(dataset, tmp_path: Path, backend: str) -> None:
    loader = make_loader(
        dataset, backend, num_workers=2, prefetch=6, augment=Counted(tmp_path / "made"), on_bad_sample="skip"
    )
    batches = []
    for number, batch in enumerate(loader):
        batches.append(batch)
        if number in (1, 4):
            loader._backend.resize(Setting(number, 2 * number))
    assert_same(batches, list(make_loader(dataset)))
    assert sorted((tmp_path / "made").read_text().split("\n")[:-1]) == sorted(dataset.records.ids)


@pytest.mark.parametrize("num_batches", [3, 12, 40])
def test_the_search_reads_no_further_ahead_than_half_an_epoch(num_batches: int) -> None:
    """More workers help without end, and batches ahead are added with them."""
    clock = count(step=0.01)
    tuner = Tuner(Setting(1, 1), ram_bytes=lambda setting: 0, max_bytes=1, keeps_prefetch=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuning, "perf_counter", lambda: next(clock))
        setting = Setting(1, 1)
        for _ in range(300):
            tuner.begin_epoch(num_batches)
            for _ in range(num_batches):
                setting = tuner.observe(setting.num_workers, 0.01) or setting
    assert tuner.done
    num_workers = max(trial.num_workers for trial in tuner.trials)
    assert num_workers >= 8
    assert max(trial.prefetch for trial in tuner.trials) == min(num_workers, max(1, num_batches // 2))


def test_noise_of_other_programs_is_rarely_taken_for_a_gain(search) -> None:
    """Nothing helps, and the speed of each window is up to 30 % off: on a busy machine."""
    num_workers = []
    for seed in range(200):
        noise = np.random.default_rng(seed)
        rates: dict = {}

        def rate_of(setting: Setting, noise=noise, rates=rates) -> float:
            rates.setdefault("left", 0)
            if rates["left"] == 0:
                rates |= {"left": 20, "rate": 1000 * noise.uniform(0.7, 1.3)}
            rates["left"] -= 1
            return rates["rate"]

        num_workers.append(search(rate_of, lambda setting: True)._setting.num_workers)
    assert np.mean(np.array(num_workers) > 2) <= 0.15


@pytest.fixture
def search(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Tuner]:
    """Searches in a pipeline of given rates, by a clock of its own."""
    clock = count(step=0.01)

    def run(rate_of, wait_of, max_bytes: int = 10**9) -> Tuner:
        monkeypatch.setattr(tuning, "perf_counter", lambda: next(clock))
        setting = Setting(2, 4)
        tuner = Tuner(
            setting,
            ram_bytes=lambda setting: 100 * setting.num_workers + 10 * setting.prefetch,
            max_bytes=max_bytes,
            keeps_prefetch=False,
        )
        for _ in range(10_000):
            setting = tuner.observe(rate_of(setting), 0.01 * wait_of(setting)) or setting
            if tuner.done:
                break
        return tuner

    return run


def test_the_search_ends_when_training_no_longer_waits(search) -> None:
    tuner = search(lambda setting: 10 * setting.num_workers, lambda setting: setting.num_workers < 4)
    assert tuner.done
    assert tuner.trials[-1].verdict == "training no longer waits"
    assert tuner._setting.num_workers == 4
    assert len(tuner.trials) == 2


def test_a_setting_that_would_take_too_much_memory_is_not_tried(search) -> None:
    tuner = search(lambda setting: 100 * setting.num_workers, lambda setting: True, max_bytes=500)
    assert tuner.done
    assert max(trial.ram_bytes for trial in tuner.trials) <= 500
    assert tuner._setting.num_workers == 4


def test_what_does_not_help_is_taken_back(search) -> None:
    tuner = search(lambda setting: 100 - setting.num_workers, lambda setting: True)
    assert tuner.done
    assert tuner._setting == (2, 4)
