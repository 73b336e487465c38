"""The prefix cache in conversations: published tokens are not read again, and nothing else changes."""

import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import outrider
from outrider.bundle import Bundle
from outrider.decoding.slots import release
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


@pytest.mark.parametrize("error", [None, outrider.DeviceError("the call failed")])
def test_an_answer_that_has_failed_leaves_nothing_to_later_ones(error: Exception | None) -> None:
    left: list[Any] = []
    slot = SimpleNamespace(publish=left.append, close=lambda: left.append("closed"))
    request = SimpleNamespace(policy=None, reuse=True)
    answer: Any = SimpleNamespace(request=request, slot=slot, sequence=TokenSequence([1, 2], 1), error=error)
    release(answer)
    assert left == ([[1, 2]] if error is None else []) + ["closed"]
