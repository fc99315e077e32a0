"""Compiled loops price as cost models do, and run where nothing can be cached, too."""

import signal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numba.core import serialize

from mmlab.schedule._compiled import compiled
from mmlab.schedule._dense_loops import _price, _price_shape
from mmlab.schedule.schedulers import make_scheduler
from tests.schedule.planning import BYTES, PAIRS, make_sizes


def test_without_a_place_for_a_cache_it_compiles_all_the_same(monkeypatch):
    monkeypatch.setattr("numba.core.caching.CacheImpl._locator_classes", [])
    double = compiled(lambda number: 2 * number)
    assert double(21) == 42


def test_an_interrupt_within_compiled_code_stays_one(monkeypatch):
    returns = serialize._numba_unpickle  # Python code, in which a signal that came before is handled

    def interrupted(*arguments):
        serialize._numba_unpickle = returns
        signal.raise_signal(signal.SIGINT)
        return returns(*arguments)

    for name in ("budget", "packed"):
        monkeypatch.setattr(serialize, "_numba_unpickle", interrupted)
        with pytest.raises(KeyboardInterrupt):
            list(make_scheduler(name).plan(make_sizes(200)))


@settings(deadline=None)
@given(st.sampled_from([BYTES, PAIRS]), st.integers(1, 500), st.integers(0, 600), st.integers(0, 2000))
def test_the_compiled_price_is_the_models(cost, count, text, area):
    price = np.zeros((len(cost.coefficients), 3))
    _price_shape(text, area, cost.coefficients, cost.exponents, price)
    assert _price(count, price) == pytest.approx(cost.at(count, text, area), rel=1e-12)
