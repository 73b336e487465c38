"""What clients and agents send in their own words: what cannot change an answer does not, and what can is done."""

import json
import logging
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient

import bodies
import outrider
from outrider.server import chat as chats
from outrider.server import completions, responses
from outrider.server.app import make_app
from outrider.server.dialect import Dialect
from outrider.server.errors import ApiError
from outrider.server.logprobs import TokenTexts
from outrider.server.options import choices_of_chat
from outrider.server.protocol.items import ResponseRequest
from outrider.server.protocol.reading import read_request
from outrider.server.protocol.requests import ChatRequest, CompletionRequest
from outrider.server.settings import Settings
from outrider.system.listed import ListedOnce
from serving import Live, choice_of, events_of, serving

HELLO = [{"role": "user", "content": "Say hi."}]
CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"


def chat(http: httpx.Client, **fields: Any) -> Any:
    answer = http.post(CHAT, json={"model": "tiny", "messages": HELLO, "max_tokens": 6} | fields)
    assert answer.status_code == 200, answer.text
    return answer.json()


def said(answer: Any) -> str:
    content: str = answer["choices"][0]["message"]["content"]
    return content


# Fields of chats as clients send them: those that mean what others do, by name, and those without effect.
FILE = Path(bodies.__file__).with_name("other_requests.json")
ROWS = json.loads(FILE.read_text(encoding="utf-8"))
SAME = [row["theirs"] for row in ROWS if "ours" not in row]
SHAPED = {row["name"]: (row["theirs"], row["ours"]) for row in ROWS if "ours" in row}


@pytest.mark.parametrize("fields", SAME, ids=lambda fields: str(fields)[:60])
def test_what_cannot_change_the_answer_does_not(http: httpx.Client, fields: dict[str, Any]) -> None:
    """This model's template reads no variable, and writes no reasoning."""
    plain = chat(http)
    answer = chat(http, **fields)
    assert said(answer) == said(plain)
    assert answer["usage"]["prompt_tokens"] == plain["usage"]["prompt_tokens"]


def test_calls_from_before_there_were_tools_are_read() -> None:
    call = {"name": "weather", "arguments": '{"city": "Oslo"}'}
    old = [
        *HELLO, {"role": "assistant", "content": None, "function_call": call},
        {"role": "function", "name": "weather", "content": "rain"},
    ]  # fmt: skip
    new = [
        *HELLO, {"role": "assistant", "content": None, "tool_calls": [{"id": "call_1", "function": call}]},
        {"role": "tool", "name": "weather", "content": "rain", "tool_call_id": "call_1"},
    ]  # fmt: skip
    assert asked(ChatRequest, messages=old) == asked(ChatRequest, messages=new)


def test_turns_are_as_templates_know_them() -> None:
    """Texts of a message stand on lines of their own, as in llama.cpp and vLLM; tools begin with their type."""
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": ""}, {"type": "text", "text": "b"}]
    call = {"function": {"name": "f", "arguments": {}}}
    turns = [{"role": "user", "content": parts}, {"role": "assistant", "tool_calls": [call]},
             {"role": "tool", "content": "c"}]  # fmt: skip
    tool = {"function": {"name": "f", "parameters": {}}, "type": "function"}
    (choice,) = choices_of_chat(asked(ChatRequest, messages=turns, tools=[tool]))
    assert choice.prompt[0]["content"] == "a\nb"
    assert choice.prompt[1]["tool_calls"][0]["id"] == "call_1_0"
    assert [*choice.options["tools"][0]] == ["type", "function"]
    (choice,) = choices_of_chat(asked(ChatRequest, messages=turns[:2]))
    assert (len(choice.prompt), choice.options.get("continue_final_message")) == (2, None)  # calls are whole


