"""mmlab: plan, price, train and compare image-text batches.

`import mmlab` loads neither torch nor widgets: every public name is imported on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_PUBLIC = {  # name -> the module that defines it
    "AdaptiveDataLoader": "adaptive",
    "Augment": "augment",
    "BackgroundRun": "background",
    "start_compare": "background",
    "SampleCache": "cache",
    "build_cache": "cache",
    "cache_key": "cache",
    "Checkpoints": "checkpoint",
    "Comparison": "comparison",
    "load_comparison": "comparison",
    "MaxPolynomial": "cost",
    "PaddedTokens": "cost",
    "PlanExplorer": "plan_panel",
    "MultimodalDataset": "dataset",
    "decode_image": "decode",
    "diagnose": "doctor",
    "DataError": "errors",
    "MmlabError": "errors",
    "OptionError": "errors",
    "RunError": "errors",
    "RunEvent": "events",
    "RunLog": "events",
    "read_events": "events",
    "read_runs": "events",
    "compare": "experiment",
    "aspect": "images",
    "parse_image_policy": "images",
    "square": "images",
    "Lab": "lab",
    "run_on_ranks": "launch",
    "train_on": "launch",
    "LivePanel": "live_panel",
    "PlannedLoader": "loader",
    "collate": "loader",
    "MaskedLanguage": "losses",
    "MemoryModel": "memory",
    "MemoryPanel": "memory_panel",
    "MemoryReport": "memory_report",
    "DeviceMeter": "meters",
    "LiveBytes": "meters",
    "read_device": "meters",
    "FusionModel": "model",
    "MultimodalFusion": "model",
    "build_model": "model",
    "FUSIONS": "model",
    "enable_checkpointing": "model",
    "enable_packing": "model",
    "DeviceMonitor": "monitor",
    "RunState": "monitor",
    "Precision": "precision",
    "MemoryBreakdown": "pricing",
    "fit_memory": "pricing.fit",
    "price": "pricing",
    "RatioController": "ratio",
    "read_records": "readers",
    "Records": "records",
    "ResourceAwareScheduler": "resource_aware",
    "SCHEDULERS": "schedule",
    "Mixed": "schedule",
    "Weighted": "schedule",
    "BatchPlan": "schedule",
    "BatchScheduler": "schedule",
    "PlanReport": "schedule",
    "make_scheduler": "schedule",
    "preview": "schedule",
    "read_lengths": "schedule",
    "make_dataset": "synthetic",
    "load_tokenizer": "text",
    "measure_tokens": "text",
    "VirtualDevice": "testing",
    "FusionTrainer": "trainer",
    "train": "training",
    "Batch": "types",
    "BatchShape": "types",
    "Record": "types",
    "SampleSizes": "types",
    "WEIGHTINGS": "weighting",
    "make_weighting": "weighting",
}

__all__ = sorted(_PUBLIC)


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'mmlab' has no attribute {name!r}")
    value = getattr(import_module(f"mmlab.{_PUBLIC[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
