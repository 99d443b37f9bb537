"""Two servers, one stream, measured from outside: ours and llama.cpp's, on the same cores with the same file.

    python benchmarks/serve_llama_cpp.py             part of `make bench`; writes results/serve_llama_cpp.json
    python benchmarks/serve_llama_cpp.py --html report.html --out answers.jsonl

`slipstream bench serve` in a script: real questions, in turns, with natural stops and with forced length, each endpoint
in a process of its own. llama-cpp-python's server sends no usage with a stream, so for it alone the tokenizer counts.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from worker import require_peer

from slipstream.bench import results
from slipstream.bench.endpoint import HttpEndpoint
from slipstream.bench.endpoint_questions import Plan
from slipstream.bench.endpoint_run import Run, Sample, header, measure
from slipstream.bench.endpoint_summary import compare, summarize
from slipstream.bench.machine import cores
from slipstream.bench.stream_clock import EndpointError, exchange
from slipstream.models.checkpoint import load_checkpoint

FOLDER = Path(__file__).parent / "results"
OURS, PEER = "slipstream", "llama.cpp"
CONTEXT = 4096


@contextmanager
def running(*command: str) -> Iterator[str]:
    """The address of a server that `command`, with a free port in place of PORT, has brought up."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(
            [sys.executable, "-m", *(port if part == "PORT" else part for part in command)],
            stdout=subprocess.DEVNULL,
            stderr=said,
        )
        try:
            limit = time.monotonic() + 60
            while True:
                try:
                    exchange(f"{url}/v1/models", timeout_s=5)
                    break
                except EndpointError:
                    if process.poll() is not None or time.monotonic() > limit:
                        said.seek(0)
                        last = said.read().decode("utf-8", "replace").strip().splitlines()[-1:]
                        sys.exit(
                            f"`python -m {' '.join(command)}` did not come up: {''.join(last) or 'it said nothing'}"
                        )
                    time.sleep(0.2)
            yield url
        finally:
            process.terminate()
            process.wait(30)


def rows(run: Run) -> list[results.Row]:
    """Medians of both, and the paired ratio, for each kind of stop."""
    made = []
    summaries = {(s.endpoint, s.stops): s for s in summarize(run)}
    for ratio in compare(run):
        ours, peer = summaries[OURS, ratio.stops], summaries[PEER, ratio.stops]
        for name, unit, scale, a, b, times in (
            ("ttft", "ms", 1e3, ours.ttft_s, peer.ttft_s, ratio.ttft),
            ("decode", "tok/s", 1, ours.decode_tokens_per_s, peer.decode_tokens_per_s, ratio.decode),
            ("end-to-end", "tok/s", 1, ours.end_to_end_tokens_per_s, peer.end_to_end_tokens_per_s, ratio.end_to_end),
        ):
            if a is None or b is None or times is None:
                refused = [*ours.refusals, *peer.refusals, *ours.errors, *peer.errors]
                sys.exit(f"no figure for {name}, {ratio.stops} stops: {'; '.join(refused)}")
            field = {"ttft": "ttft_s", "decode": "decode_tokens_per_s", "end-to-end": "end_to_end_tokens_per_s"}[name]
            found = [getattr(s.figures, field) for s in run.samples if s.figures and s.endpoint == OURS]
            made.append(
                results.Row(
                    id=f"serve-{name}-{ratio.stops}",
                    work=f"{name.replace('-', ' ')} over HTTP, {ratio.questions} questions, {ratio.stops} stops, "
                    f"{ours.tokens_per_round or 1:.2f} tokens a round (95%: {times.low:.2f}x to {times.high:.2f}x)",
                    value=a.p50.value * scale,
                    unit=unit,
                    peer=f"{PEER} server",
                    peer_value=b.p50.value * scale,
                    ratio=times.value,
                    samples=[value * scale for value in found if value is not None],
                )
            )
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--threads", type=int, default=cores())
    parser.add_argument("--requests", type=int, default=20)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--out", type=Path, help="write every answer as JSON Lines")
    parser.add_argument("--html", type=Path, help="write a report")
    options = parser.parse_args()
    require_peer("llama_cpp", "sse_starlette", "starlette_context", "pydantic_settings")

    checkpoint = load_checkpoint(options.model)
    threads = str(options.threads)
    ours = ("slipstream", "serve", options.model, "--port", "PORT", "--threads", threads, "--context", str(CONTEXT))
    peer = ("llama_cpp.server", "--model", str(checkpoint.path), "--port", "PORT", "--n_threads", threads)
    peer += ("--n_threads_batch", threads, "--n_ctx", str(CONTEXT), "--model_alias", options.model)
    load = os.getloadavg()[0]  # what else ran: threads that wait for each other suffer most from company
    plan = Plan(requests=options.requests, warmup=2, max_tokens=options.max_tokens)
    with running(*ours) as one, running(*peer) as two, options.out.open("w") if options.out else nullcontext() as lines:
        endpoints = [
            HttpEndpoint(one, name=OURS, tokenizer=checkpoint.tokenizer),
            HttpEndpoint(two, name=PEER, tokenizer=checkpoint.tokenizer, count_locally=True),
        ]

        def note(sample: Sample) -> None:
            rate = sample.figures.decode_tokens_per_s if sample.figures else None
            said = f"{rate:.0f} tok/s" if rate else sample.error or "no rate"
            print(f"  {sample.question.id} {sample.question.stops}, {sample.endpoint}: {said}", file=sys.stderr)
            if lines:
                lines.write(json.dumps(sample.to_json(), ensure_ascii=False) + "\n")

        if lines:
            lines.write(json.dumps(header(endpoints, plan)) + "\n")
        run = measure(endpoints, plan, note)
    made = rows(run)
    for row in made:
        print(results.line(row))
    packages = ("numpy", "llama-cpp-python", "uvicorn", "h11")
    path = results.write(FOLDER, "serve_llama_cpp", made, packages=packages, load_before=load)
    print(f"wrote {path}")
    if options.html:
        from slipstream.bench.report import write_report

        write_report(options.html, run, summarize(run), compare(run))


if __name__ == "__main__":
    main()
