"""Floors are the counted ones, predictions follow measured rows, and what makes no sense is refused."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from slipstream.bench.hardware import Launch, hardware_names, launch_names, load_hardware, load_launch
from slipstream.bench.model_costs import PlanError, described_models, load_model
from slipstream.bench.plan import Plan, Setup, expected_distinct, plan
from slipstream.cli.plan import command

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def planned(model: str, gpu: str = "h200", dtype: str | None = None, **setup: Any) -> Plan:
    costs = load_model(model)
    return plan(costs.with_dtype(dtype) if dtype else costs, load_hardware(gpu), Setup(**setup))


@pytest.mark.parametrize(
    ("model", "dtype", "setup", "gigabytes", "floor_ms"),
    [
        ("smollm2", "bf16", {"context": 1}, 0.269, 0.062),
        ("llama-1b", "bf16", {"context": 512}, 2.49, 0.575),
        ("qwen3-30b-a3b", "bf16", {}, 6.1, 1.4),
        ("gpt-oss-120b", "mxfp4", {}, 5.0, 1.15),
        ("naive-n05-flash", "fp8", {"tp": 8, "drafts": 7}, 9.8, 2.25),
        ("naive-n05-flash", "mxfp4", {"tp": 8, "drafts": 7}, 5.9, 1.35),
    ],
)
def test_floors_are_the_ones_counted_by_hand(
    model: str, dtype: str, setup: dict[str, int], gigabytes: float, floor_ms: float
) -> None:
    counted = planned(model, dtype=dtype, **setup)
    assert counted.total_bytes / 1e9 == pytest.approx(gigabytes, rel=0.05)
    assert counted.floor_s * 1e3 == pytest.approx(floor_ms, rel=0.05)


def test_parts_of_gpt_oss_are_the_ones_counted_by_hand() -> None:
    parts = planned("gpt-oss-120b").bytes
    assert parts["attention"] / 1e9 == pytest.approx(1.9, rel=0.03)
    assert parts["experts"] / 1e9 == pytest.approx(1.9, rel=0.03)
    assert parts["head"] / 1e9 == pytest.approx(1.2, rel=0.05)


def test_eight_rows_of_naive_hit_about_57_experts_a_layer() -> None:
    assert expected_distinct(256, 8, 8) == pytest.approx(57.4, abs=0.1)


@given(choices=st.integers(2, 60), drawn=st.integers(1, 60), rows=st.integers(1, 12))
def test_expected_distinct_is_bounded_by_what_is_drawn_and_what_there_is(choices: int, drawn: int, rows: int) -> None:
    distinct = expected_distinct(choices, drawn, rows)
    assert min(drawn, choices) - 1e-9 <= distinct <= min(choices, drawn * rows) + 1e-9


def test_expected_distinct_matches_random_routing() -> None:
    draw = random.Random(7).sample
    trials = [len({expert for _ in range(8) for expert in draw(range(64), 4)}) for _ in range(2000)]
    assert expected_distinct(64, 4, 8) == pytest.approx(sum(trials) / len(trials), rel=0.01)


def test_ranks_together_read_at_least_the_whole_model_once() -> None:
    whole, rank = planned("naive-n05-flash").total_bytes, planned("naive-n05-flash", tp=8).total_bytes
    assert whole / 8 < rank < whole / 4  # routers, indexers and shared KV heads are copied to every rank


def test_a_million_tokens_cost_the_indexer_and_little_else() -> None:
    short = planned("naive-n05-flash", dtype="mxfp4", tp=8, drafts=7)
    long = planned("naive-n05-flash", dtype="mxfp4", tp=8, drafts=7, context=2**20)
    extra = {part: long.bytes[part] - short.bytes[part] for part in long.bytes}
    assert max(extra, key=lambda part: extra[part]) == "indexer"
    assert extra["indexer"] == pytest.approx(9 * (2**20 - 2048) * 132)
    assert extra["experts"] == extra["attention"] == 0


def test_sliding_layers_read_their_window_whatever_the_context() -> None:
    short, long = planned("gpt-oss-120b", context=4096), planned("gpt-oss-120b", context=8192)
    full_layer_rows = 18 * 4096 * 8 * 128 * 2
    assert long.bytes["kv"] - short.bytes["kv"] == pytest.approx(full_layer_rows)


def test_sparse_attention_below_the_selection_reads_the_whole_history() -> None:
    at, below = planned("deepseek-v3.2", context=2048), planned("deepseek-v3.2", context=1024)
    assert at.bytes["kv"] == pytest.approx(2 * below.bytes["kv"])


@given(tp=st.sampled_from([1, 2, 4, 8]), drafts=st.integers(0, 15), context=st.integers(1, 2**20))
def test_a_prediction_is_never_faster_than_the_floor(tp: int, drafts: int, context: int) -> None:
    result = planned("naive-n05-flash", tp=tp, drafts=drafts, context=context)
    assert result.prediction.round_s > result.floor_s
    assert result.tokens_per_s < result.floor_tokens_per_s


@pytest.mark.parametrize("model", list(described_models()))
@pytest.mark.parametrize("gpu", hardware_names())
def test_every_known_model_plans_on_every_known_machine(model: str, gpu: str) -> None:
    document = json.loads(json.dumps(planned(model, gpu).to_json()))
    assert document["round_floor_ms"] > 0
    assert set(document["bytes"]) >= {"attention", "experts", "dense_ffn", "head", "kv", "indexer"}
    assert sum(document["bytes"].values()) == pytest.approx(document["total_bytes"], abs=8)
    assert document["sources"]["model"]
    assert document["sources"]["gpu"]


@pytest.mark.parametrize("name", ["naive-n0.5-flash", "Naive-N0.5-Flash", "org/naive-n05-flash"])
def test_models_and_machines_are_found_however_they_are_written(name: str) -> None:
    assert planned(name, "DGX Spark").model.name == "naive-n05-flash"


def test_this_machine_can_be_planned_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.bench.machine.read_bandwidth", lambda threads: 50e9)
    here = planned("smollm2", "cpu", context=1)
    assert here.floor_s == pytest.approx(here.total_bytes / 50e9)
    assert "measured now" in here.hardware.source


def test_everything_unmeasured_is_said() -> None:
    notes = " ".join(planned("naive-n05-flash", "rubin", tp=8, drafts=7).assumptions())
    for word in ("announced", "of its peak", "random", "--acceptance", "drafter"):
        assert word in notes
    assert "of its peak" not in " ".join(planned("llama-8b").assumptions())


def test_a_model_too_large_says_what_it_needs_and_what_would_fit() -> None:
    big = planned("kimi-k2.6")
    assert not big.fits
    assert big.fitting_tp() == 8
    assert planned("kimi-k2.6", tp=8).fits


def test_what_helps_most_comes_first_and_is_what_limits() -> None:
    launch_bound = planned("smollm2", dtype="bf16")
    assert launch_bound.limited_by == "kernel launches"
    gains = dict(launch_bound.sensitivities())
    assert gains["a quarter less overhead a kernel"] > gains["10% more read rate"]
    read_bound = planned("llama-8b")
    assert read_bound.limited_by.startswith("reading dense ffn")
    assert list(gains.values()) == sorted(gains.values(), reverse=True)


def test_acceptance_turns_rounds_into_tokens() -> None:
    assert planned("llama-8b", drafts=7, acceptance=5.8).floor_tokens_per_s == pytest.approx(
        5.8 / planned("llama-8b", drafts=7).floor_s
    )
    assert Setup(drafts=7).tokens_a_round == pytest.approx((1 - 0.8**8) / 0.2)


# Rows published or measured elsewhere, with the launch structure they used: ANCHORS of the launch model itself.
@pytest.mark.parametrize(
    ("launch", "measured_us"),
    [("graph-pdl", 321), ("graph", 560), ("compile-graph", 822), ("vllm", 1694), ("eager", 9560)],
)
def test_launch_structures_predict_the_rows_they_were_fitted_on(launch: str, measured_us: float) -> None:
    costs = load_model("smollm2").with_dtype("bf16")
    predicted = plan(costs, load_hardware("h200"), Setup(context=1), load_launch(launch)).prediction.round_s
    assert predicted * 1e6 == pytest.approx(measured_us, rel=0.1)


@pytest.mark.parametrize(
    ("model", "setup", "published_ms", "within"),
    [
        ("naive-n05-flash", {"tp": 8, "drafts": 7, "drafter_params": 650_000_000}, 3.4, 0.3),
        ("deepseek-v3.2", {"tp": 8}, 1e3 / 314, 0.3),
    ],
)
def test_predictions_are_near_rounds_published_by_others(
    model: str, setup: dict[str, int], published_ms: float, within: float
) -> None:
    assert planned(model, "b200", **setup).prediction.round_s * 1e3 == pytest.approx(published_ms, rel=within)


def test_only_weights_that_are_slow_to_unpack_take_longer_than_their_bytes() -> None:
    for dtype, share in (("fp8", 1.0), ("mxfp4", 0.76)):
        result = planned("naive-n05-flash", dtype=dtype)
        packed = result.bytes["experts"] + result.bytes["dense_ffn"]
        rate = result.hardware.read_bytes_per_s * result.launch.bandwidth_share
        expected = (result.total_bytes - packed + packed / share) / rate
        assert result.prediction.read_s == pytest.approx(expected)


def test_mixtures_of_experts_are_launched_as_such_unless_asked_otherwise() -> None:
    sparse, dense = planned("gpt-oss-120b"), planned("llama-8b")
    assert (sparse.launch.id, dense.launch.id) == ("graph-pdl-moe", "graph-pdl")
    assert plan(sparse.model, sparse.hardware, sparse.setup, load_launch("graph")).launch.id == "graph"
    assert planned("gpt-oss-120b", "wse3", tp=2).launch.id == "wafer"


# Our own measured rounds: id -> how plan must be asked for the same work.
MEASURED: dict[str, tuple[str, str, str | None, dict[str, Any]]] = {
    "cuda-smollm2": ("smollm2", "h200", "bf16", {"context": 512}),
    **{f"cuda-round{n}": ("smollm2", "h200", "bf16", {"context": 512, "drafts": n - 1}) for n in (*range(2, 9), 16)},
    "cuda-1b": ("llama-1b", "h200", "bf16", {"context": 512}),
    "cuda-8b-bandwidth": ("llama-8b", "h200", "bf16", {"context": 512}),
    "moe-qwen3-30b": ("qwen3-30b-a3b", "h200", "bf16", {}),
    "moe-gptoss-1": ("gpt-oss-120b", "h200", None, {}),
    "moe-gptoss-8": ("gpt-oss-120b", "h200", None, {"drafts": 7}),
    "naive-fp8-rank": ("naive-n05-flash", "h200", "fp8", {"tp": 8, "drafts": 7}),
    "naive-mxfp4-rank": ("naive-n05-flash", "h200", "mxfp4", {"tp": 8, "drafts": 7}),
    **{f"cpu-round{n}": ("smollm2", "cpu-zen4", None, {"context": 256, "drafts": n - 1}) for n in (1, 2, 4, 8, 16)},
}
SPARSE = ("moe-qwen3-30b", "moe-gptoss-1", "moe-gptoss-8", "naive-fp8-rank", "naive-mxfp4-rank")
READ_8B_BYTES_PER_S = 4.58e12
"""What cuda-8b-bandwidth is a share of."""


def planned_for(row: str) -> Plan:
    """At the read rate that was measured beside the row, where one was: a CPU's changes with its company."""
    model, gpu, dtype, setup = MEASURED[row]
    result = planned(model, gpu, dtype, **setup)
    rate = committed()[row]["machine"].get("read_gb_s", result.hardware.read_bytes_per_s / 1e9) * 1e9
    return plan(result.model, replace(result.hardware, read_bytes_per_s=rate), result.setup, result.launch)


