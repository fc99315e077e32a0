"""The notebook's face: `Lab` starts, watches and keeps a comparison; panels draw runs while they are written."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "lab": ["Lab"],
        "live_panel": ["LivePanel"],
        "loading_panel": ["LoadingPanel"],
        "memory_panel": ["MemoryPanel"],
        "plan_panel": ["PlanExplorer"],
    },
)
