"""/v1/responses through the official client."""

import json
from typing import Any

import httpx
import openai
import pytest

import outrider
from outrider.server import Settings
from outrider.server.conversations import Conversations
from outrider.server.errors import ApiError
from outrider.server.logprobs import LocatedLogprobs, TokenTexts
from outrider.server.responses import RESPONSES
from outrider.testing import ToyTokenizer
from outrider.types import TokenLogprobs
from serving import MESSAGES, Live, choice_of, serving

SAMPLED: dict[str, Any] = {"temperature": 1, "extra_body": {"seed": 3}}


def test_a_text_is_answered_as_by_the_engine(client: Any, engine: outrider.Engine) -> None:
    answer = client.responses.create(
        model="tiny", input="Why is the sky blue?", instructions="Be brief.", max_output_tokens=30, temperature=0
    )
    result = engine.generate(MESSAGES, max_new_tokens=30)
    assert answer.output_text == result.text
    assert answer.status == ("incomplete" if result.finish_reason == "length" else "completed")
    assert (answer.object, answer.instructions, answer.max_output_tokens) == ("response", "Be brief.", 30)
    assert answer.output[0].content[0].annotations == []
    assert answer.usage.input_tokens == result.stats.num_prompt_tokens
    assert answer.usage.output_tokens == len(result.token_ids)
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens
    assert answer.timings["predicted_n"] == len(result.token_ids)


def test_a_stream_has_the_official_events(client: Any, live: Live) -> None:
    asked: dict[str, Any] = {"model": "tiny", "input": "Why?", "temperature": 1, "extra_body": {"seed": 3}}
    whole = client.responses.create(**asked)
    events = list(client.responses.create(**asked, stream=True))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert len(deltas) > 4
    assert events[-1].type == f"response.{whole.status}"
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(deltas) == whole.output_text == events[-4].text == events[-1].response.output_text
    assert events[-1].response.usage == whole.usage or events[-1].response.usage.output_tokens
    assert events[0].response.id == events[-1].response.id
    with client.responses.stream(**asked) as stream:  # the client's own accumulation of events
        for _ in stream:
            pass
        if whole.status == "completed":
            assert stream.get_final_response().output_text == whole.output_text
    text = httpx.post(f"{live.url}/v1/responses", json={"model": "tiny", "input": "Why?", "stream": True}).text
    for name, data in (each.split("\n") for each in text.strip().split("\n\n")):
        assert name == f"event: {json.loads(data.removeprefix('data: '))['type']}"


def test_a_conversation_goes_on(client: Any, engine: outrider.Engine) -> None:
    first = client.responses.create(model="tiny", input="Hi", instructions="Be brief.", max_output_tokens=9)
    second = client.responses.create(
        model="tiny", input="And?", instructions="Be kind.", previous_response_id=first.id, max_output_tokens=9
    )
    *_, last = client.responses.create(
        model="tiny", input="So?", previous_response_id=second.id, max_output_tokens=9, stream=True
    )
    aside = client.responses.create(model="tiny", input="Or?", previous_response_id=first.id, max_output_tokens=9)
    talk = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": first.output_text}]
    kind = {"role": "system", "content": "Be kind."}
    expected = engine.generate([kind, *talk, {"role": "user", "content": "And?"}], max_new_tokens=9)
    assert second.output_text == expected.text
    more = [{"role": "user", "content": "And?"}, {"role": "assistant", "content": second.output_text}]
    expected = engine.generate([*talk, *more, {"role": "user", "content": "So?"}], max_new_tokens=9)
    assert last.response.output_text == expected.text
    assert last.response.previous_response_id == second.id
    expected = engine.generate([*talk, {"role": "user", "content": "Or?"}], max_new_tokens=9)
    assert aside.output_text == expected.text
    again = client.responses.create(model="tiny", input="X", previous_response_id=last.response.id)
    assert again.usage.input_tokens > last.response.usage.input_tokens


def test_what_is_not_stored_is_refused(client: Any) -> None:
    hidden = client.responses.create(model="tiny", input="Hi", store=False, max_output_tokens=2)
    assert hidden.store is False
    for name in (hidden.id, "resp_nothing"):
        with pytest.raises(openai.BadRequestError, match="no longer stored") as raised:
            client.responses.create(model="tiny", input="Hi", previous_response_id=name)
        assert (raised.value.param, raised.value.code) == ("previous_response_id", "previous_response_not_found")


