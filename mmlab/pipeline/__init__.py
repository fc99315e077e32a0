"""The input pipeline: planned rows in, padded batches out, through stages with their own threads or processes.

::

    plan -> read -> decode (and augment) -> collate -> copy (pin, device) -> training

`mmlab.loader.PlannedLoader` is its user; two engines do the same work with the same result, bit for bit:

* `threads`: stages with threads of their own in this process. No copies between processes; needs image libraries that
  let go of the interpreter lock, as mmlab's do. Works wherever Python does, notebooks and CUDA included.
* `torch`: a DataLoader with worker processes, as in the articles, for datasets whose Python code holds the lock.

Order comes from the plan alone. Batches are drawn from the plan only as far ahead as `prefetch`, in the thread that
asks for them, so a plan may change its mind about the rest, and does so at the same place in every run.
"""

from mmlab.pipeline.collate import collate
from mmlab.pipeline.processes import TorchEngine
from mmlab.pipeline.stages import StageReport
from mmlab.pipeline.threads import ThreadEngine
from mmlab.pipeline.work import BadSample, Job, Recipe

__all__ = ["BadSample", "Job", "Recipe", "StageReport", "ThreadEngine", "TorchEngine", "collate"]