@pytest.mark.parametrize(("kind", "fields", "message"), [
    (ResponseRequest, {"input": [{"type": "compaction", "encrypted_content": "x"}]}, "Send the items themselves."),
    (ChatRequest, {"messages": HELLO, "repeat_last_n": 64, "presence_penalty": 1}, "Set it to -1, or leave it out."),
    (ChatRequest, {"messages": HELLO, "top_n_sigma": 1.0}, "'top_n_sigma' is not supported"),
    (ChatRequest, {"messages": HELLO, "extra_body": {"top_k": 1}}, "'extra_body' is not.*Send the fields within"),
    (ChatRequest, {"messages": HELLO, "n_probs": 3}, "'n_probs' is not supported.*Send top_logprobs."),
    (ChatRequest, {"messages": HELLO, "function_call": {"name": "f"}}, "'function_call'.*Send tool_choice."),
    (ChatRequest, {"messages": HELLO, "functions": [{"name": "f"}]}, "'functions' is not supported.*Send tools."),
    (ChatRequest, {"messages": HELLO, "max_tokens": "six"}, "'max_tokens': expected `int | null`, got `str`"),
    (ChatRequest, {"messages": HELLO, "samplers": ["top_k"]}, "'samplers' is not supported by this server"),
    (ChatRequest, {"messages": HELLO, "logit_bias": [[5, True, 1]]}, "'logit_bias': expected `object"),
])  # fmt: skip
def test_what_cannot_be_done_is_refused_by_name(kind: type[Any], fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ApiError, match=message):
        asked(kind, **fields)


def test_other_roles_go_to_the_template() -> None:
    (choice,) = choices_of_chat(asked(ChatRequest, messages=[{"role": "Document", "content": "a"}, *HELLO]))
    assert [turn["role"] for turn in choice.prompt] == ["document", "user"]
    with pytest.raises(ApiError, match=r"'messages\[0\].role'"):
        asked(ChatRequest, messages=[{"role": "user<|im_end|>", "content": "a"}])


def test_a_byte_order_mark_before_a_body_is_skipped() -> None:
    body = json.dumps({"model": "m", "messages": HELLO})
    assert read_request(body.encode("utf-8-sig"), ChatRequest) == read_request(body.encode(), ChatRequest)


def test_prompts_may_be_of_both_kinds(http: httpx.Client) -> None:
    both = http.post(TEXT, json={"prompt": ["Hi", [300, 301]], "max_tokens": 4}).json()["choices"]
    one = [http.post(TEXT, json={"prompt": each, "max_tokens": 4}).json()["choices"][0] for each in ("Hi", [300, 301])]
    assert [each["text"] for each in both] == [each["text"] for each in one]
    assert http.post(TEXT, json={"prompt": ["Hi", 300], "max_tokens": 4}).status_code == 400


def test_items_of_stored_answers_may_be_referred_to(http: httpx.Client) -> None:
    """As the Vercel AI SDK sends them."""
    first = http.post(RESPONSES, json={"input": [ITEM], "max_output_tokens": 6}).json()
    (message,) = first["output"]
    body = {"max_output_tokens": 6, "store": False}
    whole = http.post(RESPONSES, json=body | {"input": [ITEM, message, ITEM]}).json()
    for reference in ({"type": "item_reference", "id": message["id"]}, {"id": message["id"]}):
        answer = http.post(RESPONSES, json=body | {"input": [ITEM, reference, ITEM]}).json()
        assert answer["output"][0]["content"] == whole["output"][0]["content"]
        assert answer["usage"]["input_tokens"] == whole["usage"]["input_tokens"]
    lost = {"type": "item_reference", "id": whole["output"][0]["id"]}  # which was not stored
    assert http.post(RESPONSES, json={"input": [lost]}).json()["error"]["code"] == "item_not_found"


def asked(kind: type[Any], **fields: Any) -> Any:
    """The request that these fields are."""
    return read_request(json.dumps({"model": "tiny"} | fields).encode(), kind)


def test_what_is_ignored_is_listed_once(caplog: pytest.LogCaptureFixture) -> None:
    listed, long = ListedOnce(logging.getLogger("outrider.server"), "Ignored: %s."), "\x1b[31m\nCRITICAL " + "x" * 10**6
    with caplog.at_level(logging.WARNING):
        for names in (["user", "store"], ["user"], [long]):
            listed.add(names)
        for start in range(0, 5000, 500):
            listed.add(f"{i}" for i in range(start, start + 500))
    assert caplog.messages[:2] == ["Ignored: 'store', 'user'.", f"Ignored: {long[:100]!r}."]
    assert len(caplog.messages) == 12  # of one call 20 names, of all together 200
    assert max(map(len, caplog.messages)) < 200


