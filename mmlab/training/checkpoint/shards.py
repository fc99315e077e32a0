"""Sharded tensors as safetensors files: a file from each rank, by `torch.distributed.checkpoint` (DCP)."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.tensor import DTensor


def save_shards(folder: Path, tensors: Mapping[str, Tensor]) -> str:
    """Write this rank's shares; one rank writes what all have. A collective; returns who failed and why."""
    try:
        writer = dcp.HuggingFaceStorageWriter(str(folder), save_distributed=True)
        dcp.save(dict(tensors), storage_writer=writer)
    except dcp.CheckpointException as error:  # on every rank; it keeps the frames of all that failed alive
        return "; ".join(
            f"rank {rank} could not write its shares into {folder}: {type(problem).__name__}: {problem}"
            for rank, (problem, _) in sorted(error.failures.items())
        )
    return ""


def load_shards(folder: Path, like: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
    """All tensors by name; no collective.

    Args:
        like: a model's weights by name. Of a sharded weight and its moments only this rank's share is read,
            to the same device; everything else is read whole, into host memory.

    Raises:
        ValueError: the model has no such weight, or it has another size.
    """
    reader = dcp.HuggingFaceStorageReader(str(folder))
    entries = reader.read_metadata().state_dict_metadata
    tensors = {
        key: _empty(key, entry, like)
        for key, entry in entries.items()
        if isinstance(entry, dcp.TensorStorageMetadata)
    }
    with warnings.catch_warnings():  # torch warns a single process that it is one
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.load(tensors, storage_reader=reader, no_dist=True)
    return tensors


def _empty(key: str, entry: dcp.TensorStorageMetadata, like: Mapping[str, Tensor] | None) -> Tensor:
    """Memory for the part of a tensor that is read: `model.WEIGHT` or `optimizer.state.WEIGHT.KEY`."""
    dtype = entry.properties.dtype
    if like is None:
        return torch.empty(entry.size, dtype=dtype)
    is_weight = key.startswith("model.")
    if is_weight:
        name = key.removeprefix("model.")
    else:
        name = key.removeprefix("optimizer.state.").rpartition(".")[0]
    weight = like.get(name)
    if weight is None or (is_weight and weight.shape != entry.size):
        found = "none of that name" if weight is None else tuple(weight.shape)
        raise ValueError(f"it has a weight {name} of shape {tuple(entry.size)}, the model has {found}")
    if isinstance(weight, DTensor) and weight.shape == entry.size:
        return torch.empty_like(weight, dtype=dtype)
    return torch.empty(entry.size, dtype=dtype)
