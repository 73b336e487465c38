"""Streamed text adds up to the decoded whole, whatever the tokens are cut from."""

from __future__ import annotations

import itertools
import re
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.text import TextStream

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Sequence as Seq

Decode = "Callable[[Seq[int]], str]"


def byte_decoder(errors: str) -> Callable[[Seq[int]], str]:
    """One byte a token. openvino-genai's GGUF tokenizers drop an incomplete character, others write U+FFFD."""
    return lambda token_ids: bytes(token_ids).decode("utf-8", errors)


WORDS = ["", "▁the", "▁a", "s", "ing", "▁", "é", "\n"]


def word_decoder(token_ids: Seq[int]) -> str:
    """As SentencePiece: the space before the first word of a text is left out, and token 0 is special."""
    return "".join(WORDS[i] for i in token_ids).replace("▁", " ").removeprefix(" ")


texts = st.text(st.sampled_from("ab é日🎉\u200d\n"), max_size=60)
cuts = st.lists(st.integers(1, 5), min_size=1)


def in_rounds(token_ids: list[int], sizes: list[int]) -> list[list[int]]:
    rounds: list[list[int]] = []
    i = 0
    while i < len(token_ids):
        size = sizes[len(rounds) % len(sizes)]
        rounds.append(token_ids[i : i + size])
        i += size
    return rounds


def stream_all(stream: TextStream, rounds: list[list[int]]) -> list[str]:
    """The text after each round and at the end; it only ever grows."""
    seen = [""]
    for token_ids in rounds:
        stream.push(token_ids)
        seen.append(stream.text)
        if stream.stopped:
            break
    stream.finish()
    seen.append(stream.text)
    for before, after in itertools.pairwise(seen):
        assert after.startswith(before)
    return seen


@pytest.mark.parametrize("errors", ["ignore", "replace"])
@given(text=texts, sizes=cuts)
def test_characters_are_never_broken(errors: str, text: str, sizes: list[int]) -> None:
    rounds = in_rounds(list(text.encode()), sizes)
    seen = stream_all(TextStream(byte_decoder(errors)), rounds)
    assert seen[-1] == text
    assert "\ufffd" not in "".join(seen)


@given(st.lists(st.integers(0, 255), max_size=80), cuts)
def test_bytes_that_are_no_text_end_as_they_decode(token_ids: list[int], sizes: list[int]) -> None:
    """Where bytes are dropped or replaced depends on what stands before, but never past a whole character."""
    seen = stream_all(TextStream(byte_decoder("ignore")), in_rounds(token_ids, sizes))
    assert seen[-1].replace("\ufffd", "") == bytes(token_ids).decode("utf-8", "ignore")


@given(st.lists(st.integers(0, len(WORDS) - 1), max_size=120), cuts)
def test_spaces_between_words_are_kept(token_ids: list[int], sizes: list[int]) -> None:
    assert stream_all(TextStream(word_decoder), in_rounds(token_ids, sizes))[-1] == word_decoder(token_ids)


def test_text_comes_as_soon_as_it_is_certain() -> None:
    stream = TextStream(byte_decoder("ignore"))
    texts_seen = []
    for byte in "a🎉b".encode():
        stream.push([byte])
        texts_seen.append(stream.text)
    assert texts_seen == ["a", "a", "a", "a", "a🎉", "a🎉b"]


def test_decoding_a_long_answer_looks_at_a_window_only() -> None:
    sizes = []

    def decode(token_ids: Seq[int]) -> str:
        sizes.append(len(token_ids))
        return "x" * len(token_ids)

    stream_all(TextStream(decode), [[0]] * 1000)
    assert max(sizes) < 100
    assert len(sizes) < 1100


@given(texts, st.lists(st.text(st.sampled_from("ab é\n"), min_size=1, max_size=4), min_size=1, max_size=3))
def test_stop_strings_cut_the_text_at_the_first_one(text: str, stop: list[str]) -> None:
    stream = TextStream(byte_decoder("ignore"), stop)
    seen = stream_all(stream, [[byte] for byte in text.encode()])
    found = re.search("|".join(map(re.escape, stop)), text)
    assert stream.stopped == bool(found)
    if found:
        # What ends first stops first, and of what it holds the text before the earliest stop string is kept.
        end = min(at + len(s) for s in stop if (at := text.find(s)) >= 0)
        starts = [at for s in stop if (at := text[:end].find(s)) >= 0]
        assert seen[-1] == text[: min(starts)]
        kept = list(text.encode())[: stream.num_tokens_kept]
        assert bytes(kept).decode("utf-8", "ignore") == seen[-1]
    else:
        assert seen[-1] == text
        assert stream.num_tokens_kept == len(text.encode())


def test_what_may_become_a_stop_string_is_held_back() -> None:
    stream = TextStream(byte_decoder("ignore"), ["END"])
    shown = []
    for byte in b"xENxEND":
        stream.push([byte])
        shown.append(stream.text)
    assert shown == ["x", "x", "x", "xENx", "xENx", "xENx", "xENx"]
    assert stream.stopped