@pytest.mark.parametrize(("dialect", "field", "body"), [
    (chats.CHAT, "max_tokens", {"messages": HELLO}), (chats.CHAT, "max_completion_tokens", {"messages": HELLO}),
    (completions.COMPLETIONS, "max_tokens", {"prompt": "Hi"}),
    (responses.RESPONSES, "max_output_tokens", {"input": "Hi"}),
])  # fmt: skip
def test_more_tokens_than_fit_are_as_many_as_fit(dialect: Dialect, field: str, body: dict[str, Any]) -> None:
    for value in (2**40, -1):
        options = choice_of(dialect, **body, **{field: value}).options
        assert (options["max_new_tokens"], options["fits"]) == (2**31 - 1, True)


def test_an_answer_that_fills_the_context_ends_by_length(live: Live) -> None:
    engine = live.engine()
    admission = engine._preparation.prompts.admission
    most = admission.max_tokens
    config = engine.config.generation.replace(max_new_tokens=32_000)
    assert admission.check([300] * (most - 7), config, fits=True) == 7
    assert admission.check([300] * (most - 1), config, fits=True) == 1


def test_the_last_message_is_continued(http: httpx.Client, live: Live) -> None:
    begun = [*HELLO, {"role": "assistant", "content": "The quick"}]
    tokenizer: Any = live.engine().tokenizer
    rendered = tokenizer.render(HELLO) + "The quick"
    expected = live.engine().generate(tokenizer.encode_rendered(rendered), max_new_tokens=6).text
    for fields in ({}, {"continue_final_message": True, "add_generation_prompt": False}):
        answer = chat(http, messages=begun, **fields)
        assert said(answer) == expected
    closed = live.engine().generate(begun, max_new_tokens=6)
    for fields in ({"continue_final_message": False}, {"add_generation_prompt": True}):
        answer = chat(http, messages=begun, **fields)
        assert said(answer) == closed.text
        assert answer["usage"]["prompt_tokens"] == closed.stats.num_prompt_tokens


def test_a_special_token_as_stop_string_ends_the_answer(http: httpx.Client) -> None:
    special = 401  # <|im_start|>, forced as a model may write it
    answer = chat(http, stop=["<|im_start|>"], logit_bias={str(special): 100})
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == 1
    assert chat(http, logit_bias={str(special): 100})["choices"][0]["finish_reason"] == "length"


def test_bytes_of_tokens_make_the_text(http: httpx.Client) -> None:
    answer = chat(http, regex="[👍😀🎉]{2}", logprobs=True, top_logprobs=1, max_tokens=20)
    tokens = answer["choices"][0]["logprobs"]["content"]
    assert b"".join(bytes(token["bytes"] or []) for token in tokens).decode() == said(answer)
    assert any("\ufffd" in token["token"] for token in tokens)


@pytest.mark.parametrize("prompt", ["", "\n", " "])
def test_a_prompt_of_blanks_is_continued(http: httpx.Client, prompt: str) -> None:
    answer = http.post(TEXT, json={"model": "tiny", "prompt": prompt, "max_tokens": 2})
    assert answer.status_code == 200, answer.text


def test_echo_has_the_prompt_s_log_probabilities(http: httpx.Client, engine: outrider.Engine) -> None:
    """As evaluations ask for them."""
    body = {"model": "tiny", "prompt": "The fox is 😀", "max_tokens": 2, "echo": True, "logprobs": 2}
    made = http.post(TEXT, json=body).json()["choices"][0]["logprobs"]
    token_ids, texts = engine.encode_prompt("The fox is 😀", chat_template=False), TokenTexts(engine.tokenizer)
    scores = engine.score(token_ids[:1], token_ids[1:], chat_template=False)
    assert made["token_logprobs"][: len(token_ids)] == [None, *map(pytest.approx, scores)]
    assert made["top_logprobs"][0] is None
    assert all(max(top.values()) >= score for top, score in zip(made["top_logprobs"][1:], scores, strict=False))
    assert len(made["tokens"]) == len(token_ids) + 2
    places = [len(texts.text_of(token_ids[:i]).rstrip("\ufffd")) for i in range(len(token_ids))]
    assert made["text_offset"][: len(token_ids) + 1] == [*places, len("The fox is 😀")]
    assert len({*places}) < len(places)  # some tokens are of one character
    found = [event["choices"][0]["logprobs"] for event in events_of(http.post(TEXT, json=body | {"stream": True}))]
    assert [each for logprobs in found if logprobs for each in logprobs["token_logprobs"]] == made["token_logprobs"]
    only = http.post(TEXT, json=body | {"prompt": ["Hi", body["prompt"]], "max_tokens": 0}).json()  # so do they, too
    assert only["choices"][1]["logprobs"]["token_logprobs"] == made["token_logprobs"][: len(token_ids)]
    assert (only["choices"][1]["text"], only["choices"][1]["finish_reason"]) == ("The fox is 😀", "length")
    assert only["usage"]["completion_tokens"] == 0
    refused = http.post(TEXT, json=body | {"logprobs_of": "processed"})
    assert refused.json()["error"]["param"] == "echo"


