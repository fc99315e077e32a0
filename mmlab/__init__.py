"""mmlab: plan, price, train and compare image-text batches.

`import mmlab` loads neither torch nor widgets: every public name is imported on first use.
"""

import lazy_loader

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "cli": ["diagnose"],
        "comparison": [
            "BackgroundRun", "Comparison", "compare", "load_comparison", "load_trained", "start_compare",
            "train", "train_on",
        ],
        "data": [
            "Augment", "ConversationCollator", "ConversationDataset", "MultiModalDataset", "MultimodalDataset",
            "Records", "collate", "conversation_sizes", "decode_image", "load_tokenizer", "make_dataset",
            "measure_tokens", "read_conversations", "read_records",
        ],
        "errors": ["DataError", "MmlabError", "OptionError", "RunError"],
        "machine": ["memory_limit"],
        "lab": ["Lab", "LivePanel", "LoadingPanel", "MemoryPanel", "PlanExplorer"],
        "loading": ["AdaptiveDataLoader", "PlannedLoader", "SampleCache", "build_cache", "cache_key"],
        "model": [
            "FUSIONS", "FusionModel", "MultimodalFusion", "MultimodalModel", "build_model",
            "enable_checkpointing", "enable_packing",
        ],
        "parallel": ["run_on_ranks"],
        "pricing": [
            "MemoryBreakdown", "MemoryModel", "MemoryReport", "ResourceAwareScheduler", "TimeModel",
            "VirtualDevice", "fit_memory", "fit_time", "predict_time", "price", "price_model",
        ],
        "runs": [
            "DeviceMeter", "DeviceMonitor", "LiveBytes", "RunEvent", "RunLog", "RunState", "read_device",
            "read_events", "read_runs",
        ],
        "schedule": [
            "BatchPlan", "BatchScheduler", "MaxPolynomial", "Mixed", "PaddedTokens", "PlanReport",
            "SCHEDULERS", "Weighted", "make_scheduler", "preview", "read_lengths",
        ],
        "training": [
            "Checkpoints", "FusionTrainer", "MaskedLanguage", "Precision", "WEIGHTINGS", "make_weighting",
        ],
        "types": ["Batch", "BatchShape", "Record", "SampleSizes", "aspect", "parse_image_policy", "square"],
    },
)  # fmt: skip
