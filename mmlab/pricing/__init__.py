"""Memory known before it is spent: a training step priced on a device that need not be there.

engine        backward passes in Python
attention     fused attention without a GPU
recalling     torch's fake mode with a quicker memory
fake          `fake_device`, `fake_clone`: tensors without bytes
trace         `trace_step`, `StepTracer`: live bytes after every operation
breakdown     `price`: what the memory is spent on
fingerprint   `fingerprint`: which models need the same
"""

from mmlab.pricing.breakdown import MemoryBreakdown, price
from mmlab.pricing.fake import FakeDevice, fake_clone, fake_device
from mmlab.pricing.fingerprint import fingerprint
from mmlab.pricing.trace import StepTrace, StepTracer, trace_step

__all__ = [
    "FakeDevice",
    "MemoryBreakdown",
    "StepTrace",
    "StepTracer",
    "fake_clone",
    "fake_device",
    "fingerprint",
    "price",
    "trace_step",
]
