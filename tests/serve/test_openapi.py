"""The OpenAPI document is true, and nothing that fits or breaks it makes the server fail."""

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import status_code_conformance
from serving import serving

from slipstream.serve.config import Limits


@pytest.fixture(scope="module")
def limited(tiny_llm):
    with serving(tiny_llm, limits=Limits(max_tokens=12)) as running:
        yield running


def test_no_request_makes_the_server_fail(limited):
    document = schemathesis.openapi.from_url(f"{limited.url}/openapi.json")
    tried = set()
    for operation in document.get_all_operations():
        case_strategy = operation.ok().as_strategy()

        @given(case=case_strategy)
        @settings(
            max_examples=10,
            deadline=None,
            derandomize=True,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        def fuzz(case):
            case.call_and_validate(checks=[not_a_server_error, status_code_conformance])

        fuzz()
        tried.add(operation.ok().label)
    assert len(tried) >= 15
    assert limited.at_rest()


def test_every_endpoint_is_documented(tiny):
    paths = httpx.get(f"{tiny.url}/openapi.json").json()["paths"]
    for path in (
        "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/responses/{response_id}", "/v1/messages",
        "/v1/messages/count_tokens", "/v1/models", "/tokenize", "/detokenize", "/health", "/ready", "/metrics",
    ):  # fmt: skip
        assert path in paths
    answers = [status for path in paths.values() for one in path.values() for status in one["responses"]]
    assert "422" not in answers
