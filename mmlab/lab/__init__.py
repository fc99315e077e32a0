"""The notebook interface: `Lab` starts, watches and saves a comparison; panels draw runs while they train."""

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
