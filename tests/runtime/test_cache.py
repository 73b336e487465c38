"""The prefix cache in conversations: published tokens are not read again, and nothing else changes."""

import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import outrider
from outrider.bundle import Bundle
from outrider.decoding import row_budget
from outrider.decoding.rereading import Rereading
from outrider.decoding.slots import release
from outrider.testing import FakeBackend, save_toy_bundle
from outrider.types import (
    Chunk,
    Prompt,
    Span,
    TokenSequence,
    answer_keys,
    embed_keys,
    num_common_tokens,
    prompt_keys,
)
from toys import in_threads, load_toy, random_ids

Options = dict[str, Any]


@pytest.fixture(scope="module")
def plain(toy_bundle: Bundle) -> outrider.Engine:
    """An engine that reads every prompt whole, and drafts nothing."""
    return load_toy(toy_bundle, enable_prefix_caching=False, drafter=None)


@pytest.fixture(scope="module")
def engine(toy_bundle: Bundle) -> outrider.Engine:
    """For tests whose prompts begin in other ways than those of the others."""
    return load_toy(toy_bundle)


@pytest.mark.fast_cases(2)
@pytest.mark.every_format
@pytest.mark.parametrize("drafter", ["draft", "suffix", "auto", None])
def test_a_conversation_says_what_it_would_have_said(
    toy_bundle: Bundle, plain: outrider.Engine, drafter: str | None
) -> None:
    engine = load_toy(toy_bundle)
    settings: list[Options] = [{}, {"temperature": 1.5, "seed": 3}]
    for number, options in enumerate(settings):
        text = random_ids(number, 45)
        for turn in range(5):
            asked: Options = {"max_new_tokens": 23, "ignore_eos": True, "logprobs": 3, **options}
            result = engine.generate(text, drafter=drafter, **asked)
            engine.settle()
            expected = plain.generate(text, **asked)
            assert result.token_ids == expected.token_ids
            assert result.logprobs == expected.logprobs  # to the last bit
            assert expected.stats.num_cached_tokens == 0
            # All committed tokens are cached, except the last one, which is not read yet.
            assert result.stats.num_cached_tokens == (len(text) - 8 if turn else 0)
            text = text + result.token_ids + random_ids(turn, 7)
    use = engine.cache["main"]
    assert (use.num_requests, use.num_hits) == (10, 8)


