"""Checkpoints: whole or not there, checked when they are read, the newest and the best kept.

A checkpoint is a folder of files, written under another name, brought to the disk (`fsync`) and then renamed: a
process killed at any moment, or a power cut, leaves the checkpoints before it as they were.

    000003-step-1200/
        weights.safetensors   the model's weights and buffers, readable by any program that knows safetensors
        state.pt              optimizer and loss scaler, for `torch.load(..., weights_only=True)`
        progress.json         counters of the trainer and position of the loader
        manifest.json         size and SHA-256 of the other files, and what an evaluation found

Where ranks share out the weights (`fsdp`), `shards/` stands in the place of `weights.safetensors` and holds the
optimizer's tensors too: a file from every rank, written by `torch.distributed.checkpoint`. Either form is read by any
number of ranks under any strategy, and by a single process.

Costs 12 bytes a weight on disk (fp32 with AdamW), written while training waits: 41 million weights, 490 MB, took 1.9 s.
Does not: guard against two runs in one folder.

keeping   `Checkpoints`: when to save, what to keep, where to go on
files     one checkpoint: written, checked, read
shards    what ranks share out, a file from every rank
"""

from mmlab.training.checkpoint.files import MANIFEST, check, read_checkpoint
from mmlab.training.checkpoint.keeping import Checkpoints, restore

__all__ = ["MANIFEST", "Checkpoints", "check", "read_checkpoint", "restore"]
