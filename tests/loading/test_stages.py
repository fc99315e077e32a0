"""The report names the bottleneck; its figures are those of the run; events carry them."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from mmlab.data.dataset import MultimodalDataset
from mmlab.loading.cache.key import cache_key
from mmlab.loading.cache.store import SampleCache
from mmlab.loading.stages import StageMeter, StageReport, as_table
from mmlab.runs.events import RunLog, read_events
from tests.loading.loaders import BACKENDS, Slow, make_loader


@pytest.mark.serial
@pytest.mark.parametrize("backend", list(BACKENDS))
def test_slow_decoding_is_named_and_events_tell_the_same(dataset, tmp_path: Path, backend: str) -> None:
    with RunLog(tmp_path) as log:
        loader = make_loader(dataset, backend, augment=Slow(0.02), emit=log.emit, prefetch=1)
        for epoch in range(2):  # the first starts processes, for which no stage is to blame
            loader.set_epoch(epoch)
            started = time.perf_counter()
            batches = list(loader)
            duration_s = time.perf_counter() - started
    report = loader.stage_report()
    assert report.bottleneck == "decode"
    assert "decode is the bottleneck: training waited" in str(report)
    assert "<td>decode</td>" in report._repr_html_()
    events = [event for event in read_events(log.path)[0] if event.kind == "stage"]
    assert [event.values["stage"] for event in events[-4:]] == ["read", "decode", "collate", "train"]
    for row in report.rows:
        assert 0 <= row["busy_ratio"] <= 1
        assert row["items_per_s"] >= sum(map(len, batches)) / duration_s
    train = report.rows[-1]
    assert train["items_per_s"] * train["wait_ratio"] <= 1.05 * sum(map(len, batches)) / (
        0.02 * len(dataset) / 3
    )


@pytest.mark.serial
def test_nothing_is_short_where_training_is_slow(dataset) -> None:
    loader = make_loader(dataset, "threads", prefetch=4)
    batches = iter(loader)
    next(batches)
    loader._backend.meter = StageMeter(loader._backend.meter.num_threads, shared=False)  # not the start
    started, trained_s = time.perf_counter(), 0.0
    while True:
        before = time.perf_counter()
        time.sleep(0.03)
        trained_s += time.perf_counter() - before
        if next(batches, None) is None:
            break
    waited_ratio = 1 - trained_s / (time.perf_counter() - started)
    report = loader.stage_report()
    assert report.wait_ratio == pytest.approx(waited_ratio, abs=0.02)
    assert report.rows[-2]["queue_depth"] > 0  # batches were ready


def test_hits_of_the_cache_are_in_the_events(dataset, tmp_path: Path) -> None:
    own = MultimodalDataset(dataset.records, tokenizer=dataset.tokenizer, image_policy=dataset.image_policy)
    cache = SampleCache(tmp_path / "cache", key=cache_key(own))
    ratios, sizes = [], []
    for backend in BACKENDS:
        events: list = []
        list(make_loader(own, backend, cache=cache, emit=events.append))
        (read,) = [event.values for event in events if event.values.get("stage") == "read"][-1:]
        ratios.append(read["cache_hit_ratio"])
        sizes.append(read["cache_bytes"])
    assert ratios[0] < 1  # captions of one image share it, later ones find it
    assert ratios[1:] == [1, 1]
    assert sizes[0] == sizes[1] > 0


def report_of(
    busy: dict[str, float],
    wait_ratio: float,
    *,
    shared: bool = False,
    hits: float = 0.0,
    num_threads: int = 2,
) -> StageReport:
    rows = [
        {
            "stage": stage,
            "num_threads": num_threads,
            "items_per_s": 100.0,
            "busy_ratio": ratio,
            "wait_ratio": 1 - ratio,
            "queue_depth": None if shared else 0.0,
        }
        for stage, ratio in {**busy, "train": 1 - wait_ratio}.items()
    ]
    rows[-1] |= {"wait_ratio": wait_ratio, "queue_depth": None}
    return StageReport(rows, hits)


@pytest.mark.parametrize("shared", [False, True], ids=["threads", "processes"])
def test_a_stage_that_idles_is_not_blamed_for_the_wait(shared: bool) -> None:
    report = report_of({"read": 0.01, "decode": 0.08, "collate": 0.01}, 0.03, shared=shared)
    assert report.bottleneck is None
    assert "decode, worked only 8% of it" in report.sentence
    assert "would help" not in report.sentence


def test_worker_processes_are_blamed_for_a_wait_only_if_they_are_busy() -> None:
    for num, *busy, wait_ratio in (
        (2, 0, 1e-4, 2e-4, 0.017),
        (8, 0, 0.09, 0, 0.15),
        (3, 0.1, 0.01, 0.09, 0.94),
    ):
        named = dict(zip(("read", "decode", "collate"), busy, strict=True))
        assert report_of(named, wait_ratio, shared=True, num_threads=num).bottleneck is None
    report = report_of({"read": 0.2, "decode": 0.35, "collate": 0.3}, 0.9, shared=True)
    assert report.bottleneck == "decode", (
        "workers that do all stages are busy, though no stage takes half their time"
    )
    assert "its threads or processes (2) were busy 35%" in report.sentence


def test_without_workers_the_stage_that_takes_the_time_is_short() -> None:
    report = report_of({"read": 0.01, "decode": 0.2, "collate": 0.02}, 0.24, shared=True, num_threads=1)
    assert report.bottleneck == "decode"
    assert "waited 24.0% of the time" in report.sentence


def test_reading_from_the_cache_is_not_blamed_on_the_disk() -> None:
    busy = {"read": 0.9, "decode": 0.01, "collate": 0.4}
    assert "a faster disk" in report_of(busy, 0.95).sentence
    cached = report_of(busy, 0.95, hits=1.0).sentence
    assert "disk" not in cached
    assert "copied from the cache" in cached


def test_tables_have_no_exponents_and_no_raw_bytes() -> None:
    row = {"stage": "read", "items_per_s": 9411.3, "busy_ratio": 0.0312, "ram_bytes": 123_456_789}
    _, line = as_table(list(row), [row]).to_string(index=False).splitlines()
    assert line.split() == ["read", "9,411", "3.1%", "118", "MiB"]
