"""Loaders that do the same work: read, decode, resize to 224 x 224, tokenise, batches of 32.

Each arm is a context manager that gives `epoch(batches)`, an iterator over batches of pixels (B, 3, 224, 224) uint8 and
token ids; workers stay for the next epoch. Streaming libraries take their own order and all samples. What is not
installed is left out and named. To add a peer: a function below and one line in `PEERS`.
"""

from __future__ import annotations

import importlib.util
import io
import tarfile
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import simplejpeg
import torch
from _loading_corpus import (
    CROP,
    RESIZE,
    SIDE,
    Corpus,
    Whole,
    decode_with_pil,
    decode_with_simplejpeg,
    decode_with_torchvision,
    stacked,
)
from PIL import Image
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import v2

from mmlab.data.augment import Augment
from mmlab.data.dataset import MultimodalDataset
from mmlab.loading.cache.build import build_cache
from mmlab.loading.cache.key import cache_key
from mmlab.loading.cache.store import SampleCache
from mmlab.loading.loader import PlannedLoader
from mmlab.schedule.schedulers import make_scheduler

BATCH_SIZE = 32
NUM_SHARDS = 8
Rows = list[list[int]]
Epoch = Callable[[Rows], Iterable[Any]]
Opened = AbstractContextManager[Epoch]


@dataclass(frozen=True, slots=True)
class Peer:
    """A loader, and what it needs."""

    name: str
    package: str
    open: Callable[[Corpus, int], Opened]  # corpus, workers
    num_workers: int = 2

    @property
    def installed(self) -> bool:
        """Whether its package can be imported."""
        return importlib.util.find_spec(self.package) is not None


class Photos(Dataset):
    """The articles' dataset: everything in `__getitem__`."""

    def __init__(self, corpus: Corpus, decode: Callable[[str], torch.Tensor]) -> None:
        self.corpus, self.decode = corpus, decode

    def __getitem__(self, row: int) -> tuple[torch.Tensor, list[int]]:
        ids = self.corpus.tokenizer(self.corpus.texts[row])["input_ids"]
        return self.decode(self.corpus.paths[row]), ids


class Turns:
    """A batch sampler whose batches can be changed between epochs."""

    def __init__(self) -> None:
        self.batches: Rows = []

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


@contextmanager
def torch_loader(
    corpus: Corpus, num_workers: int, *, decode: Callable[..., torch.Tensor] = decode_with_pil
) -> Generator[Epoch]:
    """torch's DataLoader over `Photos`."""
    yield _epochs_of(Photos(corpus, decode), num_workers)


def _epochs_of(dataset: Any, num_workers: int, collate: Callable[..., Any] = stacked) -> Epoch:
    turns = Turns()
    loader = DataLoader(
        dataset,
        batch_sampler=turns,  # type: ignore[arg-type]
        collate_fn=collate,
        num_workers=num_workers,
        persistent_workers=num_workers > 0,
    )

    def epoch(batches: Rows) -> Iterator[Any]:
        turns.batches = batches
        return iter(loader)

    return epoch


@contextmanager
def hugging_face(corpus: Corpus, num_workers: int) -> Generator[Epoch]:
    """datasets, with its Image feature, in torch's DataLoader."""
    import datasets

    def prepare(rows: dict[str, list[Any]]) -> dict[str, list[Any]]:
        images = [RESIZE(image.convert("RGB")) for image in rows["image"]]
        return {"image": images, "ids": corpus.tokenizer(rows["text"])["input_ids"]}

    table = datasets.Dataset.from_dict({"image": corpus.paths, "text": corpus.texts})
    table = table.cast_column("image", datasets.Image()).with_transform(prepare)
    yield _epochs_of(table, num_workers, _stacked_columns)


def _stacked_columns(samples: list[dict[str, Any]]) -> tuple[torch.Tensor, list[list[int]]]:
    return stacked([(sample["image"], sample["ids"]) for sample in samples])


def write_shards(corpus: Corpus) -> list[Path]:
    """The corpus as tar files, written the first time."""
    folder = corpus.folder / "shards"
    if not folder.exists():
        folder.mkdir()
        for shard in range(NUM_SHARDS):
            with tarfile.open(folder / f"{shard}.tar", "w") as tar:
                for row in range(shard, len(corpus), NUM_SHARDS):
                    tar.add(corpus.paths[row], f"{row}.jpg")
                    text = tarfile.TarInfo(f"{row}.txt")
                    content = corpus.texts[row].encode()
                    text.size = len(content)
                    tar.addfile(text, io.BytesIO(content))
    return sorted(folder.glob("*.tar"))


@contextmanager
def webdataset(corpus: Corpus, num_workers: int) -> Generator[Epoch]:
    """webdataset over tar shards, decoded with PIL."""
    import webdataset as wds

    def prepare(image: Image.Image, text: str) -> tuple[torch.Tensor, list[int]]:
        return RESIZE(image), corpus.tokenizer(text)["input_ids"]

    shards = list(map(str, write_shards(corpus)))
    samples = (
        wds.WebDataset(shards, shardshuffle=False, empty_check=False).decode("pilrgb").to_tuple("jpg", "txt")
    )
    batches = samples.map_tuple().map(lambda pair: prepare(*pair)).batched(BATCH_SIZE, collation_fn=stacked)
    loader = wds.WebLoader(
        batches, batch_size=None, num_workers=num_workers, persistent_workers=num_workers > 0
    )
    yield lambda _: iter(loader)


