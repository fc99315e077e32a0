"""Compiled loops price as cost models do, and run where nothing can be cached, too."""

import signal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmlab.schedule import _dense_loops, _pack_loops
from mmlab.schedule._compiled import compiled
from mmlab.schedule._dense_loops import _price, _price_shape
from mmlab.schedule.schedulers import make_scheduler
from tests.schedule.planning import BYTES, PAIRS, make_sizes


def test_without_a_place_for_a_cache_it_compiles_all_the_same(monkeypatch):
    monkeypatch.setattr("numba.core.caching.CacheImpl._locator_classes", [])
    double = compiled(lambda number: 2 * number)
    assert double(21) == 42


@pytest.mark.parametrize(
    ("scheduler", "loops", "name"),
    [("budget", _dense_loops, "cut_optimally"), ("packed", _pack_loops, "fill_packs")],
)
def test_an_interrupt_waits_for_compiled_code_which_would_make_another_error_of_it(
    monkeypatch, scheduler, loops, name
):
    returned, compiled_loop = [], getattr(loops, name)

    def interrupted(*arguments):
        signal.raise_signal(signal.SIGINT)
        returned.append(compiled_loop(*arguments))
        return returned[-1]

    monkeypatch.setattr(loops, name, interrupted)
    with pytest.raises(KeyboardInterrupt):
        list(make_scheduler(scheduler).plan(make_sizes(200)))
    assert len(returned) == 1


@settings(deadline=None)
@given(st.sampled_from([BYTES, PAIRS]), st.integers(1, 500), st.integers(0, 600), st.integers(0, 2000))
def test_the_compiled_price_is_the_models(cost, count, text, area):
    price = np.zeros((len(cost.coefficients), 3))
    _price_shape(text, area, cost.coefficients, cost.exponents, price)
    assert _price(count, price) == pytest.approx(cost.at(count, text, area), rel=1e-12)
