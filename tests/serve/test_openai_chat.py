"""`/v1/chat/completions` and `/v1/completions` through the official client."""

import asyncio
import json

import httpx
import openai
import pytest

QUESTION = [{"role": "user", "content": "List the days of the week, twice."}]


@pytest.fixture
def client(tiny):
    return tiny.openai()


def ask(client, tiny, **options):
    return client.chat.completions.create(
        **({"model": tiny.model, "messages": QUESTION, "max_tokens": 12, "temperature": 0} | options)
    )


def test_a_stream_and_a_whole_answer_say_the_same(smollm2):
    client = smollm2.openai()
    whole = ask(client, smollm2, max_tokens=48)
    chunks = list(ask(client, smollm2, max_tokens=48, stream=True, stream_options={"include_usage": True}))
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content != ""
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 48
    assert sum(c.slipstream["tokens"] for c in chunks[:-1] if getattr(c, "slipstream", None)) == 48


def test_the_server_says_what_the_engine_says(smollm2, smollm2_llm):
    from slipstream import SamplingParams

    for sampling in ({"temperature": 0.0}, {"temperature": 0.8, "top_p": 0.9, "seed": 11}):
        alone = smollm2_llm.session().chat(QUESTION, SamplingParams(max_tokens=32, **sampling))
        served = ask(smollm2.openai(), smollm2, max_tokens=32, **sampling)
        assert served.choices[0].message.content == alone.text


def test_the_finish_chunk_has_no_content_and_comes_after_all_of_it(client, tiny):
    chunks = [c for c in ask(client, tiny, stream=True) if c.choices]
    assert [c.choices[0].finish_reason for c in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].choices[0].finish_reason == "length"
    assert not chunks[-1].choices[0].delta.content


def test_without_include_usage_no_chunk_is_without_a_choice(client, tiny):
    assert all(c.choices for c in ask(client, tiny, stream=True))


def test_usage_counts_the_tokens_that_were_made(client, tiny):
    done = ask(client, tiny, max_completion_tokens=7)
    assert done.usage.completion_tokens == 7
    assert done.usage.total_tokens == done.usage.prompt_tokens + 7
    assert done.choices[0].finish_reason == "length"
    assert done.service_tier == "default"


def test_choices_differ_by_seed_and_repeat_with_it(client, tiny):
    first, again = (ask(client, tiny, n=3, seed=5, temperature=1.0) for _ in range(2))
    texts = [c.message.content for c in first.choices]
    assert texts == [c.message.content for c in again.choices]
    assert len(set(texts)) == 3
    assert first.usage.completion_tokens == 36


