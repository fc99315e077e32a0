"""Plan and data set in, padded batches on the device out: read, decode, collate, copy, each stage with threads or
processes of its own, and a cache of decoded samples on disk.

    plan -> read -> decode (and augment) -> collate -> copy (pin, device) -> training

The order comes from the plan alone; every backend gives the same batches, bit for bit.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "adaptive": ["AdaptiveDataLoader"],
        "cache": ["SampleCache", "build_cache", "cache_key"],
        "loader": ["PlannedLoader"],
    },
)