@cache
def committed() -> dict[str, dict[str, Any]]:
    """Every committed row by its id, with its machine."""
    files = [json.loads(path.read_text()) for path in RESULTS.glob("*.json")]
    return {row["id"]: row | {"machine": file["machine"]} for file in files for row in file["rows"]}


@cache
def measured_s() -> dict[str, float]:
    """Seconds a round of every row that plan can be asked for; raises KeyError where one is no longer committed."""
    rows = committed()

    def seconds(row: str) -> float:
        value, unit = rows[row]["value"], rows[row]["unit"]
        if unit == "fraction":
            return planned_for(row).total_bytes / (value * READ_8B_BYTES_PER_S)
        return 1 / value if unit == "tok/s" else value * {"us": 1e-6, "ms": 1e-3}[unit]

    return {row: seconds(row) for row in MEASURED}


def alone_s(row: str, launch: Launch | None = None) -> float:
    """The predicted round; ranks were measured without the others, so without communication."""
    result = planned_for(row)
    result = plan(result.model, result.hardware, result.setup, launch or result.launch)
    return result.prediction.round_s - (result.prediction.communication_s if row.endswith("-rank") else 0)


@pytest.mark.parametrize("row", MEASURED)
def test_predictions_match_our_measured_rounds(row: str) -> None:
    within = 0.25 if row in SPARSE else 0.15
    refit = f"{row}: refit [{planned_for(row).launch.id}] in bench/data/launch.toml, or choose another launch"
    assert alone_s(row) == pytest.approx(measured_s()[row], rel=within), refit


