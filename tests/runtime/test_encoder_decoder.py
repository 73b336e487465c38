"""What encoder-decoder models need and no model is needed for: rules and prompts."""

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.bundle.manifest import AudioEntry, EncoderEntry
from outrider.config import GenerationConfig
from outrider.errors import OptionError, RequestError, TooLong
from outrider.inputs.encoder_input import adapt_config, decode_text, read_prompt, rules_of
from outrider.testing import ToyTokenizer
from outrider.tokens.sampling import BannedAtFirst, OnlyTokens, Timestamps
from outrider.types import EncoderSource, Prompt, TokenSequence

TEXT = EncoderEntry("encoder", "text", 2, 8, 6, "0" * 64, (0,), suppress_token_ids=(3,), begin_suppress_token_ids=(4,))
AUDIO = msgspec.structs.replace(
    TEXT, kind="audio", audio=AudioEntry(16_000, 80, 400, 160, 30, 9, 10, 3, {"en": 5, "de": 6}, {"transcribe": 7})
)


def allowed(processor: BannedAtFirst | OnlyTokens | Timestamps, prefix: list[int], size: int = 20) -> set[int]:
    """The tokens that a processor leaves, of equal logits."""
    logits = np.zeros(size, dtype=np.float32)
    processor.apply(logits, prefix)
    return set(np.flatnonzero(logits > -np.inf).tolist())


def test_bans_at_the_beginning_end_there() -> None:
    rule = BannedAtFirst([1, 2])
    assert allowed(rule, []) == {0, *range(3, 20)}
    assert allowed(rule, [7]) == {*range(20)}
    rule.commit([7])
    assert allowed(rule, []) == {*range(20)}
    assert allowed(OnlyTokens([3, 5]), [1]) == {3, 5}


def test_timestamps_come_in_pairs_and_ascend() -> None:
    """Token 2 ends a text, 9 says that there are no timestamps, and 10 is 0.00 s."""
    rule = Timestamps(first=10, no_timestamps=9, eos=2, max_initial=3)
    assert allowed(rule, []) == {10, 11, 12, 13}
    assert max(allowed(rule, [11])) < 10  # text follows
    # Ten timestamps of equal logits are likelier than any text.
    assert allowed(rule, [11, 4]) == {*range(12, 20)}
    assert allowed(rule, [11, 4, 13]) == {*range(13, 20)}
    assert max(allowed(rule, [11, 4, 13, 13])) < 10
    rule.commit([11, 4])
    assert allowed(rule, [13, 13, 4]) == {*range(14, 20)}
    logits = np.zeros(20, dtype=np.float32)
    logits[4] = 9.0
    rule.apply(logits, [13, 13])
    assert logits.argmax() == 4


@given(st.lists(st.integers(0, 19), max_size=6), st.integers(0, 6))
def test_committed_tokens_count_as_drafted_ones(answer: list[int], cut: int) -> None:
    for make in (lambda: BannedAtFirst([1]), lambda: Timestamps(10, 9, 2, 3)):
        drafted, committed = make(), make()
        committed.commit(answer[:cut])
        assert allowed(drafted, answer) == allowed(committed, answer[cut:])


def test_text_becomes_a_source() -> None:
    tokenizer = ToyTokenizer()
    prompt = read_prompt([5, 6, 7], TEXT, tokenizer)
    assert prompt.source is not None
    assert prompt.source.values.tolist() == [5, 6, 7]
    assert list(prompt.token_ids) == [0]
    assert prompt.scope == prompt.source.key
    other = read_prompt([5, 6, 8], TEXT, tokenizer)
    assert other.scope != prompt.scope
    with pytest.raises(TooLong, match="7 tokens, and the encoder reads 6"):
        read_prompt([1] * 7, TEXT, tokenizer)
    sequence = TokenSequence([0, 9], 1, source=prompt.source)
    assert sequence.context == [5, 6, 7, 0, 9]
    assert TokenSequence([0, 9], 1, source=EncoderSource.of_audio(np.zeros((2, 2), dtype=np.float32))).context == [0, 9]


def test_the_scope_of_a_prompt_tells_sources_apart() -> None:
    sources = [EncoderSource.of_text([1, 2]), EncoderSource.of_text([1, 3])]
    scopes = {read_prompt(Prompt([0], b"x", source=each), TEXT, ToyTokenizer()).scope for each in sources}
    assert len(scopes) == 2


def test_a_decoder_reads_no_source() -> None:
    with pytest.raises(RequestError, match="a model without one"):
        Prompt([1], source=EncoderSource.of_text([1])).check_tokens(object())


def test_tokens_that_are_never_said() -> None:
    config = GenerationConfig(banned_token_ids=(1,))
    assert set(adapt_config(config, TEXT, [0]).banned_token_ids) == {1, 3}
    assert adapt_config(config, AUDIO, [0]).banned_token_ids == (1,)  # the language is to be found
    assert set(adapt_config(config, AUDIO, [0, 5]).banned_token_ids) == {1, 3}
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    with pytest.raises(OptionError, match="tools"):
        adapt_config(GenerationConfig(tools=(tool,)), TEXT, [0])


def test_rules_follow_from_the_decoders_first_tokens() -> None:
    kinds = {
        (0,): [OnlyTokens],
        (0, 5, 7): [Timestamps, BannedAtFirst],
        (0, 5, 7, 9): [BannedAtFirst],
    }
    for begin, expected in kinds.items():
        assert [type(rule) for rule in rules_of(AUDIO, begin, [2])] == expected
    assert [type(rule) for rule in rules_of(TEXT, (0,), [2])] == [BannedAtFirst]


def test_timestamps_are_no_text() -> None:
    def decode(token_ids: object) -> str:
        return str(token_ids)

    assert decode_text(AUDIO, decode)([5, 10, 11, 6]) == "[5, 6]"
    assert decode_text(TEXT, decode)([5, 10]) == "[5, 10]"
