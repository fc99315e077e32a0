"""Weights and optimizer state that ranks share out, as files: `torch.distributed.checkpoint` (DCP).

Every rank writes its shares into one file, and any number of ranks reads of all files what it needs. Tensors go by the
weights' names: `model.NAME` and `optimizer.state.NAME.exp_avg`, which is what DCP calls them for other programs too.

Costs: of a GPU's share a copy in host memory while it is written; reading, one stored share of one tensor at a time.
Reads `.metadata`, a pickle, without running what it names.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import checkpoint
from torch.distributed.checkpoint import (
    CheckpointException,
    DefaultLoadPlanner,
    DefaultSavePlanner,
    FileSystemReader,
    FileSystemWriter,
    Metadata,
    SavePlan,
    SavePlanner,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future

from mmlab.errors import DataError, RunError
from mmlab.parallel.faults import current_watch

_METADATA = ".metadata"  # DCP's own: which file has what
_MODEL, _STATE = "model.", "optimizer.state."
_KNOWN = {  # what the metadata are made of
    "torch": ("Size",),
    "torch.serialization": ("_get_layout",),
    "torch.distributed.checkpoint.metadata": (
        "Metadata",
        "MetadataIndex",
        "TensorStorageMetadata",
        "ChunkStorageMetadata",
        "TensorProperties",
        "_MEM_FORMAT_ENCODING",
        "StorageMeta",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "pathlib": ("PosixPath",),
    "pathlib._local": ("PosixPath",),
}
State = Mapping[str, Mapping[str, Tensor]]  # of the optimizer, by the weight's name


def save_shards(folder: Path, model: Mapping[str, Tensor], state: State) -> None:
    """Write this rank's shares, on the disk when it returns; what every rank has rank 0 writes. A collective.

    Raises:
        RunError: some ranks failed, and they are named; on every rank.
    """
    tensors = {_MODEL + name: tensor for name, tensor in model.items()}
    tensors |= {
        f"{_STATE}{name}.{key}": value for name, values in state.items() for key, value in values.items()
    }
    watch = current_watch()
    try:
        with nullcontext() if watch is None else watch.exchange():
            checkpoint.save(
                tensors,
                storage_writer=_Writer(folder, sync_files=True),
                planner=DefaultSavePlanner(dedup_save_to_lowest_rank=True),
            )
    except CheckpointException as error:  # no `Exception`, and it holds the frames of all that failed
        failures = [
            f"rank {rank} could not write its shares into {folder}: {type(problem).__name__}: {problem}"
            for rank, (problem, _) in sorted(error.failures.items())
        ]
        raise RunError(
            f"{'; '.join(failures)}; earlier checkpoints are whole: make room there, and go on from the newest"
        ) from None


class _Writer(FileSystemWriter):
    """Says of a full disk what the system says; torch's archive then says that it stands at a wrong position."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise


def files_of(folder: Path, rank: int) -> list[Path]:
    """Those that a rank wrote; rank 0 has the metadata too."""
    return [file for file in sorted(folder.iterdir()) if _writer(file) == rank]


def _writer(file: Path) -> int:
    found = re.match(r"__(\d+)_", file.name)  # as DCP names a rank's files
    return int(found[1]) if found else 0


def load_shards(
    folder: Path, like: Mapping[str, Tensor] | None
) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]:
    """Weights, and the optimizer's state of each, by name; no collective.

    Args:
        like: a model's weights by name. Of one that is shared out, and of its moments, this rank's share alone is
            read, to the same device; everything else whole, into host memory.

    Raises:
        ValueError: the model has no such weight, or it is of another size.
    """
    metadata = _read_metadata(folder)
    tensors = {
        key: _room_for(key, entry, like)
        for key, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    # what `checkpoint.load` does, on every rank by itself
    reader, planner = FileSystemReader(folder), DefaultLoadPlanner()
    planner.set_up_planner(tensors, metadata)
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    plan = reader.prepare_local_plan(planner.create_local_plan())
    reader.read_data(planner.finish_plan(plan), planner).wait()
    model: dict[str, Tensor] = {}
    state: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        name, state_key = _name_of(key)
        if state_key is None:
            model[name] = tensor
        else:
            state.setdefault(name, {})[state_key] = tensor
    return model, state


def _name_of(key: str) -> tuple[str, str | None]:
    """Of a tensor: the weight's name; and which of its optimizer state, None where it is the weight itself."""
    if key.startswith(_MODEL):
        return key.removeprefix(_MODEL), None
    name, _, state_key = key.removeprefix(_STATE).rpartition(".")
    return name, state_key


def _room_for(key: str, entry: TensorStorageMetadata, like: Mapping[str, Tensor] | None) -> Tensor:
    name, state_key = _name_of(key)
    dtype = entry.properties.dtype
    if like is None:
        return torch.empty(entry.size, dtype=dtype)
    weight = like.get(name)
    if weight is None or (state_key is None and weight.shape != entry.size):
        found = "none of that name" if weight is None else tuple(weight.shape)
        raise ValueError(f"it has a weight {name} of {tuple(entry.size)}, here there is {found}")
    if isinstance(weight, DTensor) and weight.shape == entry.size:
        return torch.empty_like(weight, dtype=dtype)
    return torch.empty(entry.size, dtype=dtype)


class _Unpickler(pickle.Unpickler):
    """Makes what DCP's metadata consist of, and nothing else: a checkpoint may come from anywhere."""

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or name in _KNOWN.get(module, ()):
            return super().find_class(module, name)
        raise DataError(
            f"{_METADATA} of a checkpoint names {module}.{name}, found in no metadata of torch {torch.__version__}: "
            "read it with the torch that wrote it, if you trust who did"
        )


def _read_metadata(folder: Path) -> Metadata:
    with (folder / _METADATA).open("rb") as file:
        return _Unpickler(file).load()