def test_a_stored_answer_is_read_and_deleted(client: Any) -> None:
    """With all that it follows, page by page, as the official client asks for them."""
    first = client.responses.create(model="tiny", input="Hi", max_output_tokens=3)
    given = [{"role": "user", "content": [{"type": "input_text", "text": "And?"}]}, {"role": "user", "content": "So?"}]
    second = client.responses.create(
        model="tiny", input=given, previous_response_id=first.id, max_output_tokens=3, top_p=0.5
    )
    assert client.responses.retrieve(second.id).to_dict() == second.to_dict()
    listed = client.responses.input_items.list
    texts = ["Hi", first.output_text, "And?", "So?"]
    everything = list(listed(second.id, order="asc", limit=1))  # the client turns the pages
    assert [item.content[0].text for item in everything] == texts
    assert [item.role for item in everything] == ["user", "assistant", "user", "user"]
    assert everything[1].to_dict() == first.output[0].to_dict()
    assert [item.content[0].text for item in listed(second.id)] == texts[::-1]
    page = listed(second.id, limit=2)
    assert (page.has_more, page.data) == (True, everything[:1:-1])
    assert (page.first_id, page.last_id) == (everything[3].id, everything[2].id)
    again = client.responses.create(
        model="tiny", input=[{"type": "item_reference", "id": everything[0].id}], max_output_tokens=3
    )
    assert again.output_text == first.output_text
    client.responses.delete(first.id)
    assert len(list(listed(second.id))) == 4
    client.responses.create(model="tiny", input="Go on.", previous_response_id=second.id, max_output_tokens=1)
    for ask in (client.responses.retrieve, client.responses.delete, listed):
        with pytest.raises(openai.NotFoundError, match="no longer stored") as raised:
            ask(first.id)
        assert raised.value.code == "response_not_found"


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("?stream=true", "'stream'"), ("/input_items?limit=0", "'limit'"), ("/input_items?limit=x", "'limit'"),
        ("/input_items?order=up", "'order'"), ("/input_items?before=msg_1", "'before'"),
        ("/input_items?after=msg_1", "No item before"),
    ],
)  # fmt: skip
def test_what_a_stored_answer_has_not_is_refused(client: Any, live: Live, path: str, said: str) -> None:
    answer = client.responses.create(model="tiny", input="Hi", max_output_tokens=1)
    refused = httpx.get(f"{live.url}/v1/responses/{answer.id}{path}")
    assert (refused.status_code, said.strip("'") in refused.json()["error"]["message"]) == (400, True)


def test_a_text_has_the_log_probabilities_of_its_tokens(client: Any, engine: outrider.Engine) -> None:
    result = engine.generate([{"role": "user", "content": "Why?"}], max_new_tokens=20, logprobs=2)
    asked: dict[str, Any] = {"model": "tiny", "input": "Why?", "max_output_tokens": 20, "top_logprobs": 2}
    wanted = {"include": ["message.output_text.logprobs", "reasoning.encrypted_content"]}
    whole = client.responses.create(**asked, **wanted)
    (part,) = whole.output[0].content
    assert b"".join(bytes(token.bytes) for token in part.logprobs).decode(errors="replace") == whole.output_text
    expected = [each.logprob for each in result.logprobs or ()]
    assert [token.logprob for token in part.logprobs] == expected[: len(part.logprobs)]
    assert all(len(token.top_logprobs) == 2 for token in part.logprobs)
    events = list(client.responses.create(**asked, **wanted, stream=True))
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    streamed = [token for event in deltas for token in event.logprobs]
    assert [token.to_dict() for token in streamed] == [token.to_dict() for token in part.logprobs]
    assert len([event for event in deltas if event.logprobs]) > 1
    (done,) = [event for event in events if event.type == "response.output_text.done"]
    assert [token.to_dict() for token in done.logprobs] == [token.to_dict() for token in part.logprobs]
    assert client.responses.create(**asked).output[0].content[0].logprobs == []  # as OpenAI's, without `include`


