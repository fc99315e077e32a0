"""Compiled loops run where nothing can be cached, too."""

from mmlab.schedule._compiled import compiled


def test_without_a_place_for_a_cache_it_compiles_all_the_same(monkeypatch):
    monkeypatch.setattr("numba.core.caching.CacheImpl._locator_classes", [])
    double = compiled(lambda number: 2 * number)
    assert double(21) == 42
