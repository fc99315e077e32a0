"""The cache of decoded images, kept on disk between epochs and runs; random augmentation comes after it.

Every image has a slot in a file and is read straight into its batch, its checksum compared at the first and
every 64th read; see docs/internals/cache.md. Loads no torch.
"""

from mmlab.loading.cache.build import build_cache
from mmlab.loading.cache.key import cache_key
from mmlab.loading.cache.on_ray import build_cache_on_ray
from mmlab.loading.cache.store import SampleCache

__all__ = ["SampleCache", "build_cache", "build_cache_on_ray", "cache_key"]