def test_choices_stream_side_by_side(client, tiny):
    texts = {0: "", 1: ""}
    for chunk in ask(client, tiny, n=2, seed=5, temperature=1.0, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    whole = ask(client, tiny, n=2, seed=5, temperature=1.0)
    assert list(texts.values()) == [c.message.content for c in whole.choices]


def test_nothing_follows_a_stop(smollm2):
    client = smollm2.openai()
    free = ask(client, smollm2, max_tokens=48).choices[0].message.content
    stop = free.split()[3]
    text = "".join(
        c.choices[0].delta.content or "" for c in ask(client, smollm2, max_tokens=48, stop=[stop], stream=True)
    )
    assert text == free[: free.index(stop)]


def test_logprobs_name_each_token_and_its_rivals(client, tiny):
    done = ask(client, tiny, logprobs=True, top_logprobs=3, max_tokens=4)
    content = done.choices[0].logprobs.content
    assert len(content) == 4
    for entry in content:
        assert entry.logprob == pytest.approx(entry.top_logprobs[0].logprob)
        assert len(entry.top_logprobs) == 3
        assert bytes(entry.bytes).decode("utf-8", "replace") == entry.token
    chunks = ask(client, tiny, logprobs=True, top_logprobs=3, max_tokens=4, stream=True)
    streamed = [e for c in chunks if c.choices[0].logprobs for e in c.choices[0].logprobs.content]
    assert [e.logprob for e in streamed] == [e.logprob for e in content]


def test_a_bias_bans_and_forces(client, tiny):
    forced = ask(client, tiny, logit_bias={"65": 100}, max_tokens=3)
    banned = ask(client, tiny, logit_bias={"65": -100}, max_tokens=3)
    token = tiny.service.llm.tokenizer.decode([65])
    assert forced.choices[0].message.content == token * 3
    assert token not in banned.choices[0].message.content


def test_penalties_change_what_repeats(client, tiny):
    plain, penalised = ask(client, tiny, max_tokens=64), ask(client, tiny, max_tokens=64, frequency_penalty=2)
    assert plain.choices[0].message.content != penalised.choices[0].message.content


def test_a_repeated_conversation_is_read_from_the_cache(smollm2):
    client = smollm2.openai()
    turns = [{"role": "user", "content": "My name is Ada and I like long walks on the beach in the evening sun."}]
    first = ask(client, smollm2, messages=turns)
    turns += [
        {"role": "assistant", "content": first.choices[0].message.content},
        {"role": "user", "content": "What is my name?"},
    ]
    second = ask(client, smollm2, messages=turns)
    cached = second.usage.prompt_tokens_details.cached_tokens
    assert first.usage.prompt_tokens <= cached + 8
    assert cached < second.usage.prompt_tokens


def test_text_completions_continue_text_and_tokens(client, tiny):
    tokens = tiny.service.llm.tokenizer.encode("Hello")
    text, ids = (
        client.completions.create(model=tiny.model, prompt=prompt, max_tokens=5, temperature=0, logprobs=1)
        for prompt in ("Hello", tokens)
    )
    assert text.choices[0].text == ids.choices[0].text
    assert len(text.choices[0].logprobs.tokens) == text.usage.completion_tokens == 5
    both = client.completions.create(
        model=tiny.model, prompt=["Hello", "World"], max_tokens=5, temperature=0, echo=True
    )
    assert [c.text[:5] for c in both.choices] == ["Hello", "World"]
    assert [c.index for c in both.choices] == [0, 1]
    streamed = client.completions.create(model=tiny.model, prompt="Hello", max_tokens=5, temperature=0, stream=True)
    assert "".join(c.choices[0].text for c in streamed) == text.choices[0].text


def test_the_asynchronous_client_gets_the_same(tiny):
    async def run():
        async with openai.AsyncOpenAI(base_url=f"{tiny.url}/v1", api_key="none") as client:
            call = {"model": tiny.model, "messages": QUESTION, "max_tokens": 12, "temperature": 0}
            whole = await client.chat.completions.create(**call)
            stream = await client.chat.completions.create(**call, stream=True)
            return whole.choices[0].message.content, "".join([c.choices[0].delta.content or "" async for c in stream])

    whole, streamed = asyncio.run(run())
    assert whole == streamed == ask(tiny.openai(), tiny).choices[0].message.content


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"frobnicate": 1}, "frobnicate"),
        ({"functions": []}, "functions"),
        ({"temperature": 3}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"n": 99}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"999999": 1}}, "logit_bias"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"stop": [1]}, "stop[0]"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.function"),
        ({"service_tier": "warp"}, "service_tier"),
    ],
)
def test_a_wrong_request_is_refused_by_name(tiny, wrong, param):
    body = {"model": tiny.model, "messages": QUESTION} | wrong
    answer = httpx.post(f"{tiny.url}/v1/chat/completions", json=body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert "\n" not in error["message"]


@pytest.mark.parametrize(
    ("sent", "code"),
    [(b"{", "invalid_json"), (b"[" * 100_000, "invalid_json"), (b"[]", "invalid_value"), (b'"x"', "invalid_value")],
)
def test_a_body_that_is_no_json_object_is_refused_as_that(tiny, sent, code):
    headers = {"Content-Type": "application/json"}
    answer = httpx.post(f"{tiny.url}/v1/chat/completions", content=sent, headers=headers)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == code
    form = httpx.post(f"{tiny.url}/v1/chat/completions", data={"model": "x"})
    assert "application/json" in form.json()["error"]["message"]


def test_an_unknown_model_is_a_404_and_a_long_prompt_a_400(client, tiny):
    with pytest.raises(openai.NotFoundError, match="not served here"):
        ask(client, tiny, model="gpt-9")
    with pytest.raises(openai.BadRequestError) as refused:
        ask(client, tiny, messages=[{"role": "user", "content": "long " * 600}])
    assert refused.value.code == "context_length_exceeded"


def test_fields_without_effect_here_are_accepted(client, tiny):
    plain = ask(client, tiny)
    more = ask(
        client, tiny, user="u", metadata={"a": "b"}, store=False, prompt_cache_key="k", safety_identifier="s",
        reasoning_effort="low", verbosity="low", modalities=["text"],
    )  # fmt: skip
    assert more.choices[0].message.content == plain.choices[0].message.content


def test_tokens_go_there_and_back(tiny):
    def post(path, **body):
        return httpx.post(tiny.url + path, json=body).json()

    tokens = post("/tokenize", prompt="the naïve 猫")["tokens"]
    assert post("/detokenize", tokens=tokens)["prompt"] == "the naïve 猫"
    chat = post("/tokenize", messages=QUESTION)
    assert chat["count"] == ask(tiny.openai(), tiny).usage.prompt_tokens


def test_models_health_and_metrics(client, tiny):
    (model,) = client.models.list().data
    assert client.models.retrieve(model.id).id == model.id == tiny.model
    assert httpx.get(f"{tiny.url}/health").json() == {"status": "ok"}
    assert httpx.get(f"{tiny.url}/ready").status_code == 200
    ask(client, tiny)
    text = httpx.get(f"{tiny.url}/metrics").text
    for name in ("rounds", "accepted_tokens", "cached_tokens", "cost_usd", "device_seconds"):
        assert f'slipstream_{name}_total{{tier="default"}}' in text
    assert "slipstream_ttft_seconds_bucket" in text


def test_embeddings_are_a_clear_404(client, tiny):
    with pytest.raises(openai.NotFoundError, match="embeddings are not served"):
        client.embeddings.create(model=tiny.model, input="x")


def test_each_event_is_one_line_of_json(tiny):
    body = {"model": tiny.model, "messages": QUESTION, "max_tokens": 8, "stream": True}
    text = httpx.post(f"{tiny.url}/v1/chat/completions", json=body).text
    *events, end, rest = text.split("\n\n")
    assert (end, rest) == ("data: [DONE]", "")
    for event in events:
        chunk = json.loads(event.removeprefix("data: "))
        assert chunk["object"] == "chat.completion.chunk"
        assert chunk["service_tier"] == "default"
