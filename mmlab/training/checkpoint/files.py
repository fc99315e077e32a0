"""One checkpoint: a folder of safetensors and JSON, checked against a manifest.

weights.safetensors    the model's weights by name
optimizer.safetensors  the optimizer's tensors: `NUMBER.exp_avg`, by the weight's number in state.json's parameter groups
shards/                in place of both if ranks hold shares: a file from each rank, with `model.WEIGHT` and
                       `optimizer.state.WEIGHT.exp_avg`, by `torch.distributed.checkpoint`; any number of
                       ranks can read them
state.json             everything else: options of the optimizer, which weights are trained, precision, weighting,
                       progress, the loader
manifest.json          size and SHA-256 of every file, and the values of an evaluation

No file holds a pickle. Writing shards costs a copy of a rank's share in host memory.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from mmlab.errors import DataError, RunError
from mmlab.training.strategy import Strategy

SHARDS, MANIFEST = "shards", "manifest.json"
SAVING = "save a checkpoint"
_WEIGHTS, _MOMENTS, _STATE = "weights.safetensors", "optimizer.safetensors", "state.json"
_MODEL, _OPTIMIZER = "model.", "optimizer.state."
_Files = dict[str, dict[str, Any]]  # size and digest by path, as in the manifest


def check(path: Path, ranks: Strategy) -> None:
    """Compare a checkpoint's files with its manifest. Each of `ranks` reads a part of the files; collective.

    Raises:
        DataError: a file is missing, truncated or altered.
    """

    def find_damage() -> str | None:
        try:
            files = sorted(read_manifest(path)[0].items())
        except DataError as error:
            return str(error)
        for name, expected in files[ranks.rank :: ranks.world_size]:
            found = _size_and_digest(path / name) if (path / name).is_file() else None
            if found != expected:
                return f"{path} is damaged: {name} should be {expected}, found {found or 'no such file'}"
        return None

    for message in ranks.gather_objects(find_damage, f"read {path}"):
        if message:
            raise DataError(message)


def read_checkpoint(path: str | Path) -> dict[str, Any]:
    """The whole state in a checkpoint, on the CPU, with every file checked against the manifest.

    Raises:
        DataError: a file is missing, truncated or altered.
    """
    path = Path(path)
    check(path, Strategy())
    return read_state(path)


def read_state(path: Path, like: Mapping[str, Tensor] | None = None) -> dict[str, Any]:
    """The state in a checkpoint.

    Args:
        like: a model's weights by name; if they are shares (`DTensor`), only this rank's share is read.

    Raises:
        ValueError: the checkpoint does not belong to the model of `like`.
    """
    state = json.loads((path / _STATE).read_text())
    if (path / SHARDS).exists():
        from mmlab.training.checkpoint.shards import load_shards

        tensors = load_shards(path / SHARDS, like)
        model, moments = _under(tensors, _MODEL), _under(tensors, _OPTIMIZER)
    else:
        model, moments = _read_tensors(path / _WEIGHTS), _read_tensors(path / _MOMENTS)
    indices = {name: index for index, name in _weight_names(state["optimizer"]).items()}
    optimizer_state: dict[int, dict[str, Tensor]] = {}
    for key, tensor in moments.items():
        name, _, moment = key.rpartition(".")
        optimizer_state.setdefault(indices[name], {})[moment] = tensor
    state["optimizer"]["state"] = optimizer_state
    return {"model": model, **state}


def write_state(folder: Path, state: Mapping[str, Any], values: Mapping[str, Any], ranks: Strategy) -> int:
    """Write a checkpoint's files and flush them to the disk; collective.

    Args:
        folder: made by rank 0.
        values: the values of an evaluation, for the manifest.

    Returns:
        The size of all files together, in bytes.
    """
    optimizer = state.get("optimizer", {"state": {}, "param_groups": []})
    names = _weight_names(optimizer)
    moments = {
        f"{names[index]}.{key}": tensor
        for index, tensors in optimizer["state"].items()
        for key, tensor in tensors.items()
    }
    shards: _Files = {}
    if any(hasattr(tensor, "to_local") for tensor in state["model"].values()):
        shards = _write_shards(folder / SHARDS, state["model"], moments, ranks)
    rest = {key: value for key, value in state.items() if key != "model"}
    rest["optimizer"] = {"param_groups": optimizer["param_groups"]}

    def write_rest() -> int:
        (folder / _STATE).write_text(json.dumps(rest))
        names = [_STATE]
        if not shards:
            _write_tensors(folder / _WEIGHTS, state["model"])
            _write_tensors(folder / _MOMENTS, moments)
            names += [_WEIGHTS, _MOMENTS]
        files = shards | {name: _size_and_digest(folder / name) for name in names}
        scores = {key: value for key, value in values.items() if isinstance(value, int | float)}
        (folder / MANIFEST).write_text(json.dumps({"files": files, "values": scores}, indent=1))
        for name in (*names, MANIFEST):
            sync(folder / name)
        sync(folder)
        return sum(file["bytes"] for file in files.values()) + (folder / MANIFEST).stat().st_size

    return ranks.run_on_main(write_rest, SAVING)


def _write_shards(
    folder: Path, model: Mapping[str, Tensor], moments: Mapping[str, Tensor], ranks: Strategy
) -> _Files:
    """Write every rank's shares and flush them to the disk; collective."""
    from mmlab.training.checkpoint.shards import save_shards

    tensors = {_MODEL + name: tensor for name, tensor in model.items()}
    tensors |= {_OPTIMIZER + name: tensor for name, tensor in moments.items()}

    def check_folder() -> None:
        if not folder.parent.is_dir():
            raise FileNotFoundError(
                f"{folder.parent}, made by rank 0, is not there: the run's folder must be on a file system that all "
                "ranks share"
            )

    def digests() -> _Files:
        """Each rank reads a part of the files."""
        sync(folder)
        own = sorted(folder.iterdir())[ranks.rank :: ranks.world_size]
        return {f"{SHARDS}/{file.name}": _size_and_digest(file) for file in own}

    ranks.gather_objects(check_folder, SAVING)
    for failure in ranks.gather_objects(lambda: save_shards(folder, tensors), SAVING):
        if failure:
            remedy = "make room there, and go on from the newest"
            raise RunError(f"{failure}; earlier checkpoints are whole: {remedy}")
    return {name: file for own in ranks.gather_objects(digests, SAVING) for name, file in own.items()}


