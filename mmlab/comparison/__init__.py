"""One run from a configuration, several runs in turns, and their results: joins data, loading, schedules,
models and training.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "background": ["BackgroundRun", "start_compare"],
        "experiment": ["compare"],
        "result": ["Comparison", "load_comparison"],
        "train": ["load_trained", "train", "train_on"],
    },
)
