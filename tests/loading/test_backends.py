"""Every backend gives the same batches, draws no further ahead than it was told, and leaves nothing running."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock

import numpy as np
import psutil
import pytest
import torch

from mmlab.errors import OptionError, RunError
from mmlab.schedule.schedulers import make_scheduler
from mmlab.types import Aspect
from tests.loading.loaders import BACKENDS, Killed, NeedsLock, Noise, Slow, assert_same, make_loader


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    """No thread of the pipeline and no process outlives a test."""
    yield
    gc.collect()  # an error's frames may hold a loader
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("mmlab-")] == []
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize("backend", ["threads", "torch"])
@pytest.mark.parametrize("prefetch", [1, 5])
def test_batches_do_not_depend_on_the_backend(dataset, backend: str, prefetch: int) -> None:
    reference = make_loader(dataset, augment=Noise())
    loader = make_loader(dataset, backend, augment=Noise(), prefetch=prefetch)
    for epoch in (0, 4):
        reference.set_epoch(epoch)
        loader.set_epoch(epoch)
        expected = list(reference)
        assert_same(list(loader), expected)
    plain = make_loader(dataset)
    plain.set_epoch(4)
    assert not torch.equal(next(iter(plain)).pixel_values, expected[0].pixel_values)


def test_loading_threads_compute_on_one_core_and_others_on_all(dataset) -> None:
    seen: list[int] = []

    class Noting(Noise):
        def __call__(self, image: torch.Tensor, **key: Any) -> torch.Tensor:
            seen.append(torch.get_num_threads())
            return super().__call__(image, **key)

    def note() -> None:
        seen.append(torch.get_num_threads())

    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        list(make_loader(dataset, "threads", augment=Noting()))
        assert set(seen) == {1}
        later = threading.Thread(target=note)
        later.start()
        later.join()
        assert (torch.get_num_threads(), seen[-1]) == (3, 3)
    finally:
        torch.set_num_threads(before)


class Drawn:
    """A scheduler whose plan counts the batches that were drawn from it."""

    def __init__(self, num_batches: int) -> None:
        self.num_batches, self.count = num_batches, 0

    def plan(self, sizes, *, epoch: int) -> Drawn:
        return self

    def __iter__(self) -> Iterator[list[int]]:
        for number in range(self.num_batches):
            self.count += 1
            yield [number, number + 1]


@pytest.mark.parametrize(
    ("backend", "options", "ahead"),
    [
        ("here", {}, 0),
        ("threads", {"prefetch": 1}, 1),
        ("threads", {"prefetch": 6}, 6),
        ("threads", {"prefetch": 6, "max_ram_gb": 1e-6}, 2),  # one under way, one that waits for room
        ("torch", {"prefetch": 4}, 4),
    ],
)
def test_batches_are_drawn_as_far_ahead_as_asked(dataset, backend: str, options: dict, ahead: int) -> None:
    scheduler = Drawn(30)
    loader = make_loader(dataset, backend, scheduler=scheduler, **options)
    for number, _ in enumerate(loader, start=1):
        assert scheduler.count == min(30, number + ahead)


class Crowd:
    """Counts the threads that are in it at the same time."""

    def __init__(self) -> None:
        self.num_images = self._num_inside = self.most = 0
        self._changed = threading.Condition()

    def __call__(self, image: torch.Tensor, **key: object) -> torch.Tensor:
        with self._changed:
            self.num_images += 1
            self._num_inside += 1
            self.most = max(self.most, self._num_inside)
            self._changed.notify_all()
        time.sleep(0.01)
        with self._changed:
            self._num_inside -= 1
        return image

    def wait_for(self, num_images: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self.num_images == num_images, timeout=30)


def test_all_threads_load_while_training_waits_and_one_where_that_suffices(dataset) -> None:
    crowd, ahead = Crowd(), 6
    scheduler = make_scheduler("random", batch_size=3)
    loader = make_loader(dataset, "threads", scheduler=scheduler, augment=crowd, prefetch=ahead)
    for _ in loader:
        pass
    assert crowd.most == 3, "training took each batch at once, and so waited"
    loader.set_epoch(1)
    num_images = np.cumsum([np.count_nonzero(dataset.records.height[list(rows)]) for rows in loader.plan])
    before, most = crowd.num_images, []
    for number, _ in enumerate(loader):  # all that was asked for is ready when training comes back
        crowd.most = 0
        crowd.wait_for(before + num_images[min(len(loader) - 1, number + ahead)])
        most.append(crowd.most)
    assert len(most) > 3 + ahead
    assert max(most[3:]) == 1


@pytest.mark.parametrize("backend", list(BACKENDS))
def test_leaving_half_way_ends_the_work(dataset, backend: str) -> None:
    loader = make_loader(dataset, backend)
    iterator = iter(loader)
    first = next(iterator)
    del iterator
    for batch in loader:
        assert batch.record_ids == first.record_ids
        break
    with pytest.raises(ZeroDivisionError):
        sum(1 / 0 for _ in loader)


class Wrong:
    def __call__(self, image: torch.Tensor, **key: object) -> torch.Tensor:
        raise KeyError("a mistake in an augmentation")


@pytest.mark.parametrize("backend", list(BACKENDS))
def test_a_mistake_in_users_code_comes_out_as_it_is(dataset, backend: str) -> None:
    with pytest.raises(KeyError, match="a mistake in an augmentation"):
        list(make_loader(dataset, backend, augment=Wrong()))


class NoRoom:
    def __call__(self, image: torch.Tensor, **key: object) -> torch.Tensor:
        raise RuntimeError(
            "unable to allocate shared memory(shm) for file </torch_1>: No space left on device"
        )


def test_where_shared_memory_is_too_small_the_remedy_is_named(dataset) -> None:
    with pytest.raises(RunError, match=r"No space left on device; enlarge /dev/shm \(--shm-size\), or use"):
        list(make_loader(dataset, "torch", augment=NoRoom()))


@pytest.mark.parametrize(
    "error", [RuntimeError("can't start new thread"), BlockingIOError(11, "unavailable")]
)
def test_a_machine_at_its_limit_of_processes_is_told_from_other_failures(dataset, monkeypatch, error) -> None:
    monkeypatch.setattr("concurrent.futures.ThreadPoolExecutor._adjust_thread_count", Mock(side_effect=error))
    with pytest.raises(
        RunError, match=r"workers cannot take a batch: .*; where no .* use fewer num_workers, or raise"
    ):
        list(make_loader(dataset, num_workers=2))


def test_a_worker_that_never_had_a_batch_ends_too(dataset) -> None:
    with pytest.raises(KeyError, match="a mistake in an augmentation") as caught:
        list(make_loader(dataset, "torch", scheduler=Drawn(1), augment=Wrong()))
    assert multiprocessing.active_children() == [], caught  # its traceback holds on to torch's iterator


def test_an_interrupt_ends_the_threads(dataset) -> None:
    loader = make_loader(dataset, "threads", augment=Slow(0.2))
    interrupt = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
    interrupt.start()
    with pytest.raises(KeyboardInterrupt):
        list(loader)
    interrupt.join()


@pytest.mark.parametrize("backend", list(BACKENDS))
def test_a_closed_loader_has_ended_everything_and_says_so(dataset, backend: str) -> None:
    with make_loader(dataset, backend, augment=Slow(0.01)) as loader:
        batches = iter(loader)
        first = next(batches)
        state = loader.state_dict()
        workers = multiprocessing.active_children()
        assert len(workers) == (2 if backend == "torch" else 0)
        loader.close()
        assert not any(worker.is_alive() for worker in workers)
        assert [thread.name for thread in threading.enumerate() if thread.name.startswith("mmlab-")] == []
        with pytest.raises(RunError, match=r"this loader is closed; `load_state_dict` of a new one"):
            next(batches)
    with pytest.raises(RunError, match=r"this loader is closed; `load_state_dict` of a new one"):
        iter(loader)
    successor = make_loader(dataset, backend, augment=Slow(0))
    successor.load_state_dict(state)
    assert_same([first, *successor], list(make_loader(dataset)))


@pytest.mark.parametrize("backend", ["threads", "torch"])
def test_who_waits_for_a_batch_is_told_that_the_loader_was_closed(dataset, backend: str) -> None:
    loader = make_loader(dataset, backend, augment=Slow(0.3))
    closing = threading.Timer(0.5, loader.close)
    closing.start()
    with pytest.raises(RunError, match="closed"):
        list(loader)
    closing.join()


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="only Linux has this way to schedule")
def test_threads_do_not_push_training_aside_when_they_are_woken(dataset) -> None:
    ours = os.sched_getscheduler(0)
    batches = iter(make_loader(dataset, "threads", prefetch=1))
    next(batches)
    policies = {
        os.sched_getscheduler(thread.native_id)
        for thread in threading.enumerate()
        if thread.name.startswith("mmlab-")
    }
    assert policies == {os.SCHED_BATCH}
    assert os.sched_getscheduler(0) == ours


def test_workers_are_ended_while_work_of_an_epoch_that_was_left_waits(dataset) -> None:
    loader = make_loader(
        dataset, "torch", prefetch=9, augment=Slow(0.05)
    )  # an error in a thread fails the test
    next(iter(loader))
    loader.close()
    assert [thread.name for thread in threading.enumerate() if "Executor" in type(thread).__name__] == []


def test_workers_end_in_order_after_an_epoch(dataset) -> None:
    loader = make_loader(dataset, "torch")
    assert_same(list(loader), list(make_loader(dataset)))
    workers = multiprocessing.active_children()
    del loader
    for worker in workers:
        worker.join(10)
    assert [worker.exitcode for worker in workers] == [0, 0]


def test_a_killed_worker_is_named_with_its_sample_and_its_work_done_again(dataset, tmp_path) -> None:
    events = []
    victim = dataset.records.ids[next(iter(make_loader(dataset).plan))[0]]
    loader = make_loader(dataset, "torch", augment=Killed(victim, tmp_path), emit=events.append)
    assert_same(list(loader), list(make_loader(dataset)))
    (warning,) = [event for event in events if event.kind == "warning"]
    assert f"with record '{victim}'" in warning.values["message"]
    del loader


def test_a_sample_that_kills_every_worker_ends_the_run(dataset) -> None:
    victim = dataset.records.ids[0]
    with (
        pytest.warns(RuntimeWarning, match=f"were killed or crashed: process .* with record '{victim}'"),
        pytest.raises(RunError, match=f"killed or crashed 2 times .* with record '{victim}'"),
    ):
        list(make_loader(dataset, "torch", augment=Killed(victim)))


def test_workers_do_not_inherit_locks_that_other_threads_hold(dataset) -> None:
    """As a copy of this process would: in it, nobody would ever release them."""
    expected = list(make_loader(dataset))
    with NeedsLock.lock:
        batches = list(make_loader(dataset, "torch", augment=NeedsLock()))
    assert_same(batches, expected)


def test_workers_find_a_scripts_libraries_imported_and_end_when_it_is_killed(
    dataset, scenes, tmp_path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(KILLED_SCRIPT)
    command = [sys.executable, "-W", "error", str(script), str(scenes)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        workers = [psutil.Process(int(pid)) for pid in process.stdout.readline().split()]
        process.kill()
    assert len(workers) == 1
    assert psutil.wait_procs(workers, timeout=30)[1] == []


def test_what_a_worker_cannot_import_is_said_before_it_fails(dataset) -> None:
    local = type("Local", (Aspect,), {})(32 * 32)
    loader = make_loader(dataset, "torch", augment=lambda image, **key: local)
    with pytest.raises(OptionError, match=r"worker processes cannot import .* use backend='threads'"):
        next(iter(loader))


KILLED_SCRIPT = """
import sys
was_imported = "matplotlib" in sys.modules

