"""/openapi.json, /metrics and the form of streams."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis.errors import Unsatisfiable
from prometheus_client.parser import text_string_to_metric_families
from schemathesis.checks import CHECKS, load_all_checks
from schemathesis.generation import GenerationMode

import outrider
from outrider.bundle.manifest import TextEncoderKind
from outrider.server import Settings
from serving import CONFIG, MESSAGES, Live, serving
from text_encoders import write_toy

# A body that follows the schema may be refused: no schema says that a prompt fits, or which fields go together.
NUM_EXAMPLES = int(os.environ.get("OUTRIDER_EXAMPLES", "25"))
REFUSED = {"positive_data_acceptance"}


POSTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings", "/v1/rerank")
STORED = ("/v1/responses/{response_id}", "/v1/responses/{response_id}/input_items")
OPERATIONS = (*POSTS, *STORED, "/v1/models", "/v1/models/{model}", "/health", "/metrics")


@pytest.fixture(scope="module")
def described(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("toys")
    toys = {kind: write_toy(folder / kind, tiny, kind) for kind in get_args(TextEncoderKind)}
    with serving({"tiny": tiny, **toys}, Settings(max_running=4), CONFIG.replace(max_new_tokens=4)) as live:
        yield schemathesis.openapi.from_url(f"{live.url}/openapi.json")
        assert live.is_idle


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: mode.name.lower())
@pytest.mark.parametrize("path", OPERATIONS)
def test_the_description_is_true(described: Any, path: str, mode: GenerationMode) -> None:
    """Whatever is sent: no status that is not described, no failure of the server, no body that is not described."""
    operation = described[path]["POST" if path in POSTS else "GET"]
    load_all_checks()
    checks = [check for check in CHECKS.get_all() if check.__name__ not in REFUSED]
    assert len(checks) > 5

    @settings(max_examples=NUM_EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
    @given(case=operation.as_strategy(generation_mode=mode))
    def check(case: Any) -> None:
        for name in ("max_tokens", "max_output_tokens"):
            if isinstance(case.body, dict) and isinstance(case.body.get(name), int):
                case.body[name] = min(case.body[name], 8)  # answers that take no time
        case.call_and_validate(checks=checks, timeout=300)

    try:
        check()
    except Unsatisfiable:
        assert mode == GenerationMode.NEGATIVE  # nothing in such a request could be wrong
        assert path not in POSTS


def test_the_description_has_all_fields(live: Live) -> None:
    schemas = httpx.get(f"{live.url}/openapi.json").json()["components"]["schemas"]
    fields = schemas["ChatRequest"]["properties"]
    assert fields["model"]["examples"] == ["tiny"]
    assert {"messages", "temperature", "tools", "drafter", "system", "parallel_tool_calls"} <= set(fields)
    assert fields["echo"]["enum"][:2] == [None, False]
    assert "anyOf" in schemas["CompletionRequest"]["properties"]["echo"]
    fields = schemas["ResponseRequest"]["properties"]
    assert fields["background"]["enum"][:2] == [None, False]
    assert "anyOf" in fields["store"]
    assert not {"max_tokens", "response_format"} & set(fields)


def test_the_description_asks_for_a_key_where_one_is_needed(tiny: Path) -> None:
    headers = {"Authorization": "Bearer k"}
    with serving({"tiny": tiny}, Settings(api_key="k")) as live:
        described = httpx.get(f"{live.url}/openapi.json", headers=headers).json()
    assert described["security"] == [{"key": []}]


def samples(text: str) -> dict[tuple[str, ...], float]:
    """Values by the sample's name and its labels' values, in the labels' order."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found[sample.name, *(value for _, value in sorted(sample.labels.items()))] = sample.value
    return found


def test_metrics_count_what_was_answered(tiny: Path, engine: outrider.Engine) -> None:
    with serving({"tiny": tiny}) as live:
        before = samples(httpx.get(f"{live.url}/metrics").text)
        assert before["vllm:num_requests_running", "tiny"] == 0
        assert before["vllm:generation_tokens_total", "tiny"] == 0
        asked: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "max_tokens": 30}
        extra = {"drafter": "suffix", "num_assistant_tokens": 3, "ignore_eos": True}
        answers = [live.client().chat.completions.create(**asked, extra_body=extra, n=2) for _ in range(2)]
        usage = {"include_usage": True}
        *_, last = live.client().chat.completions.create(**asked, stream=True, stream_options=usage, extra_body=extra)
        answer = httpx.get(f"{live.url}/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=")
    after = samples(answer.text)
    assert after["vllm:generation_tokens_total", "tiny"] == 150
    assert after["vllm:prompt_tokens_total", "tiny"] == 5 * answers[0].usage.prompt_tokens
    assert after["vllm:request_success_total", "length", "tiny"] == 5
    assert after["vllm:time_to_first_token_seconds_count", "tiny"] == 5
    assert after["vllm:e2e_request_latency_seconds_count", "tiny"] == 5
    assert after["vllm:request_generation_tokens_sum", "tiny"] == 150
    assert after["vllm:num_requests_running", "tiny"] == after["vllm:num_requests_waiting", "tiny"] == 0
    drafted = sum(each.timings["draft_n"] for each in (*answers, last))
    assert after["vllm:spec_decode_num_draft_tokens_total", "tiny"] == drafted
    accepted = after["vllm:spec_decode_num_accepted_tokens_total", "tiny"]
    places = [value for key, value in after.items() if key[0] == "vllm:spec_decode_num_accepted_tokens_per_pos_total"]
    assert accepted == sum(places) > 0
    assert after["vllm:spec_decode_num_drafts_total", "tiny"] >= max(places)
    assert after["vllm:prefix_cache_hits_total", "tiny"] <= after["vllm:prefix_cache_queries_total", "tiny"]