@contextmanager
def spdl(corpus: Corpus, num_workers: int, *, decode: Callable[..., torch.Tensor]) -> Generator[Epoch]:
    """spdl's thread pipeline (its own decoders need FFmpeg's libraries)."""
    from spdl.pipeline import PipelineBuilder

    def work(row: int) -> tuple[torch.Tensor, list[int]]:
        return decode(corpus.paths[row]), corpus.tokenizer(corpus.texts[row])["input_ids"]

    def epoch(batches: Rows) -> Iterator[Any]:
        rows = [row for batch in batches for row in batch]
        builder = PipelineBuilder().add_source(rows).pipe(work, concurrency=num_workers, output_order="input")
        pipeline = builder.aggregate(BATCH_SIZE).pipe(stacked).add_sink(4).build(num_threads=num_workers)
        with pipeline.auto_stop():
            yield from pipeline.get_iterator(timeout=60)

    yield epoch


@contextmanager
def torchdata_nodes(corpus: Corpus, num_workers: int) -> Generator[Epoch]:
    """torchdata's nodes with threads, decoded with PIL."""
    from torchdata import nodes

    photos = Photos(corpus, decode_with_pil)

    def epoch(batches: Rows) -> Iterator[Any]:
        source = nodes.IterableWrapper(batches)
        made = nodes.ParallelMapper(
            source,
            lambda rows: stacked([photos[row] for row in rows]),
            num_workers=num_workers,
            method="thread",
        )
        return iter(nodes.Loader(made))

    yield epoch


@contextmanager
def grain(corpus: Corpus, num_workers: int) -> Generator[Epoch]:
    """grain with threads, decoded with PIL."""
    import grain

    photos = Photos(corpus, decode_with_pil)

    def epoch(batches: Rows) -> Iterator[Any]:
        rows = [row for batch in batches for row in batch]
        made = grain.MapDataset.source(rows).map(lambda row: photos[row])
        options = grain.ReadOptions(num_threads=num_workers, prefetch_buffer_size=2 * BATCH_SIZE)
        return iter(made.to_iter_dataset(options).batch(BATCH_SIZE, batch_fn=stacked))

    yield epoch


@contextmanager
def mosaic(corpus: Corpus, num_workers: int) -> Generator[Epoch]:
    """mosaicml-streaming, decoded with PIL, in torch's DataLoader."""
    import streaming

    folder = str(corpus.folder / "mosaic")
    if not Path(folder).exists():
        with streaming.MDSWriter(out=folder, columns={"image": "bytes", "text": "str"}) as writer:
            for path, text in zip(corpus.paths, corpus.texts, strict=True):
                writer.write({"image": Path(path).read_bytes(), "text": text})

    class Stream(streaming.StreamingDataset):
        def __getitem__(self, row: Any) -> Any:
            found = super().__getitem__(row)
            return decode_with_pil(io.BytesIO(found["image"])), corpus.tokenizer(found["text"])["input_ids"]

    streaming.base.util.clean_stale_shared_memory()
    stream = Stream(local=folder, shuffle=False, batch_size=BATCH_SIZE)
    loader = DataLoader(
        stream, batch_size=BATCH_SIZE, collate_fn=stacked, num_workers=num_workers, persistent_workers=True
    )
    yield lambda _: iter(loader)


@contextmanager
def litdata(corpus: Corpus, num_workers: int) -> Generator[Epoch]:
    """litdata's chunks, decoded with torchvision."""
    import litdata as lit

    folder = str(corpus.folder / "litdata")
    if not Path(folder).exists():
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            lit.optimize(
                fn=partial(_encoded, corpus), inputs=list(range(len(corpus))), output_dir=folder,
                chunk_bytes="8MB", num_workers=1, start_method="fork",
            )  # fmt: skip

    def prepare(found: dict[str, Any]) -> tuple[torch.Tensor, list[int]]:
        encoded = torch.frombuffer(bytearray(found["image"]), dtype=torch.uint8)
        return decode_with_torchvision(encoded), corpus.tokenizer(found["text"])["input_ids"]

    stream = lit.StreamingDataset(folder, transform=prepare)
    loader = lit.StreamingDataLoader(
        stream, batch_size=BATCH_SIZE, collate_fn=stacked, num_workers=num_workers, persistent_workers=True
    )
    yield lambda _: iter(loader)


def _encoded(corpus: Corpus, row: int) -> dict[str, Any]:
    return {"image": Path(corpus.paths[row]).read_bytes(), "text": corpus.texts[row]}


