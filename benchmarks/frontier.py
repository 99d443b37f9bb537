"""Draws docs/frontier.svg: published points, our measured ones, and what `slipstream plan` predicts of such systems."""

from pathlib import Path
from tempfile import TemporaryDirectory

from slipstream.bench import results
from slipstream.bench.frontier import Point, planned_point, published, write_charts
from slipstream.bench.hardware import load_hardware
from slipstream.bench.model_costs import load_model
from slipstream.bench.plan import Setup, plan

PREDICTED = [
    ("naive-n05-flash", "b200", Setup(tp=8, drafts=7, acceptance=5.8, drafter_params=650_000_000)),
    ("mimo-v2.5-pro", "b200", Setup(tp=8, drafts=7, acceptance=6.3)),
    ("deepseek-v3.2", "b200", Setup(tp=8)),
]


# Topic, row, model, and what the row is: only rows of one stream, in tok/s or a pass that commits one token.
MEASURED = [
    ("serve_llama_cpp", "serve-decode-natural", "smollm2", "SmolLM2-135M, 2 CPU cores", "real weights, over HTTP"),
    ("cuda_smollm2", "cuda-chat-wall", "smollm2", "SmolLM2-135M, one H200", "real weights, no drafts, wall clock"),
    ("cuda_large", "cuda-1b", "llama-1b", "Llama-1B shapes, one H200", "random weights, no drafts, device time"),
    (
        "cuda_sparse",
        "moe-qwen3-30b",
        "qwen3-30b-a3b",
        "Qwen3-30B-A3B shapes, one H200",
        "random weights, no drafts, device time",
    ),
    (
        "cuda_sparse",
        "moe-gptoss-1",
        "gpt-oss-120b",
        "gpt-oss-120b shapes, one H200",
        "random weights, no drafts, device time",
    ),
]
RATES = {"tok/s": lambda value: value, "us": lambda value: 1e6 / value, "ms": lambda value: 1e3 / value}


def measured() -> list[Point]:
    points = []
    for topic, id, model, name, note in MEASURED:
        file = results.read(Path(__file__).parent / "results" / f"{topic}.json")
        row = next(row for row in file.rows if row.id == id)
        source = f"benchmarks/results/{topic}.json, {id}, {file.date}"
        points.append(Point(name, load_model(model).total_params, RATES[row.unit](row.value), "measured", source, note))
    return points


def main() -> None:
    plans = [plan(load_model(model), load_hardware(gpu), setup) for model, gpu, setup in PREDICTED]
    points = published() + measured() + [planned_point(each.to_json()) for each in plans]
    with TemporaryDirectory() as folder:
        _, svg, _ = write_charts(points, Path(folder) / "frontier")
        (Path(__file__).parent.parent / "docs" / "frontier.svg").write_text(svg.read_text())


if __name__ == "__main__":
    main()
