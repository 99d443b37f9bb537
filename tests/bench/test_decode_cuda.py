"""What `bench decode` says of a GPU's profile, on a profile that is known."""

import pytest

from slipstream.bench.decode_cuda import LAST, Ran, summarise
from slipstream.cli.bench_decode import device_in_words

PROFILE = [
    Ran("model_pass", 0.0, 90.0),  # of a round that began before the profile
    Ran(LAST, 90.0, 100.0),
    Ran("model_pass", 101.0, 181.0),
    Ran("best_kernel", 181.0, 191.0),
    Ran(LAST, 191.0, 200.0),
    Ran("model_pass", 201.0, 301.0),
    Ran("best_kernel", 301.0, 321.0),
    Ran(LAST, 321.0, 330.0),
    Ran("model_pass", 331.0, 400.0),  # and of one that did not end in it
]


def test_only_whole_rounds_count():
    report = summarise(PROFILE, 2.5, {"model_pass": 360_000_000})
    assert report.round_us.samples == (100.0, 130.0)
    assert report.round_us.median == 115.0
    assert report.round_p99_us == pytest.approx(129.7)
    assert report.tokens_per_s == pytest.approx(2.5 * 2 / 230e-6)
    assert report.launches == 3
    assert [(k.name, k.launches, k.us) for k in report.kernels] == [
        ("model_pass", 1, 90.0),
        ("best_kernel", 1, 15.0),
        (LAST, 1, 9.0),
    ]
    assert report.kernels[0].bytes_per_s == pytest.approx(4e12)


def test_a_profile_without_a_whole_round_is_refused():
    with pytest.raises(ValueError, match="1 ends of rounds"):
        summarise(PROFILE[:3], 1.0, {})


def test_the_table_has_a_line_for_each_kernel():
    lines = device_in_words(summarise(PROFILE, 2.5, {"model_pass": 360_000_000}))
    assert lines[0].split()[:3] == ["device", "21739", "tok/s;"]
    assert lines[1].split() == ["model_pass", "1.0", "x", "90.0", "us", "79%", "360.0", "MB", "4.00", "TB/s"]
    assert lines[2].split() == ["best_kernel", "1.0", "x", "15.0", "us", "13%"]
