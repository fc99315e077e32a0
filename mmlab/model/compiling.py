"""A model's forward pass through `torch.compile`.

Batches of a plan differ in B, T, H and W, so these are compiled as dynamic: one variant serves all shapes.
Another variant is compiled only where torch specialises on a size (a single sample or token), or where
something else changes that the code depends on. After `torch._dynamo.config.recompile_limit` variants, eight,
torch says so and compiles nothing more: batches that no variant serves run uncompiled. The first steps wait
for the compiler, up to minutes on a CPU. Losses equal those of the uncompiled model to 1e-4, relative, in
fp32, except that dropout draws other masks.

Works with bf16 and with checkpointing, which saves as much memory compiled or not: for 8 images of 96 x 96 pixels, 3.9
MiB of activations were kept without checkpointing and 2.1 MiB with it (inductor, on a CPU).
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from mmlab.errors import OptionError, check_name
from mmlab.model.checkpointing import has_checkpointed_batch_norm


def compiled(model: nn.Module, device: torch.device, backend: str) -> Callable[..., Any]:
    """The model's forward pass, compiled; its weights and their names are unchanged.

    Args:
        model: its forward takes a batch.
        backend: a name in `torch.compiler.list_backends`.

    Raises:
        OptionError: an unknown backend, no compiler for it on this machine, or a model that cannot be compiled.
    """
    check_name("backend of torch.compile", backend, torch.compiler.list_backends(exclude_tags=None))
    if backend == "inductor":
        _check_compiler(device)
    if backend.startswith("eager") and has_checkpointed_batch_norm(model):
        raise OptionError(
            f"the backend {backend!r} of torch.compile would update the running statistics of checkpointed blocks twice; "
            "use 'aot_eager' or 'inductor', or checkpointing=False"
        )
    # an analysis of Triton's code that is not made for dynamic shapes: on a GPU, it fails on them in torch 2.11
    options: Any = {"triton.coalesce_tiling_analysis": False} if backend == "inductor" else None
    return torch.compile(model, backend=backend, options=options, dynamic=True)


def _check_compiler(device: torch.device) -> None:
    if device.type == "cuda" and find_spec("triton") is None:
        raise OptionError("compile=True needs triton for a GPU, and it is not installed; use compile=False")
    names = [os.environ.get("CXX", ""), "g++", "clang++", "c++"]
    if device.type == "cpu" and not any(name and shutil.which(name) for name in names):
        raise OptionError(
            "compile=True needs a C++ compiler, and neither g++ nor clang++ was found; install one or name it in CXX, "
            "or use compile=False"
        )
