"""Loading images and captions beside other loaders: speed, start, tuning, waiting, the disk, faults and resuming.

    python benchmarks/loading.py [--quick] [--kind KIND] [--photos FOLDER] [--json FILE | --out DIR]

The same work for all: read, decode, resize to 224 x 224, tokenise, batches of 32. Four kinds of images, in turn:
photograph-like ones with the sizes and qualities of ImageNet, of COCO and of a camera, made on the spot, and generated
scenes of 100 kB; and the JPEG files of `--photos`, repeated, where given. They are read into the system's cache before
anything is timed. Arms take turns; every repetition is kept, ratios are geometric means over the turns. Tuning, waiting,
the disk and faults are measured with images like ImageNet's. About 30 minutes; `--quick` takes these alone, fewer
images and turns, one fault, no worker processes, and no peers but torch's DataLoader. `--out`, without `--quick`, also
writes the table and the figure of docs/internals/loading.md.
Exit code: 0 done, whether or not every goal is met.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from _common import add_common_options, print_goals, write_if_asked
from _loading_arms import (
    ARTICLE,
    BARE,
    BATCH_SIZE,
    CACHED,
    CROPS,
    LIMIT,
    OURS,
    OURS_TORCH,
    PEERS,
    Peer,
    Rows,
    ours,
    planned_loader,
    torch_loader,
)  # fmt: skip
from _loading_corpus import Corpus, make_corpus
from _loading_disk import from_the_disk
from _loading_faults import FAULTS, resume, run_fault
from _loading_report import TUNED, document, judge, table

from mmlab.loading.loader import BACKENDS

FIXED_WORKERS, FIXED_PREFETCH = (1, 2, 4, 8), (2, 4, 16)  # what tuning is compared with
STEP_RATIO = 1.5  # of a training step, to the time in which a batch is loaded
NUM_FAULT_IMAGES = 96
NUM_IMAGES = {"imagenet": 800, "coco": 400, "camera": 40, "scenes": 400}


def main() -> None:
    """Run everything, print a table and the goals, write the results if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add_common_options(parser, "loading", out=", and draw the documentation's figure")
    parser.add_argument("--kind", choices=NUM_IMAGES, help="images of this kind alone")
    parser.add_argument("--photos", type=Path, metavar="FOLDER", help="JPEG files, too, repeated")
    options = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # workers fork after the tokenizer was used
    warnings.filterwarnings("ignore", "This DataLoader will create", UserWarning)
    num_turns = 2 if options.quick else 5
    peers = PEERS[3:5] if options.quick else PEERS
    for peer in peers:
        if not peer.installed:
            print(f"{peer.name}: {peer.package} is not installed, left out")
    peers = [peer for peer in peers if peer.installed]
    kinds = [options.kind] if options.kind else list(NUM_IMAGES)[: 1 if options.quick else None]
    rows = []
    for kind in [*kinds, "photos"] if options.photos else kinds:
        with tempfile.TemporaryDirectory() as folder:
            num_images = NUM_IMAGES.get(kind, 600) // (5 if options.quick else 1)
            corpus = make_corpus(Path(folder), num_images, kind, options.photos if kind == "photos" else None)
            batches = batches_of(corpus)
            cold = (OURS, ARTICLE, LIMIT, BARE, *([] if options.quick else [OURS_TORCH]), *peers)
            found = compare("cold", cold, corpus, batches, num_turns)
            found += compare("crops", CROPS, corpus, batches, num_turns)
            found += compare("cached", CACHED, corpus, batches, num_turns, num_epochs=10)
            if kind == kinds[0]:
                found += compare_tuning(corpus, batches, num_turns, quick=options.quick)
                found += compare_first_epochs(corpus, batches, 2 if options.quick else 10)
                found += measure_waits(corpus, batches, np.median(found[0]["images_per_s"]))
                found += from_the_disk(corpus, num_turns)
                faults = list(FAULTS)[: 1 if options.quick else None]
                found += [run_fault(name, fault_folder(corpus, name)) for name in faults]
                backends = BACKENDS[: 1 if options.quick else None]
                found += [resume(corpus, name) for name in backends for _ in range(num_turns)]
            rows += [{"images": kind} | row for row in found]
    goals = judge(rows)
    print(f"\n{table(rows)}\n")
    print_goals(goals)
    write_if_asked(options, "loading", rows, goals)
    if options.out and not options.quick:
        document(rows)


