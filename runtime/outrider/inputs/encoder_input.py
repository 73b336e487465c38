"""What an encoder-decoder model reads: a request's prompt as the encoder's source and the decoder's first tokens."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from outrider.bundle.manifest import EncoderEntry
from outrider.config import GenerationConfig
from outrider.errors import OptionError, RequestError, TooLong
from outrider.tokens.sampling import BannedAtFirst, OnlyTokens, Processor, Timestamps
from outrider.types import EncoderSource, Prompt, TextTokenizer


def read_prompt(prompt: Any, encoder: EncoderEntry, tokenizer: TextTokenizer) -> Prompt:
    """The prompt of an encoder-decoder model's request: text or token ids become the source.

    prompt: as for `Engine.generate`. A `Prompt` with a source is used as it is.

    Raises:
        OptionError: for chat messages, and for text where the model reads audio, or audio where it reads text.
        RequestError: when it is empty.
        TooLong: when the encoder does not read so much.
    """
    if isinstance(prompt, Prompt):
        if prompt.source is None or not prompt.token_ids or prompt.embeds:
            raise RequestError(
                "A Prompt for an encoder-decoder model has a source and the decoder's tokens, and no embeds. Pass "
                "Prompt(token_ids, source=Source.of_text(…)), or the text itself."
            )
        if prompt.source.kind != encoder.kind:
            raise RequestError(f"The model reads {encoder.kind}, and the Prompt's source is not {encoder.kind}.")
        return replace(prompt, scope=prompt.scope + prompt.source.key)
    if encoder.kind == "audio":
        raise OptionError(
            "This model reads audio, and the prompt is not audio. Use engine.transcribe(samples) or 'outrider "
            "transcribe'."
        )
    if isinstance(prompt, np.ndarray) and np.issubdtype(prompt.dtype, np.floating):
        raise OptionError("This model reads text, and the prompt is an array of numbers. Give text, or load a Whisper.")
    if isinstance(prompt, list | tuple) and any(isinstance(item, Mapping) for item in prompt):
        raise OptionError("This model has no chat: it reads one text. Give the prompt as text, without messages.")
    if isinstance(prompt, str) and not prompt.strip():
        raise RequestError("The prompt is empty. Give at least one word.")
    token_ids = [int(token_id) for token_id in tokenizer.encode_prompt(prompt, chat_template=False)]
    if len(token_ids) > encoder.context_length:
        raise TooLong(
            f"The text has {len(token_ids):,} tokens, and the encoder reads {encoder.context_length:,}. Shorten it, or "
            "give it in parts."
        )
    source = EncoderSource.of_text(token_ids)
    return Prompt(encoder.begin_token_ids, source.key, source=source)


def adapt_config(config: GenerationConfig, encoder: EncoderEntry, token_ids: Sequence[int]) -> GenerationConfig:
    """A request's options, with the tokens that the model never generates among the banned ones.

    token_ids: the decoder's first tokens.

    Raises:
        OptionError: for options that encoder-decoder models do not have.
    """
    if config.offered_tools:
        raise OptionError("tools are for models with a chat template, and this one has none. Leave them out.")
    if not encoder.suppress_token_ids or _finds_language(encoder, token_ids):  # languages are among them
        return config
    return config.replace(banned_token_ids=tuple({*config.banned_token_ids, *encoder.suppress_token_ids}))


def _finds_language(encoder: EncoderEntry, token_ids: Sequence[int]) -> bool:
    return encoder.audio is not None and bool(encoder.audio.languages) and tuple(token_ids) == encoder.begin_token_ids


def rules_of(encoder: EncoderEntry, token_ids: Sequence[int], eos_token_ids: Sequence[int]) -> list[Processor]:
    """The model's own rules for an answer after the decoder's first tokens.

    Whisper's text begins with the start token alone when the language is to be found, and without <|notimestamps|> when
    it has timestamps.
    """
    audio = encoder.audio
    if audio is not None and _finds_language(encoder, token_ids):
        return [OnlyTokens(audio.languages.values())]
    rules: list[Processor] = []
    if audio is not None and audio.no_timestamps_token_id not in token_ids:
        first, none = audio.first_timestamp_token_id, audio.no_timestamps_token_id
        rules.append(Timestamps(first, none, min(eos_token_ids), audio.max_initial_timestamp))
    if encoder.begin_suppress_token_ids:
        rules.append(BannedAtFirst(encoder.begin_suppress_token_ids))
    return rules


def decode_text(encoder: EncoderEntry, decode: Callable[[Sequence[int]], str]) -> Callable[[Sequence[int]], str]:
    """The same function, without timestamps, which are no special tokens to Whisper's tokenizer."""
    if encoder.audio is None:
        return decode
    first = encoder.audio.first_timestamp_token_id
    return lambda token_ids: decode([token_id for token_id in token_ids if token_id < first])
