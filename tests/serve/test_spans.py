"""An answer is one span, with counts and without text."""

from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter


def test_an_answer_is_a_span_below_the_one_that_asked(tiny):
    memory, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(memory))
    trace.set_tracer_provider(provider)
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    messages = [{"role": "user", "content": "a private question"}]
    done = tiny.openai().chat.completions.create(
        model=tiny.model, messages=messages, max_tokens=4, extra_headers={"traceparent": parent}
    )
    span = next(s for s in memory.get_finished_spans() if s.name == f"chat {tiny.model}")
    assert f"{span.context.trace_id:032x}" == parent.split("-")[1]
    assert span.attributes["gen_ai.usage.output_tokens"] == done.usage.completion_tokens
    assert span.attributes["slipstream.tier"] == "default"
    assert span.end_time >= span.start_time
    assert "private" not in str(span.to_json())
