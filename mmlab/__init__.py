"""mmlab: plan, price, train and compare image-text batches.

`import mmlab` loads neither torch nor widgets: every public name is imported on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_PUBLIC = {  # name -> the module that defines it
    "AdaptiveDataLoader": "adaptive",
    "BackgroundRun": "background",
    "start_compare": "background",
    "Comparison": "comparison",
    "load_comparison": "comparison",
    "MaxPolynomial": "cost",
    "PaddedTokens": "cost",
    "CompareDashboard": "dashboard",
    "PlanExplorer": "dashboard",
    "MultimodalDataset": "dataset",
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
    "PlannedLoader": "loader",
    "collate": "loader",
    "DeviceMeter": "meters",
    "LiveBytes": "meters",
    "read_device": "meters",
    "FusionModel": "model",
    "MultimodalFusion": "model",
    "build_model": "model",
    "DeviceMonitor": "monitor",
    "RunState": "monitor",
    "Precision": "precision",
    "RatioController": "ratio",
    "read_records": "readers",
    "Records": "records",
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
    "FusionTrainer": "trainer",
    "Batch": "types",
    "BatchShape": "types",
    "Record": "types",
    "SampleSizes": "types",
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
