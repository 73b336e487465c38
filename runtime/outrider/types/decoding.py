"""Tokens, drafts and outcomes, and the roles that decide on them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from outrider.errors import DrafterError, RequestError
from outrider.types.layout import branches_of, path_to
from outrider.types.prompt import undivided

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outrider.types.backend import LogitsRow
    from outrider.types.prompt import EncoderSource, Prompt, Span
    from outrider.types.randomness import Distribution, Noise


@dataclass(eq=False, slots=True)
class TokenSequence:
    """One request's committed tokens: the prompt, then the answer. Draft tokens enter only when accepted.

    references: other texts that a drafter may copy from, as `outrider.drafters.References`. scope, embeds: of the
    prompt. earlier_answers: whether a drafter may copy from them. answers: see `Prompt.answers`; ascending. adapter:
    that the main model reads it with; its content is in the scope. source: what an encoder reads.
    """

    token_ids: list[int]
    num_prompt_tokens: int
    references: tuple[Any, ...] = ()
    scope: bytes = b""
    answers: Sequence[tuple[int, int]] = ()
    adapter: str | None = None
    source: EncoderSource | None = None
    embeds: tuple[Span, ...] = ()
    earlier_answers: bool = True

    @classmethod
    def of(cls, prompt: Prompt, references: tuple[Any, ...] = (), *, earlier_answers: bool = True) -> TokenSequence:
        """The sequence that begins with a prompt."""
        return cls(
            [*prompt.token_ids],
            len(prompt.token_ids),
            references,
            prompt.scope,
            prompt.answers,
            prompt.adapter,
            prompt.source,
            prompt.embeds,
            earlier_answers,
        )

    def __len__(self) -> int:
        return len(self.token_ids)

    def next_piece(self, begin: int, most: int) -> tuple[list[int], bool]:
        """Up to `most` tokens from position `begin` on, and whether they are tokens of an answer: all are, or none.

        They are more where a span of embeddings begins that is read in one call.
        """
        end = undivided(self.embeds, begin, min(begin + most, len(self.token_ids)))
        for first, last in (*self.answers, (self.num_prompt_tokens, len(self.token_ids))):
            if begin < first:
                return self.token_ids[begin : min(end, first)], False
            if begin < last:
                return self.token_ids[begin : min(end, last)], True
        return self.token_ids[begin:end], False

    @property
    def context(self) -> list[int]:
        """All tokens that a text may be copied from: those of the encoder's text, if there is one, then its own."""
        read = self.source.token_ids if self.source else ()
        return [*read, *self.token_ids] if read else self.token_ids

    @property
    def generated_token_ids(self) -> list[int]:
        """The committed tokens after the prompt."""
        return self.token_ids[self.num_prompt_tokens :]


@dataclass(frozen=True, slots=True)
class Draft:
    """Tokens that a drafter proposes: a chain, or a tree of several candidates.

        Draft([5, 7, 8], parents=[-1, -1, 0])    # 5 or 7, and 8 after 5

    token_ids: [n], in a tree parents before children, and siblings in the order in which they were drawn. probs: for
    each token the distribution it was drawn from, if the verifier's mode needs it: that of a later sibling has no
    chance for the earlier ones (`draw_several`); None if the tokens were chosen without the round's noise (n-gram
    drafts), or are judged by equality (greedy, coupled). confidences: for each token the drafter's estimate of its
    acceptance, given that those before it are accepted; None without estimates. parents: [n], for each token the index
    of the one that it follows, −1 for the newest committed token; None for a chain.

    A model has n + 1 rows for it: row 0 follows the newest committed token, and row i + 1 follows token i.

    Raises:
        DrafterError: when `parents` is no tree.
    """

    token_ids: list[int]
    probs: list[Distribution] | None = None
    confidences: list[float] | None = None
    parents: list[int] | None = None

    def __post_init__(self) -> None:
        if self.parents is None:
            return
        if len(self.parents) != len(self.token_ids):
            raise DrafterError(
                f"A draft of {len(self)} tokens has {len(self.parents)} parents. Give one for each token, or parents="
                "None for a chain."
            )
        if len(self.token_ids) == 0:  # no token is no tree
            object.__setattr__(self, "parents", None)
            return
        for i, parent in enumerate(self.parents):
            if not -1 <= parent < i:
                raise DrafterError(
                    f"A draft has parents={self.parents}, where token {i} follows token {parent}. Let each token "
                    "follow one before it in the list, or −1, the newest committed token."
                )

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def _parents(self) -> Sequence[int]:
        return range(-1, len(self) - 1) if self.parents is None else self.parents

    def children(self, i: int) -> list[int]:
        """The indices of the tokens that follow token i, in order; −1: the newest committed token."""
        if self.parents is None:
            return [i + 1] if i + 1 < len(self.token_ids) else []
        return [child for child in range(i + 1, len(self)) if self.parents[child] == i]

    def path_to(self, i: int) -> list[int]:
        """The indices of the tokens from the first one to token i; none for −1."""
        return path_to(i, self._parents)

    def before(self, row: int) -> list[int]:
        """The draft tokens between the newest committed token and a row: those on the path to token `row` − 1."""
        if self.parents is None:
            return self.token_ids[:row]
        return [self.token_ids[i] for i in self.path_to(row - 1)]

    @property
    def depths(self) -> list[int]:
        """For each token the number of draft tokens before it on its path, 0 for a first one."""
        if self.parents is None:
            return [*range(len(self))]
        depths: list[int] = []
        for parent in self.parents:
            depths.append(depths[parent] + 1 if parent >= 0 else 0)
        return depths

    @property
    def branches(self) -> list[list[int]]:
        """The paths to all tokens that nothing follows, in order: the chains that the tree consists of."""
        return branches_of(self._parents)

    @property
    def first_chain(self) -> Draft:
        """The chain of first candidates: of each token the first that follows it."""
        chain, i = list[int](), -1
        while following := self.children(i):
            i = following[0]
            chain.append(i)
        probs = None if self.probs is None else [self.probs[i] for i in chain]
        confidences = None if self.confidences is None else [self.confidences[i] for i in chain]
        return Draft([self.token_ids[i] for i in chain], probs, confidences)

    @property
    def num_rows(self) -> int:
        """Rows that the main model calculates: each branch with the newest committed token before it."""
        if self.parents is None:
            return len(self.token_ids) + 1
        return sum(len(branch) + 1 for branch in self.branches)

    def num_first(self, path: Sequence[int]) -> int:
        """How many tokens of a path, from its beginning, are first candidates."""
        i, count = -1, 0
        for node in path:
            if self.children(i)[0] != node:
                break
            i, count = node, count + 1
        return count

    def cut(self, length: int) -> Draft:
        """The first `length` tokens: of a tree a tree, as parents come before children."""
        probs = None if self.probs is None else self.probs[:length]
        confidences = None if self.confidences is None else self.confidences[:length]
        parents = None if self.parents is None else self.parents[:length]
        return Draft(self.token_ids[:length], probs, confidences, parents)

    def check_chain(self, reader: object) -> None:
        """Raise RequestError if this is a tree. reader: the caller, which reads only chains."""
        if self.parents is not None:
            raise RequestError(
                f"A draft of {len(self)} tokens is a tree (parents={self.parents}), and {type(reader).__name__} reads "
                "chains only. Propose one of its paths, with parents=None."
            )


