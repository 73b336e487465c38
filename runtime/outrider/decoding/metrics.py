"""Counts and times of a request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class Stats:
    """Counts and times of one request.

    Definitions follow vLLM's `SpecDecodingStats`: a draft is a round in which tokens were proposed. Tokens of a stop
    string are counted. Seconds are wall time; a round that several sequences share counts in full for each of them.

    All tokens of a tree are draft tokens, and only those of one path can be accepted. So its acceptance rate is the
    useful share of what was verified; tokens per round compare it with a chain. A token's position is that on its path.
    """

    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0  # prompt tokens taken from the main model's prefix cache
    num_read_tokens: int = 0  # prompt tokens that are in the main model's cache so far, cached ones included
    num_generated_tokens: int = 0
    num_rounds: int = 0  # calls of the main model after the prompt was read
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_tokens_per_position: list[int] = field(default_factory=list)
    num_draft_tokens_per_round: list[int] = field(default_factory=list)
    num_accepted_tokens_per_round: list[int] = field(default_factory=list)
    time_to_first_token: float = 0.0  # from the request's start, waiting included
    decode_seconds: float = 0.0  # from the first token to the last
    draft_seconds: float = 0.0  # of decoding rounds: the draft model's calls
    check_seconds: float = 0.0  # the target passes
    ahead_seconds: float = 0.0  # the draft model's calls during target passes
    host_seconds: float = 0.0  # everything else: n-gram lookup, sampling, verification, text

    @property
    def acceptance_rate(self) -> float:
        """Accepted tokens / draft tokens; 0 if there were none."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens a drafted round yields: 1 + accepted tokens / drafts."""
        return 1 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else 1.0

    @property
    def tokens_per_round(self) -> float:
        """Tokens per call of the main model, after the first token."""
        return (self.num_generated_tokens - 1) / self.num_rounds if self.num_rounds else 1.0

    @property
    def tokens_per_second(self) -> float:
        """Decoded tokens per second after the first token; 0 for a single token."""
        return (self.num_generated_tokens - 1) / self.decode_seconds if self.decode_seconds else 0.0

    @property
    def progress(self) -> str:
        """How far the prompt is read, for people."""
        return f"{self.num_read_tokens:,} of {self.num_prompt_tokens:,} prompt tokens read"

    def __str__(self) -> str:
        """In one line, for people."""
        line = f"{self.num_generated_tokens} tokens"
        if self.decode_seconds:  # which is known at the end
            line += f", {self.tokens_per_second:.1f} a second"
        if not self.num_draft_tokens:
            return line
        accepted = f"{self.num_accepted_tokens} of {self.num_draft_tokens} draft tokens accepted"
        return f"{line}, {self.tokens_per_round:.2f} a round; {accepted} ({self.acceptance_rate:.0%})"

    def count_round(self, depths: Sequence[int], num_accepted_tokens: int) -> None:
        """Count one target pass and its accepted tokens. depths: for each draft token how many are before it."""
        num_draft_tokens = len(depths)
        self.num_rounds += 1
        self.num_draft_tokens_per_round.append(num_draft_tokens)
        self.num_accepted_tokens_per_round.append(num_accepted_tokens)
        if not num_draft_tokens:
            return
        self.num_drafts += 1
        self.num_draft_tokens += num_draft_tokens
        self.num_accepted_tokens += num_accepted_tokens
        positions = self.num_accepted_tokens_per_position
        positions.extend([0] * (max(depths) + 1 - len(positions)))
        for i in range(num_accepted_tokens):
            positions[i] += 1

    def as_dict(self) -> dict[str, float | list[int]]:
        """All counts and the figures derived from them, for JSON."""
        return {name: getattr(self, name) for name in (*self.__dataclass_fields__, *_DERIVED)}


_DERIVED = ("acceptance_rate", "mean_acceptance_length", "tokens_per_round", "tokens_per_second")