def fitted(rows: Sequence[str]) -> Launch:
    """[graph-pdl-moe] with the two constants that fit `rows` best: a round is linear in them, errors are relative."""
    base, measured, equations, rest = load_launch("graph-pdl-moe"), measured_s(), [], []
    for row in rows:
        # seconds(us a kernel, 1 / share): from three points of the plane
        at = [
            alone_s(row, replace(base, us_per_kernel=us, unpack_share={"mxfp4": share}))
            for us, share in ((0.0, 1.0), (1.0, 1.0), (0.0, 0.5))
        ]
        equations.append([(at[1] - at[0]) / measured[row], (at[2] - at[0]) / measured[row]])
        rest.append(1 - at[0] / measured[row])
    us, slower = np.linalg.lstsq(np.array(equations), np.array(rest), rcond=None)[0]
    return replace(base, us_per_kernel=us, unpack_share={"mxfp4": 1 / (1 + slower)})


def test_the_constants_of_sparse_models_are_the_fit_over_all_rows_and_no_others() -> None:
    best, used = fitted(SPARSE), load_launch("graph-pdl-moe")
    assert used.us_per_kernel == pytest.approx(best.us_per_kernel, rel=0.02)
    assert used.unpack_share["mxfp4"] == pytest.approx(best.unpack_share["mxfp4"], rel=0.02)
    dense = load_launch("graph-pdl")
    assert (used.us_per_row, used.bandwidth_share) == (dense.us_per_row, dense.bandwidth_share)