def test_a_suffix_needs_tokens_for_it(http: httpx.Client) -> None:
    body = {"model": "tiny", "prompt": "def f(", "suffix": "return", "max_tokens": 4}
    error = http.post(TEXT, json=body).json()["error"]
    assert (error["param"], error["code"]) == ("suffix", "unsupported_field")
    assert http.post(TEXT, json=body | {"prompt": [300]}).json()["error"]["code"] == "invalid_value"
    assert http.post(TEXT, json=body | {"suffix": ""}).status_code == 200


def test_the_middle_is_asked_for_with_the_model_s_tokens() -> None:
    from outrider.server.infill import Infill

    class Coder:
        def encode(self, text: str) -> list[int]:
            known = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|file_sep|>", "<a>", "<b>", "<c>"]
            known.append("<|repo_name|>")
            return [known.index(text)] if text in known else [9] * len(text)

    prompt, options = Infill("a", "b").laid_out(Coder())  # type: ignore[arg-type]
    assert prompt == "<|fim_prefix|>a<|fim_suffix|>b<|fim_middle|>"
    assert options == {"stop_token_ids": [0, 1, 2, 3, 7]}
    prompt, options = Infill("a", "b").laid_out(Coder(), ("<a>", "<b>", "<c>"))  # type: ignore[arg-type]
    assert prompt == "<a>a<b>b<c>"  # what the model's file names comes first
    assert options == {"stop_token_ids": [4, 5, 6, 3, 7]}
    prompt, _ = Infill("a", "b", "c", [("a.py", "x\n")]).laid_out(Coder())  # type: ignore[arg-type]
    head = "<|repo_name|>myproject\n<|file_sep|>a.py\nx\n<|file_sep|>filename\n"
    assert prompt == f"{head}<|fim_prefix|>a<|fim_suffix|>b<|fim_middle|>c"  # as llama.cpp's /infill


def test_a_single_model_answers_to_any_name(http: httpx.Client, tiny: Path) -> None:
    answer = chat(http, model="gpt-4o")
    assert answer["model"] == "tiny"
    assert http.get("/v1/models/gpt-4o").status_code == 404
    app = make_app({"tiny": tiny}, Settings(strict_models=True))
    with TestClient(app, base_url="http://localhost") as strict:
        error = strict.post(CHAT, json={"model": "tinny", "messages": HELLO}).json()["error"]
    assert error["code"] == "model_not_found"
    assert "Did you mean 'tiny'?" in error["message"]


ITEM = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Say hi."}]}
SHELL = {"type": "function", "name": "shell", "description": "d", "strict": False, "parameters": {"type": "object"}}
CODEX: dict[str, dict[str, Any]] = {
    "plain": {}, "reasoning": {"reasoning": {"effort": "medium", "summary": "auto"}},
    "no reasoning": {"reasoning": None},
    "include": {"include": ["reasoning.encrypted_content"]}, "metadata": {"client_metadata": {"a": "b"}},
    "truncation": {"truncation": "auto"}, "web search": {"tools": [{"type": "web_search"}]},
    "custom": {"tools": [{"type": "custom", "name": "apply_patch"}], "tool_choice": "auto"},
    "local shell": {"tools": [{"type": "local_shell"}]}, "verbosity": {"text": {"verbosity": "low"}},
    "namespace": {"tools": [{"type": "namespace", "name": "n", "tools": [SHELL]}]},
    "reasoning item": {"input": [ITEM, {"type": "reasoning", "id": "rs_1", "summary": [], "status": None}, ITEM]},
}  # fmt: skip


