"""How several devices share a step: data parallel, sharded, and the image and text branches on a device each; and what
each of them would cost.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "bench": ["bench_parallel"],
        "launch": ["run_on_ranks"],
        "reduce": ["ParallelOptions"],
        "strategies": ["make_strategy"],
        "process_group": ["ProcessGroup"],
    },
)