def batches_of(corpus: Corpus) -> Rows:
    """All rows in batches, in order."""
    return [
        list(range(start, min(start + BATCH_SIZE, len(corpus))))
        for start in range(0, len(corpus), BATCH_SIZE)
    ]


def compare(
    data: str, peers: Sequence[Peer], corpus: Corpus, batches: Rows, num_turns: int, num_epochs: int = 1
) -> list[dict[str, Any]]:
    """One row a loader; they take turns, in an order that rotates."""
    found: dict[str, dict[str, list[float]]] = {peer.name: defaultdict(list) for peer in peers}
    for turn in range(num_turns):
        for place in range(len(peers)):
            peer = peers[(place + turn) % len(peers)]
            for key, value in time_loader(peer, corpus, batches, num_epochs).items():
                found[peer.name][key].append(value)
            print(
                f"{data:7} {peer.name:45} {found[peer.name]['images_per_s'][-1]:8,.0f} images/s", flush=True
            )
    return [
        {
            "kind": "speed",
            "data": data,
            "loader": peer.name,
            "package": peer.package,
            "num_workers": peer.num_workers,
        }
        | found[peer.name]
        for peer in peers
    ]


def time_loader(peer: Peer, corpus: Corpus, batches: Rows, num_epochs: int) -> dict[str, float]:
    """Speed over whole epochs, with workers that have loaded something before, and apart from it, when the first batch
    came from a loader that had none yet; waits for the workers' end.
    """
    with peer.open(corpus, peer.num_workers) as epoch:
        started = time.perf_counter()
        first = iter(epoch(batches[:2]))
        next(first)
        start_s = time.perf_counter() - started
        for _ in first:
            pass
        cpu_s, started = processor_s(), time.perf_counter()
        num_images = sum(len(pixels) for _ in range(num_epochs) for pixels, _ in epoch(batches))
        elapsed_s, used_s = time.perf_counter() - started, processor_s()
    assert num_images == num_epochs * len(corpus), f"{peer.name} gave {num_images} images"
    del epoch, first
    gc.collect()  # torch's workers end with their iterator
    for process in multiprocessing.active_children():
        process.join(10)
    used_s = {pid: seconds - cpu_s.get(pid, 0.0) for pid, seconds in used_s.items()}
    return {
        "images_per_s": num_images / elapsed_s,
        "cpu_ms_per_image": 1e3 * sum(used_s.values()) / num_images,
        "start_s": start_s,
    }


def processor_s() -> dict[int, float]:
    """Processor time of this process and each of its workers, by process id."""
    me = psutil.Process()
    times = {process.pid: process.cpu_times() for process in (me, *me.children(recursive=True))}
    return {pid: found.user + found.system for pid, found in times.items()}


