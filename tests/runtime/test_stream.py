"""The pieces of streamed text add up to the decoded text, for any kind of tokens."""

import itertools
import random
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.inputs.text import TextStream
from outrider.inputs.text.joinable_texts import JoinableTexts, joins_bytes
from outrider.inputs.text.stream import StopStrings
from outrider.inputs.text.tokenizer import Tokenizer

Decode = "Callable[[Sequence[int]], str]"


def byte_decoder(errors: str) -> Callable[[Sequence[int]], str]:
    """One byte per token. openvino-genai's GGUF tokenizers drop an incomplete character, others write U+FFFD."""
    return lambda token_ids: bytes(token_ids).decode("utf-8", errors)


WORDS = ["", "▁the", "▁a", "s", "ing", "▁", "é", "\n"]


def word_decoder(token_ids: Sequence[int]) -> str:
    """Like SentencePiece: the space before a text's first word is left out, and token 0 is special."""
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


@pytest.mark.parametrize("errors", ["ignore", "replace"])
@pytest.mark.parametrize("at_once", [True, False])
@given(text=texts, sizes=cuts, length=st.integers(0, 60))
def test_a_character_that_is_cut_is_no_text(
    errors: str, at_once: bool, text: str, sizes: list[int], length: int
) -> None:
    content = text.encode()[:length]
    stream = TextStream(byte_decoder(errors), at_once=at_once)
    for token_ids in in_rounds(list(content), sizes):
        stream.push(token_ids)
    stream.finish(cut=True)
    assert stream.text == content.decode("utf-8", "ignore")


def test_what_a_model_ends_itself_is_kept() -> None:
    for cut, end in ((False, "\ufffd"), (True, "")):
        stream = TextStream(byte_decoder("replace"))
        stream.push([*"a\ufffdb".encode(), 0xF0])
        stream.finish(cut=cut)
        assert stream.text == "a\ufffdb" + end


@given(st.lists(st.integers(0, 255), max_size=80), cuts)
def test_bytes_that_are_no_text_end_as_they_decode(token_ids: list[int], sizes: list[int]) -> None:
    """Which bytes are dropped or replaced depends on earlier bytes, but not on those before a whole character."""
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

    def decode(token_ids: Sequence[int]) -> str:
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
        # The first token that completes a stop string ends the text, which is cut before the earliest stop string.
        end = min(at + len(s) for s in stop if (at := text.find(s)) >= 0)
        starts = [at for s in stop if (at := text[:end].find(s)) >= 0]
        assert seen[-1] == text[: min(starts)]
        kept = list(text.encode())[: stream.num_tokens]
        assert bytes(kept).decode("utf-8", "ignore") == seen[-1]
    else:
        assert seen[-1] == text
        assert stream.num_tokens == len(text.encode())


def test_what_may_become_a_stop_string_is_held_back() -> None:
    stream = TextStream(byte_decoder("ignore"), ["END"])
    shown = []
    for byte in b"xENxEND":
        stream.push([byte])
        shown.append(stream.text)
    assert shown == ["x", "x", "x", "xENx", "xENx", "xENx", "xENx"]
    assert stream.stopped


@given(
    st.lists(st.text("ab", min_size=1, max_size=8), min_size=1, max_size=12),
    st.lists(st.text("abc", max_size=6), max_size=20),
)
def test_stop_strings_are_found_as_by_looking_everywhere(stop: list[str], pieces: list[str]) -> None:
    stops, text = StopStrings(stop), ""
    for piece in pieces:
        before, text = len(text), text + piece
        begins = [i for i in range(len(text)) for s in stop if text.startswith(s, i) and i + len(s) > before]
        assert stops.push(piece) == (len(text) - min(begins) if begins else 0)
        held = (n for s in stop for n in range(1, len(s) + 1) if text.endswith(s[:n]))
        assert stops.num_held == max(held, default=0)


