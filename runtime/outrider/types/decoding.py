"""What is decided with a model's rows: tokens, distributions, drafts and what becomes of them."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from outrider.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from collections.abc import Sequence as Seq

    from numpy.typing import NDArray

    from outrider.types.backend import LogitsRow


@dataclass(eq=False, slots=True)
class Sequence:
    """One request's tokens: the prompt, then what was committed. Unverified tokens never enter.

    references: other texts that a drafter may copy from, as `outrider.drafters.References`. scope: of its prompt.
    """

    token_ids: list[int]
    num_prompt_tokens: int
    references: tuple[Any, ...] = ()
    scope: bytes = b""

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def generated_token_ids(self) -> list[int]:
        """The committed tokens behind the prompt."""
        return self.token_ids[self.num_prompt_tokens :]


@dataclass(frozen=True, slots=True)
class Distribution:
    """Probabilities over the tokens that have any.

    token_ids: int64 [n], ascending. probs: float64 [n], summing to 1.
    """

    token_ids: NDArray[np.int64]
    probs: NDArray[np.float64]

    def prob(self, token_id: int) -> float:
        """The probability of one token, 0 outside the support."""
        at = int(np.searchsorted(self.token_ids, token_id))
        if at < len(self.token_ids) and self.token_ids[at] == token_id:
            return float(self.probs[at])
        return 0.0

    def draw(self, uniform: float) -> int:
        """The token at `uniform` in [0, 1) of the cumulative distribution."""
        cumulative = np.cumsum(self.probs)
        # Scaling by the last sum, which may be 1 ± 1e-16, keeps the draw inside the support.
        at = int(np.searchsorted(cumulative, uniform * cumulative[-1], side="right"))
        return int(self.token_ids[min(at, len(self.token_ids) - 1)])


@dataclass(frozen=True, slots=True)
class Noise:
    """Random numbers as a function of where they are used, with no hidden state.

    Counter-based (Philox 4x64-10; Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"): the same key
    gives the same numbers on every platform.
    """

    seed: int
    sample: int = 0

    def uniforms(self, position: int, purpose: str, count: int) -> NDArray[np.float64]:
        """`count` independent numbers in [0, 1) for one purpose of the round that begins at `position`.

        Rounds begin at different positions, so no two rounds share a number. Block-wise acceptance would be biased
        if they did.
        """
        bits = np.random.Philox(
            key=self.seed + (self.sample << 64), counter=(position << 128) + (zlib.crc32(purpose.encode()) << 64)
        ).random_raw(count)
        return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53

    def gumbel(self, position: int, token_ids: NDArray[np.int64]) -> NDArray[np.float64]:
        """Standard Gumbel noise float64 [n] for tokens at a position, the same whoever asks and for whichever others.

        A SplitMix64 sequence (Steele et al. 2014, "Fast splittable pseudorandom number generators") for each
        position, begun where Philox says; a token's number is the one at its id.
        """
        key, counter = self.seed + (self.sample << 64), (position << 128) + (_GUMBEL << 64)
        bits = np.random.Philox(key=key, counter=counter).random_raw(1)
        bits = bits + (token_ids.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        bits ^= bits >> np.uint64(31)
        # In the middle of its interval, a number is neither 0 nor 1.
        uniforms = ((bits >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
        return -np.log(-np.log(uniforms))


_GUMBEL = zlib.crc32(b"gumbel")


@dataclass(frozen=True, slots=True)
class Draft:
    """Tokens that a drafter proposes: a chain, or a tree.

    token_ids: [n], in a tree parents before children. probs: for each token the distribution it was drawn from, where
    the verifier's mode needs it; None where the tokens were chosen without looking at the round's noise (n-gram
    drafts), or are judged by equality (greedy, coupled). confidences: for each token how likely the drafter thinks it
    is to be kept, given that those before it are; None where it does not say. parents: [n], for each token the index of
    the one that it follows, −1 for the newest committed one; None for a chain.
    """

    token_ids: list[int]
    probs: list[Distribution] | None = None
    confidences: list[float] | None = None
    parents: list[int] | None = None

    def __len__(self) -> int:
        return len(self.token_ids)

    def cut(self, length: int) -> Draft:
        """The first `length` tokens."""
        probs = None if self.probs is None else self.probs[:length]
        confidences = None if self.confidences is None else self.confidences[:length]
        parents = None if self.parents is None else self.parents[:length]
        return Draft(self.token_ids[:length], probs, confidences, parents)

    def check_chain(self, reader: object) -> None:
        """Raise RequestError if this is a tree, for those who read chains alone, such as `reader`."""
        if self.parents is not None:
            raise RequestError(
                f"A draft of {len(self)} tokens is a tree (parents={self.parents}), and {type(reader).__name__} judges "
                "chains alone. Propose one of its paths, with parents=None."
            )


NO_DRAFT = Draft([])


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the main model makes of a draft.

    path: the draft tokens that are kept, by index, from the first on. next_token_id: the recovered token in place of
    the first rejected one, or the bonus token behind a draft that was kept whole.
    """

    path: list[int]
    next_token_id: int

    @classmethod
    def of_chain(cls, num_accepted: int, next_token_id: int) -> Outcome:
        """The first `num_accepted` tokens of a chain are kept."""
        return cls([*range(num_accepted)], next_token_id)

    @property
    def num_accepted(self) -> int:
        """Draft tokens that are kept."""
        return len(self.path)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """How likely a token of an answer was at its place, and the likeliest tokens there, as (token_id, logprob).

    Natural logarithms. `top` is in descending order and holds the chosen token only if it is one of the likeliest. It
    is shorter than was asked where fewer tokens have a probability, so that no number is −inf.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class TextTokenizer(Protocol):
    """Text to tokens and back."""

    @property
    def prefix(self) -> Seq[int]:
        """The special tokens that every text begins with."""

    def encode(self, text: str) -> list[int]:
        """The token ids of a text that goes on from another: nothing is put in front. Special tokens are recognised."""

    def encode_prompt(
        self, prompt: str | Seq[Mapping[str, Any]] | Seq[int], *, chat_template: bool = True
    ) -> list[int]:
        """The token ids of a prompt: text, chat messages, or token ids."""

    def decode(self, token_ids: Seq[int]) -> str:
        """The text of tokens, without special tokens."""


class Sampler(Protocol):
    """Turns rows of logits of one sequence into decisions: all processors, in their fixed order.

    `prefix` holds the tokens between the committed ones and the row: draft tokens that are accepted if it matters.
    """

    def best(self, row: LogitsRow, prefix: Seq[int]) -> int:
        """The token with the highest processed logit; the lowest id among equals."""

    def distribution(self, row: LogitsRow, prefix: Seq[int]) -> Distribution:
        """The probabilities after all processors: the same bits whether the row lists its largest logits or not."""

    def logprobs(self, row: LogitsRow, prefix: Seq[int], token_id: int) -> TokenLogprobs:
        """How likely a token was that was chosen at this row."""

    def commit(self, token_ids: Seq[int]) -> None:
        """Take tokens into the state that processors look at."""


class Rows(Protocol):
    """A model's answers along one draft: row i follows i draft tokens. A row is computed when it is asked for."""

    def best(self, i: int) -> int:
        """The token with the highest processed logit at row i."""

    def distribution(self, i: int) -> Distribution:
        """target_probs at row i, or draft_probs where the model is the draft model."""


class Verifier(Protocol):
    """A way to choose tokens: how the main model judges a draft, and how a draft model draws one to be judged so."""

    @property
    def lossless(self) -> bool:
        """Whether the text is the main model's own, token by token or in distribution."""

    def draw(self, rows: Rows, i: int, noise: Noise, position: int) -> tuple[int, Distribution | None]:
        """The draft token at row i of a draft that begins at `position`, and its draft_probs if `verify` needs them.

        A drawn token is submitted, whatever it is: dropping one after seeing it would bias the output.
        """

    def verify(self, draft: Draft, rows: Rows, noise: Noise, position: int) -> Outcome:
        """Judge a draft that begins at `position`.

        Reads rows from left to right, none behind a token that cannot be kept, and the one behind the whole draft
        only when all of it is.
        """
