"""Every loader of the benchmark that is installed does the same work, and its goals follow from its rows."""

from __future__ import annotations

import importlib.util
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "benchmarks/loading.py"


@pytest.fixture(scope="module")
def benchmark():
    """The script as a module; its own modules lie beside it."""
    spec = importlib.util.spec_from_file_location("loading_benchmark", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(SCRIPT.parent))
    try:
        spec.loader.exec_module(module)
        yield module
    finally:
        sys.path.remove(str(SCRIPT.parent))


@pytest.fixture(scope="module")
def corpus(benchmark, tmp_path_factory: pytest.TempPathFactory):
    return benchmark.make_corpus(tmp_path_factory.mktemp("corpus"), 40, "imagenet")


def test_all_loaders_give_the_same_images_and_tokens(benchmark, corpus, monkeypatch) -> None:
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    batches = benchmark.batches_of(corpus)
    expected = None
    for peer in (
        benchmark.OURS,
        benchmark.OURS_TORCH,
        benchmark.CACHED[0],
        benchmark.ARTICLE,
        *benchmark.PEERS,
    ):
        if not peer.installed:
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of other projects
            with peer.open(corpus, min(peer.num_workers, 2)) as epoch:
                pixels = torch.cat([pixels for pixels, _ in epoch(batches)]).float()
        assert pixels.shape == (len(corpus), 3, 224, 224), peer.name
        means = np.sort(pixels.mean(dim=(1, 2, 3)).numpy())  # some have an order of their own
        expected = means if expected is None else expected
        np.testing.assert_allclose(means, expected, atol=0.5, err_msg=peer.name)


def test_a_timed_loader_gives_whole_epochs(benchmark, corpus) -> None:
    found = benchmark.time_loader(benchmark.OURS, corpus, benchmark.batches_of(corpus), 2)
    assert found["images_per_s"] > 0
    assert found["cpu_ms_per_image"] >= 0


def test_a_flipped_byte_is_survived(benchmark, corpus, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="damaged cache"):
        assert benchmark.FAULTS["flipped byte"](replace(corpus, folder=tmp_path)) == 0


def test_resuming_gives_the_batches_that_were_left(benchmark, corpus) -> None:
    assert benchmark.resume(corpus, "threads")["num_wrong_batches"] == 0