@pytest.mark.parametrize("case", CODEX)
def test_codex_s_requests_mean_what_is_left_of_them(case: str) -> None:
    body = {"input": [ITEM], "instructions": "Be brief.", "store": False, "max_output_tokens": 6}
    plain = choice_of(responses.RESPONSES, **body)
    choice = choice_of(responses.RESPONSES, **body | {"prompt_cache_key": "k"} | CODEX[case])
    assert choice.prompt == plain.prompt + (plain.prompt[1:] if case == "reasoning item" else [])
    assert {**choice.options, "chat_template_kwargs": 0, "tools": 0, "tool_choice": 0} == {
        **plain.options, "chat_template_kwargs": 0, "tools": 0, "tool_choice": 0
    }  # fmt: skip


def read(**fields: Any) -> ChatRequest:
    return read_request(json.dumps({"model": "m", "messages": HELLO} | fields).encode(), ChatRequest)


def turn(**fields: Any) -> dict[str, Any]:
    found: dict[str, Any] = choices_of_chat(read(messages=[fields, *HELLO]))[0].prompt[0]
    return found


def options(**fields: Any) -> dict[str, Any]:
    return choices_of_chat(read(**fields))[0].options


def test_history_is_read_as_others_write_it() -> None:
    call = {"id": "c", "function": {"name": "f", "arguments": {"a": 1}}, "type": "function", "index": 0.0, "extra": 1}
    for name in ("reasoning_content", "reasoning", "thinking"):
        assert turn(role="assistant", content=None, **{name: "Hm."})["reasoning_content"] == "Hm."
    parts = [
        {"type": "thinking", "thinking": "Hm."},
        {"type": "text", "text": "Yes"},
        {"type": "refusal", "refusal": "."},
    ]
    assert turn(role="assistant", content=parts) == {
        "role": "assistant", "content": "Yes\n.", "reasoning_content": "Hm."
    }  # fmt: skip
    for arguments in ({"a": 1}, '{"a": 1}'):
        call["function"] = {"name": "f", "arguments": arguments}
        made = turn(role="assistant", content=[], tool_calls=[call])["tool_calls"][0]
        assert made["function"] == {"name": "f", "arguments": {"a": 1}}
    call["function"] = {"name": "f"}
    assert turn(role="assistant", tool_calls=[call])["tool_calls"][0]["function"]["arguments"] == {}
    assert turn(role="tool", content=None)["content"] == ""


def test_calls_and_results_of_others_are_read() -> None:
    called = {"name": "f", "arguments": {}}
    for call in (
        {"id": 5, "name": "f", "arguments": "{}"},
        {"id": 5, "type": "function", "function": {"name": "f", "arguments": []}},
    ):
        made = turn(role="assistant", tool_calls=[call])["tool_calls"][0]
        assert (made["id"], made["function"]) == ("5", called)
    custom = turn(role="assistant", tool_calls=[{"type": "custom", "custom": {"name": "f", "input": "x"}}])
    assert custom["tool_calls"][0]["function"]["arguments"] == {"input": "x"}
    for given, content in (({"a": "é"}, '{"a": "é"}'), (5, "5"), ([{"a": 1}], '[{"a": 1}]'), (None, "")):
        assert turn(role="ipython", tool_call_id=5, content=given) == {
            "role": "tool", "tool_call_id": "5", "content": content
        }  # fmt: skip
    unread = [{"type": "redacted_thinking", "data": "x"}, {"type": "text", "text": "a"}]
    assert turn(role="assistant", content=unread)["content"] == "a"
    assert turn(role="system", content=None)["content"] == ""


def test_halves_of_characters_are_no_reason_to_refuse() -> None:
    """As JavaScript writes a text that was cut within a character."""
    for written, content in (
        (r"a\ud83d", "a\ufffd"), (r"\udc4db", "\ufffdb"), (r"\ud83d\udc4d\ud83d", "\U0001f44d\ufffd"),
        (r"\\ud83d\ud83d", r"\ud83d" "\ufffd"),
    ):  # fmt: skip
        body = b'{"messages": [{"role": "user", "content": "%s"}]}' % written.encode()
        assert read_request(body, ChatRequest).messages[0].content == content


@pytest.mark.parametrize(
    ("fields", "near"),
    [({"enable_thinkin": False}, "enable_thinking"), ({"temprature": 0}, "temperature"), ({"topP": 0.5}, "'top_p'")],
)
def test_what_may_be_misspelt_is_refused(fields: dict[str, Any], near: str) -> None:
    with pytest.raises(ApiError, match=near):
        read(**fields)


