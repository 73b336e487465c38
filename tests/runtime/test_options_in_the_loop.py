"""All processors and logprobs, with the real loop and a real backend: answers do not depend on drafts."""

import itertools
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import outrider
from calls import rows_of_call
from outrider.testing import TOY_ALPHABET, ToyTokenizer
from outrider.tokens.sampling import LogitsSampler
from outrider.types import Chunk, LogitsRow, TokenLogprobs

pytestmark = pytest.mark.any_format

VOCAB_SIZE, EOS = len(TOY_ALPHABET), ToyTokenizer.eos_token_id
token_ids = st.integers(0, VOCAB_SIZE - 1)
options_of_requests = st.fixed_dictionaries(
    {"max_new_tokens": st.integers(12, 30)},
    optional={
        "logit_bias": st.dictionaries(token_ids, st.floats(-10, 10), max_size=4),
        "repetition_penalty": st.just(1.3),
        "presence_penalty": st.just(0.5),
        "frequency_penalty": st.just(0.3),
        "no_repeat_ngram_size": st.integers(1, 3),
        "min_new_tokens": st.integers(1, 12),
        "banned_token_ids": st.lists(token_ids, max_size=30),
        "stop_token_ids": st.lists(token_ids, max_size=3),
        "stop": st.lists(st.text("abcdef", min_size=1, max_size=1), max_size=2),
        "ignore_eos": st.just(True),
        "logprobs": st.integers(0, 3),
    },
)
samplings: st.SearchStrategy[dict[str, Any]] = st.one_of(
    st.just({}),
    st.fixed_dictionaries(
        {"temperature": st.sampled_from([0.5, 1.0, 2.0]), "seed": st.integers(0, 5)},
        optional={"top_k": st.just(10), "top_p": st.just(0.9), "min_p": st.just(0.05), "typical_p": st.just(0.7)},
    ),
)
drafters = st.tuples(st.sampled_from(["draft", "ngram", "suffix"]), st.integers(1, 9))


def answer(engine: outrider.Engine, prompt: str, options: dict[str, Any]) -> Any:
    """The parts of a result that must not depend on drafts."""
    try:
        result = engine.generate(prompt, **options)
    except outrider.NoTokenLeft as error:
        return str(error)
    return result.text, result.token_ids, result.finish_reason, result.logprobs


@settings(max_examples=150)
@given(
    st.text("abcdef", min_size=1, max_size=30),
    options_of_requests,
    samplings,
    st.booleans(),
    st.lists(drafters, min_size=2, max_size=2),
)
def test_drafts_do_not_show(
    toy_engine: outrider.Engine,
    prompt: str,
    options: dict[str, Any],
    sampling: dict[str, Any],
    processed: bool,
    drafters: list[tuple[str, int]],
) -> None:
    """Drafts change neither tokens, nor a bit of a logprob, nor the position where the options leave no token."""
    options = options | sampling | ({"logprobs_of": "processed"} if processed and "logprobs" in options else {})
    plain = answer(toy_engine, prompt, options | {"drafter": None})
    for drafter, n in drafters:
        assert answer(toy_engine, prompt, options | {"drafter": drafter, "num_assistant_tokens": n}) == plain


def test_a_request_without_a_token_left_fails_alone(toy_engine: outrider.Engine) -> None:
    stream = toy_engine.stream("hello", max_new_tokens=20, ignore_eos=True)
    text = next(stream).text
    with pytest.raises(outrider.NoTokenLeft):
        toy_engine.generate("abc", banned_token_ids=list(range(VOCAB_SIZE)))
    text += "".join(chunk.text for chunk in stream)
    assert text == toy_engine.generate("hello", max_new_tokens=20, ignore_eos=True).text


def test_each_option_is_heard(toy_engine: outrider.Engine) -> None:
    options: dict[str, Any] = {"max_new_tokens": 40, "ignore_eos": True}
    plain = toy_engine.generate("hello", **options).token_ids
    banned = sorted(set(plain))[:3]
    assert not set(banned) & set(toy_engine.generate("hello", **options, banned_token_ids=banned).token_ids)
    assert set(toy_engine.generate("hello", **options, logit_bias={"7": 100}).token_ids) == {7}  # type: ignore[dict-item]
    varied = toy_engine.generate("hello", **options, no_repeat_ngram_size=2).token_ids
    text = [*ToyTokenizer().encode_prompt("hello"), *varied]
    assert len(set(itertools.pairwise(text))) == len(text) - 1
    for end in ({"ignore_eos": False}, {"stop_token_ids": [plain[3]]}):
        asked = options | {"min_new_tokens": 15} | end
        ends = {EOS} if "stop_token_ids" not in end else {plain[3]}
        result = toy_engine.generate("hello", **asked, logit_bias=dict.fromkeys(ends, 100))
        assert not ends & set(result.token_ids[:15])
        assert result.token_ids[15:] == list(ends)
    stop = TOY_ALPHABET[plain[3]]
    assert toy_engine.generate("hello", **options, min_new_tokens=15, stop=stop).finish_reason == "stop"


