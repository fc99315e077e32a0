"""Checkpoints: complete or not there at all, checked when they are read; the newest and the best are kept.

A checkpoint is a folder (`mmlab.training.checkpoint.files` lists its files) that is written under another
name, flushed to the disk and then renamed: a process killed at any moment, or a power cut, leaves earlier
checkpoints intact. Any number of ranks can read it under any strategy, and so can a single process.

Costs 12 bytes a weight on disk (fp32 with AdamW), written while training waits. Does not guard against two runs in one
folder; `mmlab.train` does.
"""