def test_tokens_are_those_of_the_piece_that_they_are_in() -> None:
    """Reasoning and calls have none, a token across the end of both is the text's, and markers may be tokens."""
    pieces = {
        1: "Hm. ", 2: "</think>", 3: "\n\nSo ", 4: "it", 5: " is.", 6: "<tool>", 7: '{"so": "it is."}', 8: " it is.",
    }  # fmt: skip
    tokens = [TokenLogprobs(each, -float(each), ()) for each in (*pieces, 9)]
    texts = TokenTexts(ToyTokenizer())
    texts._known = {**pieces, 2: "", 6: "", 9: ""}
    raw = "".join(pieces.values())
    for size in (3, len(raw)):
        located = LocatedLogprobs(texts, {2: "</think>", 6: "<tool>"})
        for i in range(0, len(raw), size):
            located.read(raw[i : i + size], [] if i else tokens)
        found = [located.of(each) for each in ("Hm.", "So ", "it is.", '{"so": "it is."}', " it is.", "")]
        assert [[-each["logprob"] for each in piece] for piece in found] == [[1], [3], [4, 5], [7], [8], []]
    located = LocatedLogprobs(texts, {})
    located.read("it is.", [TokenLogprobs(8, -8.0, ())])  # as tokenizers do that leave out the first blank
    assert len(located.of("it ")) == 1


def test_an_id_that_a_client_chose_is_no_address_of_what_it_sent(client: Any) -> None:
    """Clients choose the same ones, and one must not get what another has said."""
    said = {"type": "message", "role": "user", "content": "A secret.", "id": "msg_1"}
    client.responses.create(model="tiny", input=[said], max_output_tokens=1)
    with pytest.raises(openai.BadRequestError, match="no item 'msg_1'"):
        client.responses.create(model="tiny", input=[{"type": "item_reference", "id": "msg_1"}])


def test_stored_conversations_are_bounded() -> None:
    conversations = Conversations(100)
    turns = [{"role": "user", "content": "x" * 10}]
    for i in range(9):
        conversations.add(f"resp_{i}", turns)
        conversations.turns("resp_0")
    with pytest.raises(ApiError):
        conversations.turns("resp_6")
    assert conversations.turns("resp_8") == conversations.turns("resp_0") == turns
    conversations.add("large", turns * 20)
    with pytest.raises(ApiError, match="no longer stored"):
        conversations.turns("large")
    assert conversations.turns("resp_8") == turns  # what is too large costs no other its place


WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"input": []}, "input", "length >= 1"),
    ({"background": True}, "background", "not supported"),
    ({"input": [{"type": "item_reference", "id": "m"}]}, "input[0].id", "Send the item itself"),
    ({"echo": True}, "echo", "not supported"),
    ({"input": [{"role": "user"}]}, "input[0].content", "A message needs content"),
    ({"input": [{"role": "user", "content": "a", "output": "b"}]}, "input[0].output", "has no"),
    ({"input": [{"type": "function_call_output", "call_id": "x", "output": "y"}]}, "input[0].call_id",
     "No call before this output"),
    ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input[0].content[0].type", "input_file"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].image_url",
     "needs image_url"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "file-1"}]}]},
     "input[0].content[0].file_id", "No files are stored here"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:,", "detail": "some"}]}]},
     "input[0].content[0].detail", "some"),
    ({"text": {"format": {"type": "json_schema", "schema": {"type": "nothing"}, "strict": True}}},
     "text.format.schema", "cannot be followed"),
]  # fmt: skip


@pytest.mark.parametrize(("asked", "param", "says"), WRONG, ids=lambda given: str(given)[:40])
def test_errors_name_the_field(asked: dict[str, Any], param: str, says: str) -> None:
    with pytest.raises(ApiError, match=says) as raised:
        choice_of(RESPONSES, **{"input": "Hi"} | asked)
    assert (raised.value.status, raised.value.body.error.param) == (400, param)


def test_a_stream_that_fails_says_so(live: Live) -> None:
    body = {"model": "tiny", "input": "Hi", "stream": True, "max_output_tokens": 6000, "ignore_eos": True}
    service = live.service
    with serving({"tiny": service.models.find("tiny").bundle.folder}, Settings(request_seconds=0.3)) as short:
        short.service.models.find("tiny").load()
        events = list(short.client().responses.create(model="tiny", input="Hi", stream=True, extra_body=body))
    assert events[-1].type == "error"
    assert events[-1].code == "timeout"
    assert events[-1].sequence_number == len(events) - 1


def test_a_conversation_is_counted_with_what_it_follows() -> None:
    kept = Conversations(max_size=1_250)
    turns = [{"role": "user", "content": "x" * 100}]
    kept.add("0", turns)
    for i in range(1, 4):
        turns = [*turns, {"role": "user", "content": "x" * 100}]
        kept.add(str(i), turns, str(i - 1))
    sizes = [len(json.dumps(turns[: i + 1])) for i in range(4)]
    assert sum(sizes[1:]) < 1_250 < sum(sizes)
    assert len(kept.turns("3")) == 4
    with pytest.raises(ApiError, match="no longer stored"):
        kept.turns("0")