import multiprocessing, time
from matplotlib.figure import Figure
from mmlab import MultimodalDataset, PlannedLoader, make_scheduler, read_records

class InAWorker:
    def __call__(self, image, **_):
        assert was_imported, "each worker imports matplotlib for itself"
        return image

if __name__ == "__main__":
    dataset = MultimodalDataset(read_records(sys.argv[1], progress=False))
    plan = make_scheduler("random", batch_size=4)
    batches = iter(PlannedLoader(dataset, plan, backend="torch", num_workers=1, augment=InAWorker()))
    next(batches)
    print(*[process.pid for process in multiprocessing.active_children()], flush=True)
    time.sleep(100)
"""

SCRIPT = """
import sys
from mmlab import MultimodalDataset, PlannedLoader, make_scheduler, read_records
from mmlab.errors import OptionError

dataset = MultimodalDataset(read_records(sys.argv[1], progress=False))
plan = make_scheduler("random", batch_size=4)

class InACell(MultimodalDataset):
    pass

import mmlab
left_over = mmlab.left_over = []  # they outlive the functions of modules
for backend in ("threads", "torch"):
    left_over.append(iter(PlannedLoader(dataset, plan, backend=backend, num_workers=2)))
    next(left_over[-1])
try:
    next(iter(PlannedLoader(InACell(dataset.records), plan, backend="torch", num_workers=2)))
except OptionError as error:
    print(error)
"""


def test_a_notebook_may_end_at_any_moment_and_is_told_what_cannot_work(scenes) -> None:
    """Iterators are left half-way in global variables of an interactive session, which ends."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", SCRIPT, str(scenes)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "it was defined in a notebook or an interactive session; use backend='threads'" in done.stdout
