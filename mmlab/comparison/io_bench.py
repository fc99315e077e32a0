"""Finds the bottleneck of training on a data set: `mmlab bench io`.

Every stage is measured alone, on the data's own samples: reading, decoding, tokenising, padding, the copy to the
device, and real training steps. Takes about fifteen seconds, most of them for reading and for the steps. Reads at most
256 MiB twice, and drops those from the system's cache first. Does not run the loader, whose throughput is in
`PlannedLoader.stage_report()`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from html import escape
from itertools import cycle
from math import ceil
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch

from mmlab.data.collate import collate
from mmlab.data.dataset import MultimodalDataset
from mmlab.data.readers import errors_of, read_records
from mmlab.errors import DataError, OptionError, check_numbers
from mmlab.loading.backends import Copier
from mmlab.loading.speeds import MIB, ReadRates, read_rates, work_rate
from mmlab.loading.stages import as_table
from mmlab.machine import num_usable_cores, progress_bar, resolve_device
from mmlab.model.presets import build_model
from mmlab.training.loop import FusionTrainer
from mmlab.training.losses.contrastive import Contrastive
from mmlab.training.step_meter import clock
from mmlab.types import Batch, parse_image_policy

_NUM_IMAGES = 64  # decoded
_NUM_TEXTS = 4096
_NUM_BATCHES = 4  # trained on in turn
_STEPS_S = 3.0
_COPY_S = 0.5
_COLUMNS = ("stage", "samples_per_s", "mib_per_s", "how")


@dataclass(frozen=True, slots=True, kw_only=True)
class IoBench:
    """The throughput of each stage alone; printing it gives a table and the conclusion."""

    source: str
    model: str
    device: str
    batch_size: int
    num_cores: int
    image_bytes: float  # mean of an encoded image
    padded_bytes: float  # mean of a sample in its batch
    reading: ReadRates
    decode_per_core: float  # images/s
    tokenise_per_core: float  # texts/s
    collate_per_core: float  # samples/s
    copy_per_s: float | None  # samples/s; None where training runs on the CPU and nothing is copied
    train_per_s: float  # samples/s

    @property
    def rows(self) -> list[dict[str, Any]]:
        """One row per measurement: `stage`, `samples_per_s`, `mib_per_s` (of files or batches), and `how`."""
        read, cores, image, padded = self.reading, self.num_cores, self.image_bytes, self.padded_bytes
        decode, tokenise = self.decode_per_core, self.tokenise_per_core
        cold = None if read.cold_s is None else read.num_bytes / read.cold_s / image
        reader = "one reader, at random places"
        step = f"{self.model} on {self.device}, batches of {self.batch_size}"
        measured = (
            ("read, cold", cold, image, reader),
            ("read, warm", read.num_bytes / read.warm_s / image, image, reader),
            ("decode", cores * decode, image, f"{cores} cores, {decode:,.0f} each"),
            ("tokenise", cores * tokenise, None, f"{cores} cores, once, before the first epoch"),
            ("collate", self.collate_per_core, padded, "one core"),
            ("copy", self.copy_per_s, padded, f"to {self.device}"),
            ("train", self.train_per_s, padded, step),
        )
        return [
            dict(zip(_COLUMNS, (stage, rate, None if size is None else rate * size / MIB, how), strict=True))
            for stage, rate, size, how in measured
            if rate is not None
        ]

    @property
    def supply(self) -> dict[str, float]:
        """Samples/s that each stage of an epoch can supply; reading is cold where that could be measured."""
        rates = {row["stage"]: row["samples_per_s"] for row in self.rows}
        read = rates["read, cold" if self.reading.really_cold else "read, warm"]
        return {"read": read} | {name: rates[name] for name in ("decode", "collate", "copy") if name in rates}

    @property
    def bottleneck(self) -> str:
        """The slowest stage if it is slower than training, else `train`."""
        stage = min(self.supply, key=self.supply.__getitem__)
        return stage if self.supply[stage] < self.train_per_s else "train"

    @property
    def sentence(self) -> str:
        """Names the bottleneck, and what would remove it."""
        supply, wanted, stage = self.supply, self.train_per_s, self.bottleneck
        if stage == "train":
            slowest = min(supply, key=supply.__getitem__)
            shared = ", on the same cores" if self.device == "cpu" else ""
            return (
                f"Training is the bottleneck: its steps take {wanted:,.0f} samples/s; {slowest}, the slowest stage of "
                f"loading, could give {supply[slowest]:,.0f} samples/s{shared}. Only a faster step would help: another "
                "device, lower precision, a smaller model or smaller images."
            )
        rest = min(rate for name, rate in supply.items() if name != stage)
        kb = f"{self.padded_bytes / 1000:,.0f} kB"
        remedies = {
            "read": f"a disk that gives {wanted * self.image_bytes / MIB:,.0f} MiB/s in files read at random, a copy "
            "of the data on a local disk, or more readers at once where the disk can serve them",
            "decode": f"{ceil(wanted / self.decode_per_core)} cores instead of {self.num_cores}, images stored "
            f"smaller, or a cache (mmlab cache build): {self.collate_per_core:,.0f} of its images a second are padded",
            "collate": f"smaller images, or images of similar size together: a sample has {kb} in its batch",
            "copy": f"smaller images: a sample has {kb} in its batch",
        }
        return (
            f"{stage.capitalize()} is the bottleneck: it gives {supply[stage]:,.0f} of the {wanted:,.0f} samples/s "
            f"that training steps take, and the next stage {rest:,.0f}. To remove it: {remedies[stage]}."
        )

    def as_dict(self) -> dict[str, Any]:
        """What `mmlab bench io --json` prints."""
        reading = asdict(self.reading) | {"really_cold": self.reading.really_cold}
        found = {"rows": self.rows, "bottleneck": self.bottleneck, "sentence": self.sentence}
        return asdict(self) | found | {"reading": reading}

    def __str__(self) -> str:
        cold = "" if self.reading.really_cold else "\nCold and warm are alike: the disk is in memory."
        return f"{self.source}\n{as_table(_COLUMNS, self.rows).to_string(index=False)}{cold}\n{self.sentence}"

    def _repr_html_(self) -> str:
        return f"{as_table(_COLUMNS, self.rows).to_html(index=False)}<p>{escape(self.sentence)}</p>"


def bench_io(
    data: str | Path,
    *,
    model: str = "tiny",
    image: str = "square:224",
    tokenizer: str = "builtin",
    batch_size: int = 32,
    device: str = "auto",
    precision: str = "fp32",
    limit: int | None = None,
    images: str | None = None,
    skip_bad_rows: bool = False,
    progress: bool = True,
) -> IoBench:
    """Measure every stage from the disk to the training step on a data set.

    Args:
        data: anything that `read_records` takes.
        model: preset whose contrastive training steps are timed.
        image: image policy in short form, see `parse_image_policy`.
        limit: use so many samples, drawn from every split.
        images: folder of the images, where they are not beside the data.
        skip_bad_rows: leave out rows that cannot be used, with a warning.
        progress: show a bar on stderr.

    Raises:
        DataError: the data cannot be used, or have no images.
        OptionError: an option cannot work; the message names it.
    """
    check_numbers({"batch_size": batch_size})
    if batch_size < 2:
        raise OptionError(f"batch_size must be at least 2 (the loss needs negatives), found {batch_size}")
    policy, device = parse_image_policy(image), resolve_device(device)
    errors = errors_of(skip_bad_rows)
    records = read_records(data, images=images, limit=limit, errors=errors, progress=progress)
    rows = np.flatnonzero(records.height)
    if (num_images := len(np.unique(records.group[rows]))) < 2:
        raise DataError(f"{data}: found {num_images} images in {len(records)} records, at least 2 are needed")
    with progress_bar(total=6, name="preparing", show=progress) as bar:

        def show(stage: str) -> None:
            bar.set_description(stage)
            bar.update()

        dataset = MultimodalDataset(records, tokenizer=tokenizer, image_policy=policy)
        spread = np.random.default_rng(0).permutation(rows)
        show("reading")
        reading = read_rates(_files(records, data))
        show("decoding")
        encoded = {int(row): records.read_image(row) for row in spread[:_NUM_IMAGES]}

        def decode() -> list[Any]:
            return [dataset.decode(row, image) for row, image in encoded.items()]

        decode_per_core = work_rate(decode, len(encoded))
        show("tokenising")
        texts = [text for text in records.texts[:_NUM_TEXTS] if text is not None] or [""]
        tokenise = partial(dataset.tokenizer, texts, truncation=False, verbose=False)
        tokenise_per_core = work_rate(tokenise, len(texts))
        show("padding")
        chosen = np.resize(spread[: _NUM_BATCHES * batch_size], (_NUM_BATCHES, batch_size))
        samples = [[dataset[int(row)] for row in batch] for batch in chosen]
        collate_per_core = work_rate(lambda: collate(samples[0]), batch_size)
        batches = [collate(batch) for batch in samples]
        show("copying and training")
        copy_per_s = None
        if device.startswith("cuda"):
            pinned = [batch.pin_memory() for batch in batches]
            copy_per_s = _rate(Copier(pin=True, device=device), pinned, _COPY_S, device)
        trainer = FusionTrainer(
            build_model(model, vocab_size=len(dataset.tokenizer)),
            objectives={"contrastive": Contrastive()},
            precision=precision,
            device=device,
        )
        train_per_s = _rate(lambda batch: trainer.train_step([batch]), batches, _STEPS_S, device)
        bar.update()
    return IoBench(
        source=records.source or str(data),
        model=model,
        device=device,
        batch_size=batch_size,
        num_cores=num_usable_cores(),
        image_bytes=sum(map(len, encoded.values())) / len(encoded),
        padded_bytes=sum(tensor.nbytes for batch in batches for tensor in batch.tensors()) / chosen.size,
        reading=reading,
        decode_per_core=decode_per_core,
        tokenise_per_core=tokenise_per_core,
        collate_per_core=collate_per_core,
        copy_per_s=copy_per_s,
        train_per_s=train_per_s,
    )


def _files(records: Any, data: str | Path) -> list[Path] | Path:
    """The files that hold the images of some `Records`, or `data` itself where the store cannot name them."""
    part_of = getattr(records.store, "part_of", None)
    if part_of is None:
        return Path(data)
    names = dict.fromkeys(part_of(path)[0] for path in records.image_paths if path is not None)
    return [Path(name) for name in names]


def _rate(work: Callable[[Batch], object], batches: list[Batch], least_s: float, device: str) -> float:
    """Samples/s of `work` on batches already made, in turns; the first two calls are not timed."""
    turns = cycle(batches)
    for _ in range(2):
        work(next(turns))
    num_samples, started = 0, clock(torch.device(device))
    while perf_counter() - started < least_s:
        batch = next(turns)
        work(batch)
        num_samples += len(batch)
    return num_samples / (clock(torch.device(device)) - started)
