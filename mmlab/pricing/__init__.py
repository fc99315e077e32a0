"""Predict what a training step costs from a batch's padded shape, before any training.

Bytes (`MemoryModel`) are a closed form, fitted to a few steps traced on fake tensors. Seconds (`TimeModel`)
are fitted to a few measured steps, or predicted for a named device from the same traces.
`ResourceAwareScheduler` corrects the budget as training uses memory.
"""

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
