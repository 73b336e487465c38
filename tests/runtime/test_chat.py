"""Conversations: turns, forks, rewinding, retrying and cancelling give the text of one-shot prompts."""

import random
import threading
from collections.abc import Iterator
from typing import Any

import pytest

import outrider
from outrider.bundle import Bundle
from outrider.engine.chat.turn import TurnLayout
from outrider.testing import ToyTokenizer
from outrider.types import Draft, Drafter, Prompt
from watching import AfterCalls, Watcher, chat_engine, watched

pytestmark = pytest.mark.any_format

WORDS = ("hello there", "the same the same the same", "9 8 7 6", "why not")
SAMPLED: dict[str, Any] = {"temperature": 0.8, "seed": 5}
DRAFTED: list[dict[str, Any]] = [
    {"drafter": None},
    {"drafter": "auto"},
    {"drafter": "draft", "num_assistant_tokens": 3},
    {"drafter": "suffix"},
]


@pytest.fixture(scope="module")
def engine(toy_bundle: Bundle) -> Iterator[outrider.Engine]:
    with chat_engine(toy_bundle) as engine:
        yield engine


@pytest.fixture(scope="module")
def plain(toy_bundle: Bundle) -> Iterator[outrider.Engine]:
    """Answers prompts without drafts and without a prefix cache."""
    with chat_engine(toy_bundle, enable_prefix_caching=False, drafter=None) as engine:
        yield engine


def in_one_shot(plain: outrider.Engine, chat: outrider.Chat, **options: Any) -> list[int]:
    """The answer to the same messages as the last turn's, as one prompt that is tokenized whole."""
    *messages, _ = chat.messages
    return plain.generate(messages, **options).token_ids


