"""Draft models with another vocabulary: what they propose and read, and that the text does not change."""

from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from in_the_loop import finish, request_with, say
from outrider.decoding.answer import Answer
from outrider.drafters import DraftModel, DraftVocabulary, Intersection, Text, TokenMap
from outrider.drafters.translation import Translation
from outrider.testing import FakeBackend, ToyTokenizer

Way = Literal["intersection", "text"]
WAYS: tuple[Way, ...] = ("intersection", "text")
SEED = st.integers(0, 2**20)
# Whole characters, their bytes, several characters, and a special token.
MAIN = [b"a", b"b", b"ab", "é".encode(), b"\xc3", b"\xa9", b" a", b"<end>"]
POOL = [*MAIN, b"ba", b"bab", "aé".encode(), "日".encode(), b"\xe6\x97", b"\xa5"]
draft_vocabularies = st.lists(st.sampled_from(POOL), min_size=1, max_size=len(POOL), unique=True)


def token_map_of(main: list[bytes], draft: list[bytes], shared: bool = True, **options: Any) -> TokenMap:
    to_draft = [draft.index(token) if shared and token in draft else -1 for token in main]
    return TokenMap(main, ToyTokenizer(draft).encode, np.array(to_draft, dtype=np.int32), **options)


def vocabulary_of(way: Way, main: list[bytes], draft: list[bytes]) -> DraftVocabulary:
    token_map = token_map_of(main, draft, way == "intersection")
    if way == "intersection":
        to_main = [main.index(token) if token in main else -1 for token in draft]
        return Intersection(np.array(to_main, dtype=np.int32), token_map)
    special = [i for i, token in enumerate(draft) if token == b"<end>"]
    return Text(draft, special, ToyTokenizer(main).encode, token_map)


class Twin(FakeBackend):
    """A draft model with the logits of the main model of the same seed, for the tokens that it has."""

    def __init__(self, main: FakeBackend, vocabulary: list[bytes], noise: float) -> None:
        super().__init__(len(vocabulary), seed=main.seed, noise=noise)
        self.main, self.vocabulary = main, vocabulary

    def logits_after(self, token_ids: Any) -> Any:
        logits = super().logits_after(token_ids)
        said = [self.vocabulary[i] for i in token_ids]
        known = dict(zip(MAIN, self.main.logits_after([MAIN.index(t) for t in said if t in MAIN]), strict=True))
        return np.array([known.get(t, x) for t, x in zip(self.vocabulary, logits, strict=True)])


def make_request(drafter: DraftModel | None, prompt: list[int], n: int, **options: Any) -> Answer:
    eos = () if options.get("ignore_eos") else (len(MAIN) - 1,)
    return request_with(prompt, drafter, eos=eos, n=n, decode=ToyTokenizer(MAIN).decode, **options)


@settings(max_examples=150)
@given(
    way=st.sampled_from(WAYS),
    draft=draft_vocabularies,
    seed=SEED,
    prompt=st.lists(st.integers(0, len(MAIN) - 1), min_size=1, max_size=70),
    n=st.integers(1, 6),
    context_length=st.sampled_from([16, 1000]),
    sampling=st.sampled_from([{}, {"temperature": 1.0, "seed": 3}, {"temperature": 0.5, "seed": 4, "top_k": 3}]),
    options=st.fixed_dictionaries(
        {
            "max_new_tokens": st.integers(1, 40),
            "ignore_eos": st.booleans(),
            "stop": st.lists(st.text("ab", min_size=1, max_size=2), max_size=1),
            "repetition_penalty": st.sampled_from([1.0, 1.5]),
        }
    ),
)
def test_greedy_and_coupled_text_is_plain_text(
    way: Way,
    draft: list[bytes],
    seed: int,
    prompt: list[int],
    n: int,
    context_length: int,
    sampling: dict[str, Any],
    options: dict[str, Any],
) -> None:
    assume(way == "text" or set(draft) & set(MAIN))
    main = FakeBackend(len(MAIN), seed=seed)
    plain = finish(main, make_request(None, prompt, 0, **options, **sampling), 64)
    backend = Twin(FakeBackend(len(MAIN), seed=seed), draft, noise=0.5)
    drafter = DraftModel(
        backend, context_length=context_length, max_num_batched_tokens=32, vocabulary=vocabulary_of(way, MAIN, draft)
    )
    request = make_request(drafter, prompt, n, **options, **sampling)
    drafted = finish(FakeBackend(len(MAIN), seed=seed), request, 64)
    assert drafted.sequence.token_ids == plain.sequence.token_ids
    assert drafted.result().text == plain.result().text
    assert drafted.finish_reason == plain.finish_reason
    stats = drafted.stats
    assert stats.num_accepted_tokens <= stats.num_draft_tokens <= n * stats.num_drafts


