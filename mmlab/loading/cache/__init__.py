"""The cache of prepared samples: decoded, resized pixels and token ids, kept on disk between epochs and runs.

What is random (augmentation) comes after it. Reading maps files into memory and checks every record; see docs/cache.md.
No torch here.
"""

from mmlab.loading.cache.build import BuildReport, build_cache
from mmlab.loading.cache.key import CacheKey, cache_key
from mmlab.loading.cache.on_ray import build_cache_on_ray
from mmlab.loading.cache.store import CacheStats, SampleCache

__all__ = [
    "BuildReport",
    "CacheKey",
    "CacheStats",
    "SampleCache",
    "build_cache",
    "build_cache_on_ray",
    "cache_key",
]