@pytest.mark.parametrize("name", ["stop_token_ids", "banned_token_ids", "logit_bias"])
def test_ids_outside_the_vocabulary_are_refused(toy_engine: outrider.Engine, name: str) -> None:
    value: Any = {VOCAB_SIZE: 1.0} if name == "logit_bias" else [3, VOCAB_SIZE]
    with pytest.raises(outrider.OptionError, match=f"{name} has token id 40; the vocabulary ends at 39"):
        toy_engine.generate("abc", **{name: value})


def test_an_answer_has_room_for_its_shortest(toy_engine: outrider.Engine) -> None:
    with pytest.raises(outrider.OptionError, match="min_new_tokens=600 is more than the 512 tokens that this answer"):
        toy_engine.generate("abc", min_new_tokens=600)


@pytest.mark.every_format
@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("kind", ["unprocessed", "processed"])
def test_logprobs_are_those_of_the_rows(toy_engine: outrider.Engine, kind: str, temperature: float) -> None:
    """Compared with a direct calculation from rows that are computed again, without the loop."""
    options: dict[str, Any] = {"temperature": temperature, "seed": 1, "repetition_penalty": 1.3, "top_k": 7}
    result = toy_engine.generate("hello", max_new_tokens=25, logprobs=20, logprobs_of=kind, ignore_eos=True, **options)
    assert result.logprobs is not None
    assert [made.token_id for made in result.logprobs] == result.token_ids

    prompt = ToyTokenizer().encode_prompt("hello")
    sampler = LogitsSampler(outrider.GenerationConfig(**options), prompt)
    slot = toy_engine.main.open(64)
    assert slot is not None
    rows = rows_of_call(toy_engine.main, Chunk(slot, [*prompt, *result.token_ids], 26))
    for i, made in enumerate(result.logprobs):
        if kind == "processed" and temperature:
            row = sampler.distribution(LogitsRow.of(rows[i]), result.token_ids[:i])
            expected = {int(k): float(np.log(p)) for k, p in zip(row.token_ids, row.probs, strict=True)}
        else:
            scores = rows[i].astype(np.float64)
            if kind == "processed":
                for k in {*prompt, *result.token_ids[:i]}:
                    scores[k] = scores[k] / 1.3 if scores[k] > 0 else scores[k] * 1.3
            expected = dict(enumerate((scores - np.log(np.exp(scores).sum())).tolist()))
        assert made.logprob == pytest.approx(expected[made.token_id], abs=1e-5)
        assert dict(made.top) == pytest.approx({k: expected[k] for k, _ in made.top}, abs=1e-5)
        assert len(made.top) == min(20, len(expected))
        assert [p for _, p in made.top] == pytest.approx(sorted(expected.values(), reverse=True)[:20], abs=1e-5)
        if temperature == 0 and kind == "processed":
            assert made.top[0][0] == made.token_id
    slot.close()


def test_logprobs_are_cut_with_their_tokens_and_are_json(toy_engine: outrider.Engine) -> None:
    whole = toy_engine.generate("hello", max_new_tokens=20, ignore_eos=True, logprobs=2)
    stop = whole.text[8:10]
    cut = toy_engine.generate("hello", max_new_tokens=20, ignore_eos=True, logprobs=2, stop=stop)
    assert cut.logprobs is not None
    assert whole.logprobs is not None
    assert 0 < len(cut.logprobs) == len(cut.token_ids) < 20
    assert cut.logprobs == whole.logprobs[: len(cut.logprobs)]
    read = json.loads(json.dumps(cut.as_dict(), allow_nan=False))
    assert [TokenLogprobs(t["token_id"], t["logprob"], tuple(map(tuple, t["top"]))) for t in read["logprobs"]] == (
        cut.logprobs
    )
    assert [made.top for made in toy_engine.generate("hello", max_new_tokens=2, logprobs=0).logprobs or ()] == [(), ()]
    assert toy_engine.generate("hello", max_new_tokens=2).logprobs is None


def test_the_likeliest_come_in_order_and_never_with_minus_infinity() -> None:
    sampler = LogitsSampler(outrider.GenerationConfig(logprobs=5), [])
    logits = np.array([1, 3, -np.inf, 3, -np.inf, 2], dtype=np.float32)
    made = sampler.logprobs(LogitsRow.of(logits), [], 0)
    assert [token_id for token_id, _ in made.top] == [1, 3, 5, 0]
    assert sum(np.exp([logprob for _, logprob in made.top])) == pytest.approx(1, abs=1e-12)
    assert made.logprob == made.top[-1][1]
