"""The cache of decoded images, kept on disk between epochs and runs; what is random (augmentation) comes after it.

Every image has a slot of a file, is checked when it is read, and is read right into its batch; see docs/internals/cache.md. No
torch here.
"""

from mmlab.loading.cache.build import build_cache
from mmlab.loading.cache.key import cache_key
from mmlab.loading.cache.on_ray import build_cache_on_ray
from mmlab.loading.cache.store import SampleCache

__all__ = ["SampleCache", "build_cache", "build_cache_on_ray", "cache_key"]
