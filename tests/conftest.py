"""Real files that many tests share, made once a session; and how processes share the tests."""

from __future__ import annotations

import gc
import os
import signal
import sys
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest

# Tiny models run faster on one thread, on a machine that does other things much faster; read when torch is loaded.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Where the tests were started in the background, SIGINT is ignored, and processes that tests start would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# Under nohup it is SIGHUP. The tests go on ignoring it; a program that they start does not inherit a handler.
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda number, frame: None)
# Processes that tests start import the tests' helpers as `tests.<module>`, as the tests themselves do.
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")])
)

from mmlab.data.records import Records

COCO_SAMPLE = Path(__file__).parents[2] / "shared" / "data" / "coco-sample" / "captions.json"
HERE = Path(__file__).parent
BROWSER = "tests/browser"
# What takes long begins first, so that all processes end at about the same time.
LONGEST_FIRST = (
    "browser",
    "comparison",
    "parallel",
    "integrations",
    "pricing",
    "lab",
    "training",
    "loading",
    "benchmarks",
    "cli",
    "model",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def place(item: pytest.Item) -> int:
        room = item.path.relative_to(HERE).parts[0] if item.path.is_relative_to(HERE) else ""
        return LONGEST_FIRST.index(room) if room in LONGEST_FIRST else len(LONGEST_FIRST)

    items.sort(key=place)


@pytest.fixture(scope="module", autouse=True)
def frozen_objects() -> None:
    """What was imported stays: each collection of garbage, of which a comparison asks for many, need not look at it."""
    gc.collect()
    gc.freeze()


# A comparison would give back at its end what is frozen here, and the next one would look at all of it again.
_unfreeze, gc.unfreeze = gc.unfreeze, lambda: None


def pytest_sessionfinish() -> None:
    """Let the interpreter clear what was kept, or extensions report it as leaked."""
    _unfreeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A file at a time, in the order above, and one process for the browser: its files share a server and a page."""
    from xdist.scheduler import LoadFileScheduling

    class InOrder(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return BROWSER if nodeid.startswith(BROWSER) else super()._split_scope(nodeid)

    if config.getvalue("dist") != "loadfile":
        return None
    config.option.loadscopereorder = False
    return InOrder(config, log)


@pytest.fixture(scope="session", autouse=True)
def server_of_ranks() -> None:
    """Begin the server that forks ranks, where there are tests of some, with the first test.

    One that a loader of the package began for its workers would lack what ranks import, and each would import it again.
    """
    if "tests.ranks" in sys.modules:
        forkserver.ensure_running()


@pytest.fixture(scope="session")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small generated data set: 24 images of at most 96 pixels, three captions each, six images in the split val."""
    from mmlab.data.synthetic import make_dataset

    out = tmp_path_factory.mktemp("data") / "scenes"
    return make_dataset(
        out,
        num_images=24,
        captions_per_image=3,
        max_side=96,
        val_fraction=0.25,
        progress=False,
    )


@pytest.fixture(scope="session")
def records(scenes: Path) -> Records:
    """The records of `scenes`."""
    from mmlab.data.readers import read_records

    return read_records(scenes, progress=False)


@pytest.fixture(scope="session")
def coco_sample() -> Path:
    """Fifty real photographs with their captions, which are not part of the repository."""
    if not COCO_SAMPLE.exists():
        pytest.skip(f"needs real photographs in {COCO_SAMPLE.parent.name}, which are not there")
    return COCO_SAMPLE