def test_variables_of_the_template_have_many_names() -> None:
    assert options(chat_template_kwargs={"a": [1]})["chat_template_kwargs"] == {"a": [1]}
    thinks = {"enable_thinking": True, "thinking": True}
    assert options(enable_thinking=True)["chat_template_kwargs"] == thinks
    assert options(thinking={"type": "enabled"})["chat_template_kwargs"] == thinks
    off = {"enable_thinking": False, "thinking": False}
    assert options(thinking={"type": "disabled"})["chat_template_kwargs"] == off
    not_at_all = {"reasoning_effort": "none", **off}
    assert options(reasoning_effort="none")["chat_template_kwargs"] == not_at_all
    assert options(reasoning={"effort": "none"})["chat_template_kwargs"] == not_at_all
    given = options(enable_thinking=True, chat_template_kwargs={"enable_thinking": False})
    assert given["chat_template_kwargs"]["enable_thinking"] is False
    assert options(thinking={"type": "enabled", "budget_tokens": 9})["reasoning_budget"] == 9
    assert options(thinking_budget=7)["reasoning_budget"] == 7
    assert "chat_template_kwargs" not in options()


@pytest.mark.parametrize("case", SHAPED)
def test_other_shapes_mean_the_same(case: str) -> None:
    theirs, ours = SHAPED[case]
    assert options(**theirs) == options(**ours) != options()


def test_other_names_of_other_requests_mean_the_same() -> None:
    for name in ("max_tokens", "max_completion_tokens"):
        assert asked(ResponseRequest, input="a", **{name: 5}) == asked(ResponseRequest, input="a", max_output_tokens=5)
    assert asked(CompletionRequest, prompt="a", logprobs=True) == asked(CompletionRequest, prompt="a", logprobs=1)


def test_items_of_other_tools_are_calls_or_skipped() -> None:
    items = [
        ITEM,
        {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search"}},
        {"type": "custom_tool_call", "call_id": "c1", "name": "apply_patch", "input": "x"},
        {"type": "custom_tool_call_output", "call_id": "c1", "output": "Done."},
        {"type": "local_shell_call", "call_id": "c2", "action": {"command": ["ls"]}, "status": "completed"},
        {"type": "local_shell_call_output", "call_id": "c2", "output": "a.txt"},
        {"type": "apply_patch_call", "call_id": "c3", "operation": {"type": "delete_file"}},
        {"type": "apply_patch_call_output", "call_id": "c3", "output": {"status": "completed"}},
        {"type": "mcp_call", "name": "x"},
    ]
    found = read_request(json.dumps({"model": "m", "input": items, "max_tool_calls": 3}).encode(), ResponseRequest)
    assert isinstance(found.input, list)
    assert [(item.type, item.name, item.arguments, item.output) for item in found.input[1:]] == [
        ("function_call", "apply_patch", '{"input": "x"}', None),
        ("function_call_output", None, None, "Done."),
        ("function_call", "local_shell", '{"action": {"command": ["ls"]}}', None),
        ("function_call_output", None, None, "a.txt"),
        ("function_call", "apply_patch", '{"operation": {"type": "delete_file"}}', None),
        ("function_call_output", None, None, '{"status": "completed"}'),
    ]


def test_pages_of_allowed_origins_may_use_the_server(tiny: Path) -> None:
    mine, other = {"Origin": "http://localhost:3000"}, {"Origin": "http://evil.example"}
    ask = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "content-type"}
    with serving({"tiny": tiny}, Settings(allowed_origins=("http://localhost:3000",), api_key="k")) as live:
        asked = httpx.options(live.url + CHAT, headers=mine | ask)
        assert asked.status_code == 204
        assert asked.headers["Access-Control-Allow-Origin"] == mine["Origin"]
        assert "Content-Type" in asked.headers["Access-Control-Allow-Headers"]
        answer = httpx.get(f"{live.url}/v1/models", headers=mine | {"Authorization": "Bearer k"})
        assert answer.headers["Access-Control-Allow-Origin"] == mine["Origin"]
        assert httpx.get(f"{live.url}/v1/models", headers=mine).status_code == 401
        for answer in (httpx.options(live.url + CHAT, headers=other | ask), httpx.get(live.url, headers=other)):
            assert "Access-Control-Allow-Origin" not in answer.headers
