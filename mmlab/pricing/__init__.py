"""What a padded shape costs before it is spent: a training step traced on fake tensors, a closed form fitted to a few of
them (`MemoryModel`), budgets that follow it, and seconds (`TimeModel`), fitted to
a few measured steps or predicted for a named device from the same trace.
"""

from __future__ import annotations

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "breakdown": ["MemoryBreakdown", "price"],
        "fit": ["fit_memory"],
        "memory": ["MemoryModel"],
        "memory_report": ["MemoryReport"],
        "resource_aware": ["ResourceAwareScheduler"],
        "roofline": ["predict_time"],
        "step_prices": ["StepPrices", "price_model", "price_steps"],
        "time_model": ["TimeModel"],
        "timing": ["fit_time"],
        "virtual_device": ["VirtualDevice"],
    },
)