@pytest.mark.slow
def test_a_long_prompt_is_cancelled_between_its_pieces(smollm2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And leaves no trace: its begin, which may be in the cache, has the same answer as where nothing was cancelled."""

    class Cancel(threading.Event):
        """Set when it has been asked a few times: after the first pieces, on a machine of any speed."""

        num_asked = 0

        def is_set(self) -> bool:
            self.num_asked += 1
            return self.num_asked > 3

    monkeypatch.setattr(row_budget, "PIECE_SECONDS", 0.02)
    prompt = random_ids(12, 4000)
    with outrider.load(smollm2, cache_size=0.5, max_num_batched_tokens=4000, drafter=None) as engine:
        cancelled = engine.generate(prompt, max_new_tokens=5, cancel=Cancel())
        assert cancelled.finish_reason == "cancelled"
        again = engine.generate(prompt[:3000], max_new_tokens=5, ignore_eos=True)
        assert 0 < again.stats.num_cached_tokens < 2900
    with outrider.load(smollm2, cache_size=0.5, drafter=None) as engine:
        assert engine.generate(prompt[:3000], max_new_tokens=5, ignore_eos=True).token_ids == again.token_ids


@pytest.mark.fast_cases(1)
@pytest.mark.every_format
@pytest.mark.parametrize("drafter", ["draft", None])
def test_a_cancelled_answer_goes_on_as_it_would_have(
    toy_bundle: Bundle, plain: outrider.Engine, drafter: str | None
) -> None:
    """From the cache, and read again, alone and as a conversation's later turn."""
    engine = load_toy(toy_bundle, drafter=drafter)
    options: Options = {"ignore_eos": True, "logprobs": 3, "temperature": 1.5, "seed": 3}
    prompt = random_ids(5, 70)
    earlier = prompt + plain.generate(prompt, max_new_tokens=20, **options).token_ids + random_ids(6, 40)
    for text, answers in ((prompt, ()), (earlier, ((70, 90),))):
        whole = plain.generate(Prompt(text, answers=answers), max_new_tokens=50, **options)
        assert whole.logprobs
        for cut in (1, 33, 49):
            said = whole.token_ids[:cut]
            continued = Prompt(text + said, answers=(*answers, (len(text), len(text) + cut)))
            for each in (plain, engine, engine):
                rest = each.generate(continued, max_new_tokens=50 - cut, **options)
                assert rest.token_ids == whole.token_ids[cut:]
                assert rest.logprobs == whole.logprobs[cut:]  # to the last bit
            assert rest.stats.num_cached_tokens == len(text) + cut - 1
            again = plain.generate(text + said, max_new_tokens=50 - cut, **options)  # not as an answer
            assert again.stats.num_cached_tokens == 0


def test_a_request_that_comes_meanwhile_takes_what_was_read_again(toy_bundle: Bundle, plain: outrider.Engine) -> None:
    """An ended answer is read again piece by piece, until a request comes. The statistics count requests alone."""
    engine = load_toy(toy_bundle)
    assert engine.main.capabilities.marks_answers == plain.main.capabilities.marks_answers
    prompt = random_ids(7, 40)
    text = prompt + engine.generate(prompt, max_new_tokens=300, ignore_eos=True).token_ids
    while (use := engine.cache["main"]).num_used_tokens == 0 and use.num_published_tokens < 1.5 * len(text):
        time.sleep(0.01)
        if not engine.main.capabilities.marks_answers:
            break
    result = engine.generate([*text, 1], max_new_tokens=20, ignore_eos=True)
    assert result.token_ids == plain.generate([*text, 1], max_new_tokens=20, ignore_eos=True).token_ids
    assert engine.cache["main"].num_requests == 2
    engine.settle()
    assert engine.cache["main"].num_used_tokens == 0
    assert engine.generate([*text, 1, *result.token_ids, 2], max_new_tokens=1).stats.num_cached_tokens == len(text) + 20


def test_an_answer_that_cannot_be_read_again_costs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(FakeBackend):
        def submit(self, chunks: Any) -> Any:
            raise outrider.DeviceError("gone")

    rereading, backend = Rereading(), Broken(16)
    rereading.add(TokenSequence([1, 2, 3, 4], 2))
    assert rereading.is_due
    opened: list[Any] = []
    open_it, backend.open = backend.open, lambda *args: opened.append(open_it(*args)) or opened[-1]  # type: ignore[method-assign, func-returns-value]
    rereading.go_on(backend, lambda: False)
    assert not rereading.is_due
    assert not rereading.has_begun
    assert [slot.closed for slot in opened] == [True]
    assert "could not be read again: DeviceError('gone')" in caplog.text
    backend.open = lambda *_: None
    rereading.add(TokenSequence([1, 2, 3, 4], 2))
    rereading.go_on(backend, lambda: False)  # there is no room
    assert not rereading.is_due


def test_what_cannot_be_published_after_a_second_reading_is_closed(caplog: pytest.LogCaptureFixture) -> None:
    class Full:
        closed = False

        def publish(self, _: Any) -> None:
            raise ZeroDivisionError

        def close(self) -> None:
            self.closed = True

    rereading, slot = Rereading(), Full()
    rereading.add(TokenSequence([1] * 100, 2))
    rereading._slot = slot  # type: ignore[assignment]
    rereading.pause()
    assert slot.closed
    assert not rereading.has_begun
    assert "could not be published: ZeroDivisionError" in caplog.text


def test_what_needs_no_second_reading() -> None:
    rereading = Rereading()
    rereading.add(TokenSequence([1, 2, 3], 3))  # nothing was generated
    rereading.add(TokenSequence([1, 2, 3, 4], 3, answers=((1, 2),)))  # the app says which parts are answers
    assert not rereading.is_due


@pytest.mark.parametrize("answers", [((3, 2),), ((0, 9),), ((0, 2), (1, 3)), ((-1, 2),), (("a", 2),), ((1,),), (5,)])
def test_answers_that_are_no_parts_of_the_prompt(answers: Any) -> None:
    with pytest.raises(outrider.RequestError, match=r"are not parts of a prompt of 5 tokens\. Give each as"):
        Prompt([1, 2, 3, 4, 5], answers=answers)


@pytest.mark.parametrize(("given", "has"), [
    ({"answers": None}, ()),
    ({"answers": []}, ()),
    ({"answers": np.zeros((0, 2), int)}, ()),
    ({"answers": np.array([[1, 3], [3, 4]])}, ((1, 3), (3, 4))),
    ({"answers": (range(i, i + 2) for i in (0, 2))}, ((0, 1), (2, 3))),  # is read once
    ({"answers": [[1, 3]], "scope": None, "embeds": None}, ((1, 3),)),
])  # fmt: skip
def test_a_prompt_takes_parts_in_any_form(given: dict[str, Any], has: tuple[Any, ...]) -> None:
    prompt = Prompt([1, 2, 3, 4, 5], **given)
    assert (prompt.answers, prompt.scope, prompt.embeds) == (has, b"", ())


@pytest.mark.parametrize(("given", "message"), [
    ({"answers": 0}, "answers=0 are not parts"),
    ({"token_ids": None, "answers": [(0, 1)]}, "token_ids=None has no length. Pass a list"),
    ({"scope": "x"}, "scope='x' is not bytes. Pass bytes"),
    ({"embeds": (3,)}, r"embeds=\(3,\) are not a tuple of spans. Pass Span"),
])  # fmt: skip
def test_a_prompt_says_what_is_wrong_with_it(given: dict[str, Any], message: str) -> None:
    with pytest.raises(outrider.RequestError, match=message):
        Prompt(**{"token_ids": [1, 2, 3]} | given)


@pytest.mark.every_format
def test_the_draft_model_takes_up_its_own(toy_bundle: Bundle) -> None:
    engine = load_toy(toy_bundle)
    text = random_ids(0, 100)
    options: Options = {"drafter": "draft", "num_assistant_tokens": 3, "max_new_tokens": 20, "ignore_eos": True}
    first = engine.generate(text, **options)
    engine.generate(text + first.token_ids + [1, 2, 3], **options)
    use = engine.cache["draft"]
    assert (use.num_requests, use.num_hits) == (2, 1)
    assert use.num_cached_tokens >= 100 + 20 - 4  # the last draft's tokens may not have been read


@pytest.mark.every_format
def test_texts_that_part_share_their_beginning(engine: outrider.Engine, plain: outrider.Engine) -> None:
    common = random_ids(1, 77)
    prompts = [common + random_ids(10 + i, 9) for i in range(4)]
    options: Options = {"max_new_tokens": 20, "ignore_eos": True}
    for i, prompt in enumerate((*prompts, *prompts)):
        result = engine.generate(prompt, **options)
        assert result.token_ids == plain.generate(prompt, **options).token_ids
        assert result.stats.num_cached_tokens >= (0 if not i else 77 if i < 4 else len(prompt) - 1)


@pytest.mark.every_format
def test_a_prompt_that_is_there_as_a_whole_has_its_last_token_read(engine: outrider.Engine) -> None:
    for length in (1, 2, 31, 32, 33, 64, 65):
        prompt = random_ids(length, length)
        once, twice = (engine.generate(prompt, max_new_tokens=5, ignore_eos=True) for _ in range(2))
        assert once.token_ids == twice.token_ids
        assert twice.stats.num_cached_tokens == length - 1


@pytest.mark.every_format
def test_requests_that_run_together_share_and_stay_apart(engine: outrider.Engine, plain: outrider.Engine) -> None:
    common = random_ids(5, 70)
    prompts = [common + random_ids(20 + i, 1 + i % 3) for i in range(8)]
    options: Options = {"max_new_tokens": 40, "ignore_eos": True}
    expected = [plain.generate(prompt, **options).token_ids for prompt in prompts]
    stream = engine.stream(prompts[0], **options)
    next(stream)  # it runs, and its prompt is published
    found: dict[int, outrider.Result] = {}

    def ask(i: int) -> None:
        found[i] = engine.generate(prompts[i], **options)

    in_threads(ask, range(1, 8))
    assert [found[i].token_ids for i in range(1, 8)] == expected[1:]
    *_, last = stream
    assert last.result
    assert last.result.token_ids == expected[0]
    assert min(found[i].stats.num_cached_tokens for i in range(1, 8)) >= 64


@pytest.mark.slow
def test_a_cache_for_few_conversations_has_many_and_does_not_grow(toy_bundle: Bundle, plain: outrider.Engine) -> None:
    engine = load_toy(toy_bundle, cache_size=10 * 250 * 256 / 1e9)
    room = engine.cache["main"].num_tokens
    texts = [random_ids(100 + i, 60) for i in range(60)]
    options: Options = {"max_new_tokens": 20, "ignore_eos": True}
    hits = 0
    for i in range(len(texts) + 3):
        if i < len(texts):
            texts[i] += [*engine.generate(texts[i], **options).token_ids, 5, 6]
            engine.settle()
        if i >= 3:
            result = engine.generate(texts[i - 3], **options)
            assert result.token_ids == plain.generate(texts[i - 3], **options).token_ids
            hits += result.stats.num_cached_tokens == len(texts[i - 3]) - 3
            engine.settle()
        use = engine.cache["main"]
        assert use.num_used_tokens == 0
        assert use.num_published_tokens <= use.num_tokens == room
    assert hits >= 56  # on a busy machine, calls that are timed again between two requests may take the room of some
    assert use.num_evicted_tokens > room
    whole = engine.max_tokens - 10  # everything else is evicted for it
    assert len(engine.generate(random_ids(7, 10), max_new_tokens=whole, ignore_eos=True).token_ids) == whole


@pytest.mark.every_format
def test_nothing_unverified_enters(toy_bundle: Bundle) -> None:
    """No text starts from rejected drafts, from tokens after a stop, or from tokens of a failed request."""
    engine, short = load_toy(toy_bundle), load_toy(toy_bundle)
    for seed in range(6):
        prompt = random_ids(seed, 40)
        options: Options = {"num_assistant_tokens": 7, "drafter": "draft", "ignore_eos": True}
        result = engine.generate(prompt, max_new_tokens=30, **options)
        end = next(i for i in range(5, 30) if result.token_ids[i] not in result.token_ids[:i])
        stopped = short.generate(prompt, stop_token_ids=[result.token_ids[end]], **options)
        assert stopped.token_ids == result.token_ids[: end + 1]
        text = prompt + result.token_ids
        engine.settle()
        short.settle()
        # `short` has the answer up to its end, and no token of what its drafts were after it.
        assert short.generate(text, max_new_tokens=1).stats.num_cached_tokens == len(prompt) + end
        wrong = [(token_id + 1) % 39 for token_id in result.token_ids]
        for i in (0, 10, 20):
            other = prompt + result.token_ids[:i] + wrong[i : i + 5]
            assert engine.generate(other, max_new_tokens=1).stats.num_cached_tokens == len(prompt) + i


@pytest.mark.every_format
def test_a_slot_that_is_not_used_takes_nothing_away(engine: outrider.Engine) -> None:
    """As if the main model has room for a request, and its drafter has none."""
    text = random_ids(9, 61)
    engine.generate(text, max_new_tokens=1)
    for _ in range(2):
        slot = engine.main.open(engine.max_tokens, Prompt([*text, 1, 2]))
        assert slot
        assert slot.length == 61
        slot.close()
    assert engine.generate([*text, 1, 2], max_new_tokens=1).stats.num_cached_tokens == 61


def image(begin: int, length: int, key: bytes) -> Span:
    return Span(begin, np.zeros((length, 4), np.float32), key)


# All of these differ in what keys and values would be.
EMBEDDED = [
    (b"", ()),
    (b"image", ()),
    (b"", (image(3, 2, b"cat"),)),
    (b"", (image(3, 2, b"dog"),)),
    (b"", (image(4, 2, b"cat"),)),
    (b"", (image(3, 4, b"cat"),)),
    (b"image", (image(3, 2, b"cat"),)),
    (b"", (image(3, 2, b"cat"), image(9, 2, b"dog"))),
    (b"", (image(3, 2, b"dog"), image(9, 2, b"cat"))),
]


def test_embeds_are_told_apart_where_they_stand(openvino_bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    """What stands before the first difference is shared, in one scope. In the cache only: toys read no embeds."""
    monkeypatch.setattr(Prompt, "check_tokens", lambda *_: None)
    main: Any = load_toy(openvino_bundle, cache_size=0.02).main
    text = random_ids(9, 61)
    keys = [embed_keys(text, embeds) for _, embeds in EMBEDDED]
    published: list[tuple[bytes, list[int]]] = []
    for again in (False, True):
        for (scope, embeds), key in zip(EMBEDDED, keys, strict=True):
            slot = main.open(80, Prompt([*text, 1], scope, embeds))
            known = [num_common_tokens(key, other) for its, other in published if its == scope]
            assert slot.length == max(known, default=0)
            assert (slot.length == 61) == again
            main.submit([Chunk(slot, [*text, 1][slot.length :], 1)]).wait()
            slot.trim(61)
            slot.publish(text)
            slot.close()
            published.append((scope, key))


def test_the_keys_of_embeds_are_no_tokens_and_stay_marked() -> None:
    text, spans = random_ids(3, 20), (image(3, 2, b"cat"), image(9, 4, b"cat"))
    whole = embed_keys(text, spans)
    changed = [i for i in range(20) if whole[i] != text[i]]
    assert changed == [3, 4, 9, 10, 11, 12]
    assert len({whole[i] for i in changed}) == 6
    assert min(whole[i] for i in changed) > 1 << 31
    for begin in range(20):
        assert embed_keys(text[begin : begin + 7], spans, begin) == whole[begin : begin + 7]
    assert prompt_keys(embed_keys(answer_keys(text), spans)) == whole
    assert embed_keys(answer_keys(text), spans) == answer_keys(whole)


@pytest.mark.parametrize("kind", ["openvino", "onnx", "fake"])
def test_embeds_are_refused_and_trees_without_room(tmp_path: Path, kind: Any) -> None:
    """This happens before the slot changes, so it can be used as before."""
    main: Any = FakeBackend(40)
    if kind != "fake":
        main = load_toy(save_toy_bundle(tmp_path / "toy", formats=(kind, kind))).main
    name = type(main).__name__
    message = f"^The prompt has embeds for 2 tokens from token 3 on, and {name} reads token ids only. Pass a prompt "
    with pytest.raises(outrider.RequestError, match=message):
        main.open(80, Prompt([1] * 9, embeds=(image(3, 2, b"cat"),)))
    slot = main.open(80)
    refused = {
        "openvino": r"^A chunk of 3 tokens is a tree of 2 branches .*, and its slot has room for 1\. Call the",
        "onnx": rf"^A chunk of 3 tokens is a tree \(parents=\[-1, -1\]\), and {name} evaluates chains only. Submit ",
    }.get(kind)
    if refused:
        with pytest.raises(outrider.RequestError, match=refused):
            main.submit([Chunk(slot, [1, 2, 3], 3, parents=[-1, -1])])
    assert slot.length == 0
    main.submit([Chunk(slot, [1, 2, 3], 3)]).wait()
    assert slot.length == 3
    slot.close()


def test_embeds_need_a_key() -> None:
    with pytest.raises(outrider.RequestError, match=r"^The span of embeds at token 3 has key=b'', .* Give it a key"):
        image(3, 2, b"")


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("cache_size", [5e-324, 1e-12, 1e-6])
def test_a_cache_that_is_too_small_to_begin_with(toy_bundle: Bundle, cache_size: float) -> None:
    message = rf"^cache_size={cache_size:g} GB holds \d tokens; an engine needs room for \d+. Raise cache_size"
    with pytest.raises(outrider.OptionError, match=message) as error:
        load_toy(toy_bundle, cache_size=cache_size)
    needed = float(str(error.value).split("at least ")[1].rstrip("."))
    assert load_toy(toy_bundle, cache_size=needed).generate("hello", max_new_tokens=1)
    with pytest.raises(outrider.OptionError):
        load_toy(toy_bundle, cache_size=needed * 0.93)


def test_the_cache_is_split_by_bytes_per_token(tmp_path: Path) -> None:
    bundle = save_toy_bundle(tmp_path / "b")
    engine = load_toy(bundle, cache_size=0.00123)
    uses = engine.cache.values()
    assert len({use.num_tokens for use in uses}) == 1
    assert 0.95 * 0.00123e9 < sum(use.num_bytes for use in uses) <= 0.00123e9


@pytest.mark.parametrize("error", [None, outrider.DeviceError("the call failed")])
def test_an_answer_that_has_failed_leaves_nothing_to_later_ones(error: Exception | None) -> None:
    left: list[Any] = []
    slot = SimpleNamespace(publish=left.append, close=lambda: left.append("closed"))
    request = SimpleNamespace(policy=None, reuse=True)
    answer: Any = SimpleNamespace(request=request, slot=slot, sequence=TokenSequence([1, 2], 1), error=error)
    release(answer)
    assert left == ([[1, 2]] if error is None else []) + ["closed"]