def _read_tensors(path: Path) -> dict[str, Tensor]:
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
        aliases = file.metadata() or {}
    return tensors | {alias: tensors[name] for alias, name in aliases.items() if name in tensors}


def _write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write each tensor once; other names of the same memory (tied weights) are kept as metadata."""
    first_names: dict[tuple[Any, ...], str] = {}  # by what identifies a tensor's memory
    kept, aliases = {}, {}
    for name, tensor in tensors.items():
        key = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()) if tensor.numel() else (name,)
        first_name = first_names.setdefault(key, name)
        if first_name != name:
            aliases[name] = first_name
            continue
        tensor = tensor.detach()
        is_view = tensor.untyped_storage().nbytes() != tensor.nbytes
        kept[name] = tensor.clone(memory_format=torch.contiguous_format) if is_view else tensor.contiguous()
    try:
        save_file(kept, path, metadata=aliases or None)
    except SafetensorError as error:  # raised for any error of the disk
        raise OSError(f"{path} cannot be written: {error}") from error


def _under(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _weight_names(optimizer: Mapping[str, Any]) -> dict[int, str]:
    """Names of the optimizer's weights by their index; the index itself where the optimizer keeps no names."""
    names: dict[int, str] = {}
    for group in optimizer["param_groups"]:
        indices = group["params"]
        names |= zip(indices, group.get("param_names") or map(str, indices), strict=True)
    return names


def _size_and_digest(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def read_manifest(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Expected size and digest of each file, and the values of an evaluation."""
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        files, values = dict(manifest["files"]), dict(manifest["values"])
        is_sharded = any(name.startswith(f"{SHARDS}/") for name in files)
        for name in (_STATE,) if is_sharded else (_STATE, _WEIGHTS, _MOMENTS):
            files[name]  # a KeyError says that it is missing
        return files, {key: float(value) for key, value in values.items()}
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise DataError(f"{path} is not a complete checkpoint: {MANIFEST} is missing or damaged") from error


def sync(path: Path) -> None:
    """Flush a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
