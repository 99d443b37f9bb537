"""Draws docs/frontier.svg: the published points, and what `slipstream plan` predicts of systems like them."""

from pathlib import Path
from tempfile import TemporaryDirectory

from slipstream.bench.frontier import planned_point, published, write_charts
from slipstream.bench.hardware import load_hardware
from slipstream.bench.model_costs import load_model
from slipstream.bench.plan import Setup, plan

PREDICTED = [
    ("naive-n05-flash", "b200", Setup(tp=8, drafts=7, acceptance=5.8, drafter_params=650_000_000)),
    ("mimo-v2.5-pro", "b200", Setup(tp=8, drafts=7, acceptance=6.3)),
    ("qwen3-30b-a3b", "h200", Setup()),
    ("gpt-oss-120b", "h200", Setup()),
    ("deepseek-v3.2", "b200", Setup(tp=8)),
]


def main() -> None:
    plans = [plan(load_model(model), load_hardware(gpu), setup) for model, gpu, setup in PREDICTED]
    points = published() + [planned_point(each.to_json()) for each in plans]
    with TemporaryDirectory() as folder:
        _, svg, _ = write_charts(points, Path(folder) / "frontier")
        (Path(__file__).parent.parent / "docs" / "frontier.svg").write_text(svg.read_text())


if __name__ == "__main__":
    main()
