"""The input that a sequence begins with: tokens, embeddings, and what an encoder reads."""

from __future__ import annotations

import hashlib
import itertools
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.errors import RequestError
from outrider.types.cache_keys import answer_keys


@dataclass(frozen=True, slots=True)
class Span:
    """Positions of a prompt where a model reads other embeddings than its tokens', such as those of an image.

    embeds: float32 [length, hidden], for the positions from `begin` on. key: identifies them in the prefix cache, such
    as a hash of the image. Spans with the same key count as the same. grid: the rows and columns of an image whose
    tokens have positions of their own along both; None for one position after the other. whole: whether its positions
    attend to each other in both directions, so that it is read in one call; see `undivided`.
    """

    begin: int
    embeds: NDArray[np.float32] = field(compare=False)
    key: bytes
    grid: tuple[int, int] | None = None
    whole: bool = False

    def __post_init__(self) -> None:
        if not self.key:
            raise RequestError(
                f"The span of embeds at token {self.begin} has key={self.key!r}, and all spans without a key would "
                "count as the same. Give it a key, such as a hash of the image."
            )
        if self.grid is not None and self.grid[0] * self.grid[1] != len(self.embeds):
            raise RequestError(
                f"The span of embeds at token {self.begin} has {len(self.embeds)} of them, and a grid of "
                f"{self.grid[0]} × {self.grid[1]}. Give one for each place of the grid."
            )

    @property
    def end(self) -> int:
        """The position after the last one."""
        return self.begin + len(self.embeds)


def undivided(embeds: Iterable[Span], begin: int, end: int) -> int:
    """The end of a piece of a prompt from `begin` on, where `end` would divide a span that is read in one call.

    The piece ends before the span, or if it begins with it, after it.
    """
    for span in embeds:
        if span.whole and span.begin < end < span.end:
            return span.begin if begin < span.begin else span.end
    return end


@dataclass(frozen=True, eq=False)
class EncoderSource:
    """What the encoder of an encoder-decoder model reads, for one sequence.

        source = Source.of_text(token_ids)

    values: by `kind`, of a "text" its tokens, int64 [n]; of "audio" its features, float32 [mel bins, frames]. key:
    identifies them, in the prefix cache too. states: float32 [1, n, hidden], what encoders have made of it, by the
    sha256 of an encoder. So models with one encoder run it once.
    """

    values: NDArray[Any]
    key: bytes
    kind: str = "text"
    states: dict[str, NDArray[np.float32]] = field(default_factory=dict)

    @classmethod
    def of_text(cls, token_ids: Sequence[int]) -> EncoderSource:
        """The tokens of a text."""
        return cls._of("text", np.array(token_ids, dtype=np.int64))

    @classmethod
    def of_audio(cls, features: NDArray[np.float32]) -> EncoderSource:
        """Log-mel features, float32 [mel bins, frames]."""
        return cls._of("audio", np.ascontiguousarray(features, dtype=np.float32))

    @classmethod
    def _of(cls, kind: str, values: NDArray[Any]) -> EncoderSource:
        return cls(values, hashlib.sha256(repr(values.shape).encode() + values.tobytes()).digest(), kind)

    @property
    def token_ids(self) -> list[int]:
        """The tokens of a text; none of audio."""
        return self.values.tolist() if self.kind == "text" else []


# Of texts that are rotated by a second set of frequencies: the first position, and how their scope begins.
LONG_POSITION = 1 << 24
LONG_SCOPE = b"\0long "