@pytest.mark.parametrize("sampled", [{}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("drafted", DRAFTED, ids=lambda each: str(each["drafter"]))
def test_turns_are_the_answers_to_their_messages(
    engine: outrider.Engine, plain: outrider.Engine, drafted: dict[str, Any], sampled: dict[str, Any]
) -> None:
    options = {"max_new_tokens": 24, **sampled}
    chat = engine.chat("be kind", **options, **drafted)
    num_cached, reasons = [], set()
    for words in WORDS:
        before = len(chat.token_ids)
        result = chat.send(words)
        assert result.token_ids == in_one_shot(plain, chat, **options)
        assert chat.messages[-1] == {"role": "assistant", "content": result.text}
        num_cached.append((result.stats.num_cached_tokens, before))
        reasons.add(result.finish_reason)
    assert all(cached >= before - 32 for cached, before in num_cached[1:])
    assert len(chat.turns) == 4
    assert chat.turns[-1].text == result.text


def test_generated_ids_are_kept_though_the_text_has_others(engine: outrider.Engine) -> None:
    """With "\\0" in the middle, which is no text: tokenized again, the answer would be shorter."""
    chat = engine.chat(max_new_tokens=40, ignore_eos=True, temperature=3.0, seed=2, logit_bias={39: 5.0})
    result = chat.send("hello")
    assert 39 in result.token_ids[:-1]
    chat.send("go on")
    prompt, (begin, end) = chat.turns[0], chat.turns[1].answers[0]
    assert list(chat.turns[1].token_ids[begin:end]) == result.token_ids
    assert chat.turns[1].token_ids[: len(prompt.token_ids)] == prompt.token_ids


def test_the_end_token_is_written_once(engine: outrider.Engine) -> None:
    chat = engine.chat(max_new_tokens=200)
    assert chat.send("hello there").finish_reason == "stop"
    chat.send("go on", max_new_tokens=1)
    tokenizer: Any = engine.tokenizer
    assert chat.turns[1].token_ids[:-1] == tuple(tokenizer.encode(tokenizer.render(chat.messages[:-1])))


def test_messages_that_the_app_changes_later_are_kept_as_they_were(engine: outrider.Engine) -> None:
    message = {"role": "user", "content": "hello"}
    chat = engine.chat(messages=[message], max_new_tokens=5)
    chat.send(message)
    message["content"] = "changed"
    assert [each["content"] for each in chat.messages[:2]] == ["hello", "hello"]


def test_forks_go_on_apart(engine: outrider.Engine) -> None:
    first = engine.chat("be kind", max_new_tokens=24)
    first.send("hello")
    second = first.fork()
    answers = [first.send("the same").text, second.send("9 8 7").text, first.send("why").text, second.send("why").text]
    alone = []
    for words in ("the same", "9 8 7"):
        chat = engine.chat("be kind", max_new_tokens=24)
        chat.send("hello")
        alone.append([chat.send(words).text, chat.send("why").text])
    assert [[answers[0], answers[2]], [answers[1], answers[3]]] == alone
    assert first.messages[:3] == second.messages[:3]


def test_a_rewound_chat_answers_as_before(engine: outrider.Engine) -> None:
    chat = engine.chat("be kind", max_new_tokens=24)
    for words in WORDS:
        chat.send(words)
    turns = chat.turns
    assert chat.rewind() == ({"role": "user", "content": WORDS[3]},)
    assert chat.rewind(2) == ({"role": "user", "content": WORDS[1]},)
    assert chat.turns == turns[:1]
    for words in WORDS[1:]:
        chat.send(words)
    assert chat.turns == turns
    chat.send(chat.rewind())
    assert chat.turns == turns
    chat.rewind(4)
    assert chat.token_ids == []
    wrongs: list[Any] = [0, -1, 1, "all"]
    for wrong in wrongs:
        with pytest.raises(outrider.RequestError, match="This chat has no turn yet"):
            chat.rewind(wrong)
    chat.send("hello")
    with pytest.raises(outrider.RequestError, match="turns=2 is not a number of turns of this chat, which has 1"):
        chat.rewind(2)


def test_the_same_seed_gives_the_same_text_again(engine: outrider.Engine) -> None:
    chat = engine.chat(max_new_tokens=24, temperature=1.0)
    chat.send("hello")
    first = chat.send("the same")
    seed, turns = chat.turns[-1].seed, chat.turns
    assert seed == first.seed is not None
    others = {chat.retry().text for _ in range(5)}
    assert len(others) > 1  # other seeds
    again = chat.retry(seed=seed, drafter=None)
    assert again.token_ids == first.token_ids
    assert chat.turns == turns
    seeded = chat.send("why", seed=3)
    assert {chat.retry().text for _ in range(5)} != {seeded.text}  # the seed is not kept
    assert chat.retry(seed=3).text == seeded.text
    with pytest.raises(outrider.OptionError, match="no_such"):
        chat.retry(no_such=1)  # type: ignore[call-arg]
    assert chat.turns[-1].text == seeded.text
    with pytest.raises(outrider.RequestError, match="no turn yet"):
        engine.chat().retry()


def test_a_retry_keeps_the_options_of_its_answer(engine: outrider.Engine) -> None:
    chat = engine.chat(max_new_tokens=24)
    chat.send("hello", max_new_tokens=3, ignore_eos=True)
    assert len(chat.retry().token_ids) == 3


def test_an_answer_that_was_cut_goes_on(engine: outrider.Engine) -> None:
    whole = engine.chat(max_new_tokens=12, ignore_eos=True)
    whole.send("hello")
    chat = engine.chat(ignore_eos=True)
    chat.send("hello", max_new_tokens=5)
    added = list(chat.go_on(max_new_tokens=7))
    assert added[-1].result is not None
    assert len(added[-1].result.token_ids) == 7
    (turn,), (expected,) = chat.turns, whole.turns
    assert (turn.text, turn.token_ids, turn.answers) == (expected.text, expected.token_ids, expected.answers)
    assert chat.send("why", max_new_tokens=4).text == whole.send("why", max_new_tokens=4).text
    with pytest.raises(outrider.RequestError, match="no turn yet"):
        list(engine.chat().go_on())


def test_a_closed_stream_leaves_what_it_gave_out(engine: outrider.Engine, plain: outrider.Engine) -> None:
    chat = engine.chat(max_new_tokens=200, ignore_eos=True)
    stream = chat.stream("hello")
    given = [next(stream), next(stream), next(stream)]
    with pytest.raises(outrider.RequestError, match="This chat is giving an answer"):
        chat.send("why")
    with pytest.raises(outrider.RequestError, match="This chat is giving an answer"):
        chat.rewind()
    assert chat.fork().turns == ()
    stream.close()
    (turn,) = chat.turns
    assert turn.finish_reason == "cancelled"
    assert turn.text == "".join(chunk.text for chunk in given)
    said = tuple(token.token_id for chunk in given for token in chunk.tokens)
    assert turn.answer_token_ids == (said[:-1] if said[-1] == 39 else said)
    chat.send("why", max_new_tokens=10, ignore_eos=False)
    unread = chat.stream("not this")
    unread.close()  # before it began
    assert len(chat.turns) == 2


def test_an_error_leaves_the_conversation_as_it_was(engine: outrider.Engine) -> None:
    chat = engine.chat(max_new_tokens=10)
    chat.send("hello")
    turns = chat.turns
    with pytest.raises(outrider.RequestError, match="too long|holds|context"):
        chat.send("a" * 5000)
    with pytest.raises(outrider.OptionError, match="no_such"):
        list(chat.stream("hello", no_such=3))  # type: ignore[call-arg]
    empties: list[Any] = ["  ", []]
    for empty in empties:
        with pytest.raises(outrider.RequestError, match="empty|no message"):
            chat.send(empty)
    with pytest.raises(outrider.OptionError, match=r"Call chat.cancel\(\)"):
        chat.send("hello", cancel=threading.Event())  # type: ignore[call-arg]
    assert chat.turns == turns
    assert chat.cancel() is False
    chat.send("go on")


def test_an_answer_that_fails_half_way_is_no_turn(engine: outrider.Engine) -> None:
    class FailingLater(Drafter):
        num_assistant_tokens = 2

        def propose(self, requests: Any) -> list[Draft]:
            if len(requests[0].sequence) > requests[0].sequence.num_prompt_tokens + 10:
                raise ValueError("no draft any more")
            return [Draft([]) for _ in requests]

    engine.add_drafter("failing later", FailingLater())
    chat = engine.chat(max_new_tokens=40, ignore_eos=True)
    chat.send("hello")
    turns, stream = chat.turns, chat.stream("why", drafter="failing later")
    assert next(stream).tokens
    with pytest.raises(ValueError, match="no draft any more"):
        list(stream)
    assert chat.turns == turns
    chat.send("go on")


def test_options_are_checked_at_once(engine: outrider.Engine, openvino_engine: outrider.Engine) -> None:
    with pytest.raises(outrider.OptionError, match="temprature"):
        engine.chat(temprature=1.0)
    with pytest.raises(outrider.OptionError, match="has no chat template, and a chat needs one"):
        openvino_engine.chat()


def test_cancelled_at_any_moment_it_goes_on_exactly(engine: outrider.Engine, plain: outrider.Engine) -> None:
    """In the middle of prompts, which take ten calls here, and of answers."""
    rng = random.Random(11)
    chat = engine.chat("be kind", max_new_tokens=40)
    ended_at = []
    for i in range(20):
        words = f"{i} " + "".join(rng.choices("abcdefgh ", k=300))
        watcher = AfterCalls(rng.randrange(1, 40), chat.cancel)
        with watched(engine, watcher):
            cancelled = chat.send(words)
        for thread in watcher.threads:
            thread.join()
        ended_at.append((cancelled.finish_reason, len(cancelled.token_ids)))
        assert chat.turns[-1].finish_reason == cancelled.finish_reason
        expected = plain.generate([*chat.messages[:-1]], max_new_tokens=40)
        assert expected.token_ids[: len(cancelled.token_ids)] == cancelled.token_ids
        assert chat.retry().token_ids == expected.token_ids
        if i % 3:
            chat.rewind()
        elif len(chat.token_ids) > 1000:
            chat.rewind(len(chat.turns))
    assert {("cancelled", True), ("cancelled", False)} <= {(reason, count > 0) for reason, count in ended_at}


def test_a_prompt_is_read_no_further_than_the_running_call(toy_bundle: Bundle) -> None:
    class InCall(Watcher):
        num_calls = 0

        def called(self, call: Any) -> None:
            self.num_calls += 1
            if self.num_calls == 3:
                assert chat.cancel()

    with chat_engine(toy_bundle) as engine:
        chat, watcher = engine.chat(max_new_tokens=40, drafter=None), InCall()
        with watched(engine, watcher):
            result = chat.send("abc " * 80)
        assert (watcher.num_calls, result.finish_reason, result.token_ids) == (3, "cancelled", [])
        assert chat.retry().stats.num_cached_tokens >= 32  # what was read is not read again


def test_cancelled_before_it_began(engine: outrider.Engine) -> None:
    class Made(Watcher):
        def entered(self, request: Any, drafter: str | None) -> None:
            assert chat.cancel()

    chat = engine.chat(max_new_tokens=20)
    with watched(engine, Made()):
        result = chat.send("hello")
    assert (result.finish_reason, result.text, result.token_ids) == ("cancelled", "", [])
    assert chat.retry().token_ids == engine.generate("hello", max_new_tokens=20, drafter=None).token_ids
    assert chat.cancel() is False


def test_an_answer_that_was_cut_within_a_character_goes_on_before_it() -> None:
    tokenizer = ToyTokenizer(chat=True)
    layout = TurnLayout(tokenizer, (), (), {0})
    *cut, _ = tokenizer.encode("hé")
    turn = layout.turn((), Prompt([1, 2]), "h", cut, finish_reason="length")
    assert turn.answer_token_ids == tuple(tokenizer.encode("h"))
    assert layout.prompt_within(turn).token_ids == [1, 2, *tokenizer.encode("h")]