def compare_tuning(corpus: Corpus, batches: Rows, num_turns: int, *, quick: bool) -> list[dict[str, Any]]:
    """Our loader as it tunes itself, beside the best of all fixed settings and the articles' fixed workers.

    The best is chosen in two passes over all settings and then measured anew, so that luck does not count.
    """
    workers, prefetches = (
        (FIXED_WORKERS[1:2], FIXED_PREFETCH[1:]) if quick else (FIXED_WORKERS, FIXED_PREFETCH)
    )
    fixed = [
        Peer(
            f"mmlab, {backend}, {n} workers, {ahead} ahead",
            "mmlab",
            partial(ours, backend=backend, prefetch=ahead),
            n,
        )
        for backend, n, ahead in product(BACKENDS[: 1 if quick else None], workers, prefetches)
        if backend == "threads" or ahead >= n
    ]
    rows = compare("search", fixed, corpus, batches, 1 if quick else 2)
    best = fixed[int(np.argmax([np.median(row["images_per_s"]) for row in rows]))]
    with planned_loader(corpus, num_workers="auto") as loader:
        settle(loader, batches, limit_s=1 if quick else 60)
        tuning = loader.tuning
        setting = {
            "num_workers": loader._backend.setting.num_workers,
            "prefetch": loader._backend.setting.prefetch,
        }
    tuned = Peer(
        TUNED,
        "mmlab",
        partial(ours, prefetch=setting["prefetch"]),
        setting["num_workers"],
    )
    articles = [
        Peer(f"DataLoader, PIL, v1 transforms, {n} workers", "torchvision", torch_loader, n) for n in (4, 8)
    ]
    best = replace(best, name=f"best fixed: {best.name}")
    rows += compare("tuning", (tuned, best, *articles), corpus, batches, num_turns)
    trace = [{key: getattr(trial, key) for key in trial.__slots__} for trial in tuning]
    return [*rows, {"kind": "trace", **setting, "trials": trace}]


def compare_first_epochs(corpus: Corpus, batches: Rows, num_turns: int) -> list[dict[str, Any]]:
    """Seconds of 25 batches by a fresh loader: with the number of workers given, and as it searches for that number."""
    rows = [{"kind": "first epoch", "num_workers": number, "seconds": []} for number in (2, "auto")]
    for turn in range(num_turns):
        for row in rows[:: 1 if turn % 2 else -1]:
            with planned_loader(corpus, num_workers=row["num_workers"]) as loader:
                loader.plan = [batches[number % len(batches)] for number in range(25)]
                started = time.perf_counter()
                for _ in loader:
                    pass
                row["seconds"].append(time.perf_counter() - started)
    return rows


def settle(loader: Any, batches: Rows, limit_s: float) -> None:
    """Load until the search for settings is over."""
    started, num_trials = time.perf_counter(), -1
    while len(loader.tuning) > num_trials and time.perf_counter() - started < limit_s:
        num_trials = len(loader.tuning)
        loader.plan = batches * 4
        for _ in loader:
            pass


def measure_waits(corpus: Corpus, batches: Rows, images_per_s: float) -> list[dict[str, Any]]:
    """Share of the time that training waits, when its step takes longer than loading a batch does.

    The step sleeps, as a processor does while a device works. The first batch, before which nothing can be ready, is
    left out.
    """
    step_s = STEP_RATIO * BATCH_SIZE / float(images_per_s)
    rows = []
    for peer in (replace(OURS, open=partial(ours, tokenise=False)), ARTICLE):
        with peer.open(corpus, peer.num_workers) as epoch:
            source = iter(epoch(batches * 3))
            next(source)
            waits, started = [], time.perf_counter()
            for _ in range(3 * len(batches) - 1):
                time.sleep(step_s)
                asked = time.perf_counter()
                next(source)
                waits.append(time.perf_counter() - asked)
            wait_ratio = sum(waits) / (time.perf_counter() - started)
        rows.append(
            {
                "kind": "wait",
                "loader": peer.name,
                "step_s": step_s,
                "wait_ratio": wait_ratio,
                "waits_s": waits,
            }
        )
        print(f"wait    {peer.name:45} {wait_ratio:8.2%} of the time, steps of {1e3 * step_s:.0f} ms")
    return rows


def fault_folder(corpus: Corpus, name: str) -> Path:
    """A folder with what a fault needs."""
    folder = corpus.folder / name
    folder.mkdir()
    pairs = (corpus.paths[:NUM_FAULT_IMAGES], corpus.texts[:NUM_FAULT_IMAGES])
    (folder / "corpus.json").write_text(json.dumps(pairs))
    corpus.tokenizer.save_pretrained(folder / "tokenizer")
    return folder


if __name__ == "__main__":
    main()