@pytest.mark.parametrize(
    "left_out", [(row,) for row in SPARSE] + [("moe-gptoss-1", "moe-gptoss-8"), ("naive-fp8-rank", "naive-mxfp4-rank")]
)
def test_rows_of_sparse_models_are_predicted_by_a_fit_that_never_saw_them(left_out: tuple[str, ...]) -> None:
    unseen = fitted([row for row in SPARSE if row not in left_out])
    for row in left_out:
        assert alone_s(row, unseen) == pytest.approx(measured_s()[row], rel=0.08)  # docs/plan.md says so


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "no model 'nowhere'"),
        (["llama-8b", "--gpu", "tpu"], "unknown machine 'tpu'"),
        (["llama-8b", "--dtype", "fp3"], "unknown dtype 'fp3'"),
        (["llama-8b", "--launch", "magic"], "unknown launch structure"),
        (["llama-8b", "--tp", "0"], "tp must be at least 1"),
        (["llama-8b", "--tp", "16"], "at most 8"),
        (["smollm2", "--gpu", "h200", "--tp", "2"], "9 query heads"),
        (["qwen3-30b-a3b", "--gpu", "gb300", "--tp", "64"], "query heads"),
        (["llama-8b", "--context", "1M"], "made for: 131,072 tokens"),
        (["llama-8b", "--drafts", "64"], "between 0 and 63"),
        (["llama-8b", "--drafts", "3", "--acceptance", "5"], "between 1 and 4"),
    ],
)
def test_bad_requests_say_what_is_wrong(arguments: list[str], message: str) -> None:
    error = CliRunner().invoke(command, arguments).exception
    assert isinstance(error, PlanError)
    assert message in str(error)
    assert "\n" not in str(error)


def test_counts_of_tokens_are_read_with_their_unit() -> None:
    shown = CliRunner().invoke(command, ["naive-n05-flash", "--context", "128k", "--json"])
    assert json.loads(shown.output)["setup"]["context"] == 131_072
    assert CliRunner().invoke(command, ["naive-n05-flash", "--context", "many"]).exit_code == 2


def test_the_command_shows_people_what_it_shows_machines() -> None:
    arguments = ["naive-n05-flash", "--tp", "8", "--drafts", "7", "--acceptance", "5.8"]
    document = json.loads(CliRunner().invoke(command, [*arguments, "--json"]).output)
    table = CliRunner().invoke(command, arguments).output
    for tokens_per_s in (document["floor_tokens_per_s"], document["prediction"]["tokens_per_s"]):
        assert f"{tokens_per_s:,.0f}" in table
    assert "limited by" in table


def test_the_list_names_every_model_machine_and_launch_structure() -> None:
    listed = CliRunner().invoke(command, ["--list"]).output
    for name in (*described_models(), *hardware_names(), *launch_names()):
        assert name in listed
