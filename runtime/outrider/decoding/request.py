"""What one request asks for."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from outrider.types import Drafter, DraftPolicy, DraftRule, Noise, Prompt, Verifier


@dataclass(frozen=True, eq=False, slots=True)
class Request:
    """A prompt, and how its answer is chosen and drafted. Nothing of it changes while it is answered."""

    prompt: Prompt
    verifier: Verifier
    noise: Noise
    max_new_tokens: int
    eos_token_ids: frozenset[int] = frozenset()
    policy: DraftPolicy | None = None  # chooses the drafter of each round; None: plain decoding
    num_assistant_tokens: int = 0  # most draft tokens per round
    ahead: bool = False  # whether drafters draft ahead for it
    rule: DraftRule | None = None  # may end a draft earlier
    sampled: bool = False  # whether tokens depend on the noise
    exact: bool = False  # whether tokens do not depend on drafts or on the batch
    waits: bool = False  # whether its answer waits for rows as a prompt does
    reuse: bool = True  # starts from cached prefixes, and publishes its own
    name_of: Callable[[Drafter], str] = lambda drafter: type(drafter).__name__
    created: float = field(default_factory=time.perf_counter)

    @property
    def drafters(self) -> Sequence[Drafter]:
        """All drafters that may draft for it."""
        return self.policy.drafters if self.policy is not None else ()