@pytest.mark.parametrize("errors", ["ignore", "replace"])
@given(text=texts, stop=st.lists(st.text(st.sampled_from("ab é🎉"), min_size=1, max_size=20), min_size=1, max_size=3))
def test_the_tokens_that_are_kept_are_those_before_the_stop_string(errors: str, text: str, stop: list[str]) -> None:
    decode = byte_decoder(errors)
    stream = TextStream(decode, stop)
    seen = stream_all(stream, [[byte] for byte in text.encode()])
    pushed = stream._token_ids
    most = next(n for n in range(len(pushed), -1, -1) if len(decode(pushed[:n])) <= len(seen[-1]))
    assert stream.num_tokens == (most if stream.stopped else len(pushed))


def test_a_long_stop_string_costs_no_more_than_the_text() -> None:
    """Nor do many stop strings. A search for every possible beginning would take minutes."""
    many = ["x" * n + "y" for n in range(1, 600)]
    began = time.perf_counter()
    for stop in (["x" * 1_000_000], many):
        stream = TextStream(lambda token_ids: "x" * len(token_ids), stop)
        stream_all(stream, [[0]] * 1000)
        assert not stream.stopped
        assert stream.text == "x" * 1000
    assert time.perf_counter() - began < 60


def test_a_long_stop_string_that_comes_is_decoded_a_few_times() -> None:
    num_decoded = 0

    def decode(token_ids: Sequence[int]) -> str:
        nonlocal num_decoded
        num_decoded += len(token_ids)
        return "x" * len(token_ids)

    stream = TextStream(decode, ["x" * 900])
    stream_all(stream, [[0]] * 1000)
    assert stream.stopped
    num_decoded = 0
    assert stream.num_tokens == 0
    assert num_decoded < 1000


def test_at_once_it_is_the_same_text() -> None:
    token_ids = [72, 195, 164, 33, 240, 159, 166, 138, 32, 50]
    for stop in ((), ("2",), ("zzz",)):
        streams = [TextStream(byte_decoder("replace"), stop, at_once=at_once) for at_once in (False, True)]
        for stream in streams:
            for token_id in token_ids:
                stream.push([token_id])
            stream.finish()
        assert streams[0].text == streams[1].text
        assert streams[0].num_tokens == streams[1].num_tokens


def test_texts_of_tokens_join_to_what_the_detokenizer_writes(model: Path) -> None:
    """Whatever the tokens: special ones, bytes of half a character, and bytes that are no text."""
    import openvino_genai

    detokenizer = openvino_genai.Tokenizer(str(model / "tokenizer"))
    tokenizer, draw = Tokenizer(model / "tokenizer"), random.Random(0)
    num_tokens = len(detokenizer.get_vocab())
    among = draw.sample(range(num_tokens), min(num_tokens, 2000))
    for _ in range(2000):
        token_ids = draw.choices(among, k=draw.randrange(1, 12))
        assert tokenizer.decode(token_ids) == detokenizer.decode(token_ids)
    assert tokenizer.decode([*range(num_tokens)]) == detokenizer.decode([*range(num_tokens)])


def test_tokens_that_were_met_are_not_decoded_again(tiny: Path) -> None:
    asked: list[list[int]] = []

    class Detokenizer:
        def decode(self, token_ids: list[int]) -> str:
            asked.append(token_ids)
            return "".join("ab\ufffd"[i] for i in token_ids)

    texts = JoinableTexts(Detokenizer())
    assert texts.join([0, 1, 0]) == "aba"
    assert texts.join([1, 1]) == "bb"
    assert texts.join([0, 2]) is None
    assert asked == [[0], [1], [2]]
    assert texts.join([*range(3, 20)]) is None, "a long text is one call"
    assert len(asked) == 3
    assert joins_bytes(tiny / "tokenizer")


@pytest.mark.parametrize(("old", "new"), [('"UTF8Validate"', '"RegexNormalization"'), ('_mode="true', '_mode="false')])
def test_other_detokenizers_are_called(old: str, new: str, tiny: Path, tmp_path: Path) -> None:
    """Such as those that join words with spaces, or leave out what is no text."""
    name = "openvino_detokenizer.xml"
    graph = (tiny / "tokenizer" / name).read_text(encoding="utf-8")
    assert old in graph
    (tmp_path / name).write_text(graph.replace(old, new), encoding="utf-8")
    assert not joins_bytes(tmp_path)
