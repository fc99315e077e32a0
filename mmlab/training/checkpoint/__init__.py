"""Checkpoints: whole or not there, checked when they are read, the newest and the best kept.

A checkpoint is a folder (`mmlab.training.checkpoint.files` lists its files) that is written under another name, flushed to the
disk and then renamed: a process killed at any moment, or a power cut, leaves the checkpoints before it as they were. Any
number of ranks reads it under any strategy, and a single process does.

Costs 12 bytes a weight on disk (fp32 with AdamW), written while training waits. Does not guard against two runs in one
folder; `mmlab.train` does.
"""
