"""One checkpoint: a folder whose files are written and brought to the disk, checked against a manifest, and read."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmlab.errors import DataError
from mmlab.parallel.process_group import ProcessGroup

_WEIGHTS, _STATE, _PROGRESS, MANIFEST = "weights.safetensors", "state.pt", "progress.json", "manifest.json"
_SHARDS = "shards"
_JSON_KEYS = ("progress", "loader")  # of a state: plain numbers and texts
SAVING = "save a checkpoint"
_Files = dict[str, dict[str, Any]]  # size and digest by path, as in the manifest


def check(path: Path, ranks: ProcessGroup) -> None:
    """See whether a checkpoint is whole; each rank reads some of its files.

    Raises:
        DataError: a file is missing, truncated or altered.
    """

    def damage() -> str | None:
        try:
            files = sorted(read_manifest(path)[0].items())
        except DataError as error:
            return str(error)
        for name, expected in files[ranks.rank :: ranks.world_size]:
            there = _size_and_digest(path / name) if (path / name).exists() else None
            if there != expected:
                return f"{path} is damaged: {name} should be {expected}, found {there or 'no such file'}"
        return None

    if found := [message for message in ranks.gather_objects(damage, f"read {path}") if message]:
        raise DataError(found[0])


def read_checkpoint(path: str | Path) -> dict[str, Any]:
    """The state in a checkpoint, all of it and on the CPU, every file checked against the manifest.

    Raises:
        DataError: a file is missing, truncated or altered.
    """
    path = Path(path)
    check(path, ProcessGroup(alone=True))
    return read_state(path)


def read_state(path: Path, like: Mapping[str, Tensor] | None = None) -> dict[str, Any]:
    """The state in a checkpoint.

    Args:
        like: weights by name; of those that are shared out, `shards/` are read for this rank's share alone.
    """
    state = torch.load(path / _STATE, map_location="cpu", weights_only=True)
    state |= json.loads((path / _PROGRESS).read_text())
    if not (path / _SHARDS).exists():
        return {"model": _read_weights(path / _WEIGHTS), **state}
    from mmlab.training.checkpoint.shards import load_shards

    weights, moments = load_shards(path / _SHARDS, like)
    places = {name: place for place, name in _weight_names(state["optimizer"]).items()}
    state["optimizer"]["state"] = {places[name]: values for name, values in moments.items()}
    return {"model": weights, **state}


def _read_weights(path: Path) -> dict[str, Tensor]:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
        aliases = file.metadata() or {}
    return weights | {alias: weights[name] for alias, name in aliases.items() if name in weights}


def is_shared_out(state: Mapping[str, Any]) -> bool:
    """Whether each rank has shares of a state's weights (`DTensor`)."""
    return any(hasattr(tensor, "to_local") for tensor in state["model"].values())


def write_state(
    folder: Path, state: Mapping[str, Any], values: Mapping[str, Any], ranks: ProcessGroup
) -> int:
    """Write a checkpoint's files and bring them to the disk; a collective of those ranks.

    Args:
        folder: made by rank 0.
        values: what an evaluation found.

    Returns:
        Bytes of all files.
    """
    shards = _write_shards(folder / _SHARDS, state, ranks) if is_shared_out(state) else {}
    return ranks.run_on_main(lambda: _write_rest(folder, state, values, shards), SAVING)


def _write_rest(folder: Path, state: Mapping[str, Any], values: Mapping[str, Any], shards: _Files) -> int:
    rest = {key: value for key, value in state.items() if key not in ("model", *_JSON_KEYS)}
    names = [_STATE, _PROGRESS]
    if shards:
        rest["optimizer"] = {**rest["optimizer"], "state": {}}
    else:
        _write_weights(folder / _WEIGHTS, state["model"])
        names.append(_WEIGHTS)
    torch.save(rest, folder / _STATE)
    (folder / _PROGRESS).write_text(json.dumps({key: state[key] for key in _JSON_KEYS if key in state}))
    files = shards | {name: _size_and_digest(folder / name) for name in names}
    scores = {key: value for key, value in values.items() if isinstance(value, int | float)}
    (folder / MANIFEST).write_text(json.dumps({"files": files, "values": scores}, indent=1))
    for name in (*names, MANIFEST):
        sync(folder / name)
    sync(folder)
    return sum(file["bytes"] for file in files.values()) + (folder / MANIFEST).stat().st_size


def _write_weights(path: Path, model: Mapping[str, Tensor]) -> None:
    from safetensors.torch import save_file

    weights, aliases = _without_aliases(model)
    save_file(weights, path, metadata=aliases or None)


def _write_shards(folder: Path, state: Mapping[str, Any], ranks: ProcessGroup) -> _Files:
    """Let every rank write its shares, and bring them to the disk; a collective."""
    from mmlab.training.checkpoint.shards import files_of, save_shards

    names = _weight_names(state["optimizer"])
    moments = {names[place]: values for place, values in state["optimizer"]["state"].items()}

    def digests() -> _Files:
        sync(folder)
        return {f"{_SHARDS}/{file.name}": _size_and_digest(file) for file in files_of(folder, ranks.rank)}

    ranks.gather_objects(lambda: _must_be_there(folder.parent), SAVING)
    save_shards(folder, state["model"], moments)
    files: _Files = {}
    for found in ranks.gather_objects(digests, SAVING):
        files |= found
    return files


def _must_be_there(folder: Path) -> None:
    if not folder.is_dir():
        raise FileNotFoundError(
            f"{folder}, made by rank 0, is not there: the run's folder must be on a file system that all ranks share"
        )


def _weight_names(optimizer: Mapping[str, Any]) -> dict[int, str]:
    """By their place in the optimizer."""
    return {
        place: name
        for group in optimizer["param_groups"]
        for place, name in zip(group["params"], group["param_names"], strict=True)
    }


def _without_aliases(weights: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Each tensor once, laid out as safetensors wants it, and the other names of those that share memory."""
    first: dict[tuple[Any, ...], str] = {}
    once, aliases = {}, {}
    for name, tensor in weights.items():
        key = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()) if tensor.numel() else (name,)
        if first.setdefault(key, name) != name:
            aliases[name] = first[key]
            continue
        tensor = tensor.detach()
        shared = tensor.untyped_storage().nbytes() != tensor.nbytes
        once[name] = tensor.clone() if shared else tensor.contiguous()
    return once, aliases


def _size_and_digest(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def read_manifest(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the files should be, and what an evaluation found."""
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        return manifest["files"], manifest["values"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} is no whole checkpoint: {MANIFEST} is missing or damaged") from error


def sync(path: Path) -> None:
    """Bring a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