NO_DRAFT = Draft([])


@dataclass(frozen=True, slots=True)
class Outcome:
    """The verifier's decision on a draft.

    path: the indices of the accepted draft tokens, in order; in a tree each is a child of the one before.
    next_token_id: the recovered token in place of the first rejected one, or the bonus token after a draft that was
    accepted whole, of a tree one branch to its end.
    """

    path: list[int]
    next_token_id: int

    @classmethod
    def of_chain(cls, num_accepted: int, next_token_id: int) -> Outcome:
        """The first `num_accepted` tokens of a chain are accepted."""
        return cls([*range(num_accepted)], next_token_id)

    @property
    def num_accepted(self) -> int:
        """Accepted draft tokens."""
        return len(self.path)

    @property
    def rows(self) -> list[int]:
        """For each committed token the row that it was decided at: the first, and those after accepted tokens."""
        return [0, *(i + 1 for i in self.path)]


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The log-probability of an answer's token, and the likeliest tokens at its position, as (token_id, logprob).

    Natural logarithms. `top` is in descending order and holds the chosen token only if it is one of the likeliest. It
    has fewer tokens than requested if fewer have a probability above 0, so that no number is −inf.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Sampler(Protocol):
    """Turns one sequence's rows of logits into decisions, by all processors in their fixed order.

    prefix: the draft tokens between the committed tokens and the row, taken as accepted. is_stateless: whether
    committed tokens change nothing.
    """

    @property
    def is_stateless(self) -> bool:
        """See above."""

    def best(self, row: LogitsRow, prefix: Sequence[int]) -> int:
        """The token with the highest processed logit; the lowest id among equals."""

    def best_several(self, row: LogitsRow, prefix: Sequence[int], count: int) -> list[int]:
        """Up to `count` tokens with the highest processed logits, `best` first; as many as the row has."""

    def distribution(self, row: LogitsRow, prefix: Sequence[int]) -> Distribution:
        """The probabilities after all processors."""

    def logprobs(self, row: LogitsRow, prefix: Sequence[int], token_id: int) -> TokenLogprobs:
        """The log-probabilities for a token that was chosen at this row."""

    def commit(self, token_ids: Sequence[int]) -> None:
        """Add committed tokens to the processors' state."""


class Rows(Protocol):
    """A model's rows for one draft: row 0, and row i + 1 after draft token i. A row is processed when it is needed."""

    def depth(self, i: int) -> int:
        """The number of draft tokens before row i: i in a chain."""

    def best(self, i: int) -> int:
        """The token with the highest processed logit at row i."""

    def best_several(self, i: int, count: int) -> list[int]:
        """Up to `count` tokens with the highest processed logits at row i, `best` first; as many as the row has."""

    def distribution(self, i: int) -> Distribution:
        """target_probs at row i; draft_probs for a draft model's rows."""


class Verifier(Protocol):
    """A way to choose tokens: how a draft model draws them, and how the main model accepts or rejects them."""

    @property
    def lossless(self) -> bool:
        """Whether the text has the main model's distribution."""

    @property
    def trees(self) -> bool:
        """Whether it verifies drafts with several candidates. The others refuse them."""

    def draw(self, rows: Rows, i: int, noise: Noise, position: int) -> tuple[int, Distribution | None]:
        """The draft token at row i of a draft that begins at `position`, and its draft_probs if `verify` needs them.

        A drawn token is submitted, whatever it is: dropping one after seeing it would bias the output.
        """

    def draw_several(
        self, rows: Rows, i: int, noise: Noise, position: int, count: int
    ) -> Sequence[tuple[int, Distribution | None]]:
        """Up to `count` different tokens for row i, the first as by `draw`; as many as the row has.

        They become siblings in the draft, all of them and in this order. Their number is decided before they are drawn.
        """

    def verify(self, draft: Draft, rows: Rows, noise: Noise, position: int) -> Outcome:
        """Judge a draft that begins at `position`.

        Reads rows from left to right: none behind a rejected token, and the last one only if the whole draft is
        accepted. Of a tree it reads the first row and those after accepted tokens, no other: `Request.verify` relies
        on that.
        """