@contextmanager
def ours(corpus: Corpus, num_workers: Any, *, tokenise: bool = True, **options: Any) -> Generator[Epoch]:
    """mmlab's loader. It tokenises texts once for all epochs; here they are tokenised again in every one, if asked."""
    with planned_loader(corpus, num_workers=num_workers, **options) as loader:

        def epoch(batches: Rows) -> Iterator[Any]:
            loader.plan = batches
            for batch, rows in zip(loader, batches, strict=True):
                if tokenise and loader.dataset.cache is None:  # in cached epochs nothing is prepared again
                    corpus.tokenizer([corpus.texts[row] for row in rows])
                yield batch.pixel_values, batch.input_ids

        yield epoch


@contextmanager
def planned_loader(corpus: Corpus, *, cached: bool = False, **options: Any) -> Generator[PlannedLoader]:
    """mmlab's loader over the corpus, with a complete cache if asked for; its workers end with the block."""
    dataset = MultimodalDataset(corpus.paths, corpus.texts, tokenizer=corpus.tokenizer, image_policy=Whole())
    if cached:
        dataset.cache = SampleCache(corpus.folder / "cache", key=cache_key(dataset))
        build_cache(dataset, progress=False)
    loader = PlannedLoader(dataset, make_scheduler("random", batch_size=BATCH_SIZE), **options)
    try:
        yield loader
    finally:
        loader._backend.close()


@contextmanager
def raw_decoding(corpus: Corpus, num_workers: int) -> Generator[Epoch]:
    """The machine's limit: libjpeg-turbo on as many threads and nothing else, files in memory."""
    encoded = [Path(path).read_bytes() for path in corpus.paths]
    with ThreadPoolExecutor(num_workers) as pool:

        def epoch(batches: Rows) -> Iterator[Any]:
            rows = [row for batch in batches for row in batch]
            images = pool.map(lambda row: simplejpeg.decode_jpeg(encoded[row], "RGB"), rows)
            return ((image[None], []) for image in images)

        yield epoch


@contextmanager
def bare_threads(corpus: Corpus, num_workers: int) -> Generator[Epoch]:
    """Read, decode and resize, and nothing else: no batches, no captions, no order."""

    def work(rows: list[int]) -> None:
        for row in rows:
            decode_with_simplejpeg(corpus.paths[row])

    def epoch(batches: Rows) -> Iterator[Any]:
        rows = [row for batch in batches for row in batch]
        with ThreadPoolExecutor(num_workers) as pool:
            list(pool.map(work, (rows[number::num_workers] for number in range(num_workers))))
        return iter([(rows, [])])

    yield epoch


ARTICLE = Peer("DataLoader, PIL, v1 transforms, 2 workers", "torchvision", torch_loader)
LIMIT = Peer("raw libjpeg-turbo decode, 2 threads", "simplejpeg", raw_decoding)
BARE = Peer("raw decode and resize, 2 threads", "simplejpeg", bare_threads)
OURS = Peer("mmlab, threads, 2 workers", "mmlab", partial(ours, backend="threads"))
OURS_TORCH = Peer("mmlab, torch, 2 workers", "mmlab", partial(ours, backend="torch"))
PEERS = (
    *(
        replace(ARTICLE, name=f"DataLoader, PIL, v1 transforms, {n} workers", num_workers=n)
        for n in (0, 4, 8)
    ),
    Peer(
        "DataLoader, torchvision.io, v2", "torchvision", partial(torch_loader, decode=decode_with_torchvision)
    ),
    Peer("DataLoader, simplejpeg, v2", "simplejpeg", partial(torch_loader, decode=decode_with_simplejpeg)),
    Peer("HF datasets, PIL", "datasets", hugging_face),
    Peer("webdataset, PIL", "webdataset", webdataset),
    Peer("spdl threads, PIL", "spdl", partial(spdl, decode=decode_with_pil)),
    Peer("spdl threads, simplejpeg, v2", "spdl", partial(spdl, decode=decode_with_simplejpeg)),
    Peer("torchdata nodes, PIL", "torchdata", torchdata_nodes),
    Peer("grain threads, PIL", "grain", grain),
    Peer("mosaicml-streaming, PIL", "streaming", mosaic),
    Peer("litdata, torchvision.io", "litdata", litdata),
)
CROPS = (  # random-resized crops, an area of 8 to 100 %
    Peer(
        "mmlab, threads", "mmlab", partial(ours, backend="threads", augment=Augment(crop_scale=(0.08, 1.0)))
    ),
    Peer(
        "DataLoader, PIL, v1 transforms",
        "torchvision",
        partial(torch_loader, decode=partial(decode_with_pil, transform=CROP)),
    ),
    Peer(
        "DataLoader, torchvision.io, v2",
        "torchvision",
        partial(torch_loader, decode=partial(decode_with_torchvision, change=v2.RandomResizedCrop(SIDE))),
    ),
)
CACHED = (
    Peer("mmlab, cached, threads", "mmlab", partial(ours, backend="threads", cached=True)),
    Peer("mmlab, cached, no workers", "mmlab", partial(ours, backend="threads", cached=True), 0),
)