@given(st.lists(st.sampled_from("ab é日"), max_size=12).map("".join), draft_vocabularies, st.data())
def test_a_translation_grows_and_says_the_same(text: str, draft: list[bytes], data: st.DataObject) -> None:
    """For tokens in pieces of any length, whole characters, and a draft vocabulary with all bytes."""
    main, draft = [bytes([i]) for i in range(256)], [*draft, *"ab é日".encode().split()]
    draft += [bytes([i]) for i in range(256) if bytes([i]) not in draft]
    token_ids = list(text.encode())
    translation = Translation(token_map_of(main, draft, data.draw(st.booleans())))
    for end in [*sorted(data.draw(st.lists(st.integers(0, len(token_ids))))), len(token_ids)]:
        before = list(translation.token_ids)
        translation.extend(token_ids[:end])
        assert translation.token_ids[: len(before)] == before
    assert translation.is_complete
    assert b"".join(draft[i] for i in translation.token_ids).decode() == text


def test_the_draft_models_own_beginning_takes_the_place_of_the_main_models() -> None:
    main, draft = [b"<s>", b"a"], [b"a", b"<begin>"]
    translation = Translation(token_map_of(main, draft, prefix=[1], bos_token_id=0))
    translation.extend([0, 1, 1])
    translation.extend([0, 1, 1, 1])
    assert translation.token_ids == [1, 0, 0, 0]


class Scripted(FakeBackend):
    """A model that generates a script's token at each position, after any context."""

    def __init__(self, vocab_size: int, script: list[int]) -> None:
        super().__init__(vocab_size)
        self.script = script

    def logits_after(self, token_ids: Any) -> Any:
        return np.eye(self.vocab_size, dtype=np.float32)[self.script[len(token_ids) % len(self.script)]]


@pytest.mark.parametrize(("script", "limit", "expected"), [
    ([8, 8, 8], 3, [1, 2, 1]),  # "bab" three times, cut to three
    ([8, 7, 8], 3, [1, 2, 7]),  # nothing after an end
    ([9, 9, 9], 3, []),  # a special token that the main model does not have
    ([5, 8, 8], 1, []),  # half a character
])  # fmt: skip
def test_text_becomes_main_tokens(script: list[int], limit: int, expected: list[int]) -> None:
    draft = [b"a", b"b", b"ab", "é".encode(), b"-", b"\xc3", b" a", b"<end>", b"bab", b"<|other|>"]
    token_map = token_map_of(MAIN, draft, shared=False)
    vocabulary = Text(draft, [7, 9], ToyTokenizer(MAIN).encode, token_map)
    drafter = DraftModel(Scripted(len(draft), script), context_length=100, vocabulary=vocabulary)
    request = make_request(drafter, [0, 0], limit, max_new_tokens=20)
    assert drafter.reserve(request.sequence, 22)
    say(request, 0)
    (proposed,) = drafter.propose([request.draft_request()])
    assert proposed.token_ids == expected
    assert proposed.probs is None
