"""Medians and percentiles."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.bench.measure import median, percentile, summarize


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50), st.floats(0, 100))
def test_percentile_is_that_of_numpy(samples, percent):
    assert percentile(samples, percent) == pytest.approx(float(np.percentile(samples, percent)), abs=1e-6)


def test_one_slow_sample_does_not_move_the_median():
    assert median([1.0, 1.1, 0.9, 1.0, 60.0]) == 1.0


def test_summary_keeps_the_samples_in_their_order():
    summary = summarize([3.0, 1.0, 2.0])
    assert (summary.median, summary.samples) == (2.0, (3.0, 1.0, 2.0))
    assert summary.p10 <= summary.median <= summary.p90


def test_no_samples_is_an_error():
    with pytest.raises(ValueError, match="no samples"):
        summarize([])