@dataclass(frozen=True, slots=True)
class Prompt:
    """The input that a sequence begins with.

        engine.generate(Prompt(token_ids, answers=((12, 40),)))

    scope: what keys and values depend on besides tokens and embeds, such as an adapter. Cached prefixes are shared
    within one scope only. embeds: embeddings to read instead of tokens, by backends with `embeds_width`. answers: the
    parts, each from one position up to another and ascending, that are earlier answers of this model. They are read as
    they were generated. So they are found in the prefix cache, and a text that is continued goes on as it would have.
    None in place of one of these says that there is none.
    counted: whether it is a request, for the statistics of the prefix cache.
    adapter: that the sequence is read with, one of `Capabilities.adapters`. It is not in the cache's keys by its name:
    the engine puts a hash of its content into the scope. source: what the encoder of an encoder-decoder model reads;
    the tokens are then the decoder's. opening: the first tokens that other prompts begin with, too, such as those of a
    system prompt: layers with states store theirs there.
    """

    token_ids: Sequence[int]
    scope: bytes = b""
    embeds: tuple[Span, ...] = ()
    answers: Sequence[tuple[int, int]] = ()
    counted: bool = True
    adapter: str | None = None
    source: EncoderSource | None = None
    opening: int = 0

    def __post_init__(self) -> None:
        for name, none in (("scope", b""), ("embeds", ()), ("answers", ())):
            if getattr(self, name) is None:
                object.__setattr__(self, name, none)
        if not isinstance(self.scope, bytes):
            raise RequestError(f"scope={self.scope!r} is not bytes. Pass bytes, such as b'my-adapter', or none.")
        if isinstance(self.embeds, list):
            object.__setattr__(self, "embeds", tuple(self.embeds))
        if not (isinstance(self.embeds, tuple) and all(isinstance(span, Span) for span in self.embeds)):
            raise RequestError(f"embeds={self.embeds!r:.300} are not a tuple of spans. Pass Span(begin, embeds, key)s.")
        if not isinstance(self.opening, int) or self.opening < 0:
            raise RequestError(
                f"opening={self.opening!r} is no number of tokens. Give how many of the prompt's first tokens other "
                "prompts begin with, too."
            )
        if isinstance(self.answers, tuple) and not self.answers:
            return
        try:
            num_tokens = len(self.token_ids)
        except TypeError as error:
            raise RequestError(f"token_ids={self.token_ids!r} has no length. Pass a list of token ids.") from error
        try:
            parts = tuple((operator.index(begin), operator.index(end)) for begin, end in self.answers)
        except (TypeError, ValueError):
            parts = ((0, -1),)
        if any(later < earlier for earlier, later in itertools.pairwise((0, *itertools.chain(*parts), num_tokens))):
            raise RequestError(
                f"answers={self.answers!r} are not parts of a prompt of {num_tokens:,} tokens. Give each as "
                "(begin, end), in the order of the text."
            )
        object.__setattr__(self, "answers", parts)

    @property
    def is_long(self) -> bool:
        """Whether it is rotated by the second set of frequencies, if the model has one, however short it is."""
        return self.scope.startswith(LONG_SCOPE)

    def of_length(self, num_tokens: int, long_from: int) -> Prompt:
        """The prompt of a text that may have so many tokens, with the scope of long ones if it is one.

        Keys and values of the two sets differ, so the prefix cache does not mix them.
        """
        if not long_from or num_tokens <= long_from or self.is_long:
            return self
        return replace(self, scope=LONG_SCOPE + self.scope)

    def with_marked_answers(self) -> Prompt:
        """The prompt with the answers' tokens as they are in the prefix cache of a backend with separate rows."""
        if not self.answers:
            return self
        token_ids = list(self.token_ids)
        for begin, end in self.answers:
            token_ids[begin:end] = answer_keys(token_ids[begin:end])
        return replace(self, token_ids=token_ids)

    def check_embeds(self, backend: Any) -> None:
        """Raise RequestError if there are embeds that `backend` cannot read, or that are beside the prompt's tokens."""
        width = backend.capabilities.embeds_width
        if not width:
            self.check_tokens(backend)
            return
        for span in self.embeds:
            kind, shape = span.embeds.dtype, list(span.embeds.shape)
            if kind != "float32" or len(shape) != 2 or shape[1] != width:
                raise RequestError(
                    f"The embeds from token {span.begin} on are {kind} {shape}, and the model reads float32 [length, "
                    f"{width}]. Pass what its own vision encoder gives."
                )
        spans = [(span.begin, span.begin + len(span.embeds)) for span in self.embeds]
        edges = [0, *itertools.chain(*spans), *([len(self.token_ids)] if self.token_ids else [])]
        if any(later < earlier for earlier, later in itertools.pairwise(edges)):
            raise RequestError(
                f"The embeds' spans {spans} are not parts of a prompt of {len(self.token_ids):,} tokens. Give each "
                "once, in the order of the text."
            )

    def check_tokens(self, backend: object) -> None:
        """Raise RequestError if there are embeds or a source. For backends that read token ids only."""
        if self.source is not None:
            raise RequestError(
                f"The prompt has a source for an encoder, and {type(backend).__name__} runs a model without one. Pass "
                "a prompt without a source."
            )
        if self.embeds:
            first = self.embeds[0]
            raise RequestError(
                f"The prompt has embeds for {len(first.embeds)} tokens from token {first.begin} on, and "
                f"{type(backend).__name__} reads token ids only. Pass a prompt without embeds."
            )

    def check_adapter(self, backend: Any) -> None:
        """Raise RequestError if the adapter is not one of the backend's."""
        if self.adapter is not None and self.adapter not in backend.capabilities.adapters:
            known = ", ".join(map(repr, backend.capabilities.adapters)) or "none"
            raise RequestError(
                f"The prompt is for the adapter {self.adapter!r}, and {type(backend).__name__} has {known} here. Pass "
                "one of these, or None."
            )


NO_PROMPT = Prompt(())
