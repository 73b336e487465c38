"""The result of a request."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outrider.metrics import Stats
    from outrider.types import TokenLogprobs


@dataclass(frozen=True, slots=True)
class Result:
    """A whole answer.

    text: without special tokens, cut before a stop string. token_ids: ends with the end-of-sequence id if the model
    gave one. finish_reason: "stop", "length" or "cancelled". seed: of the noise; None when greedy. lossless: False for
    a lossy mode, whose text does not have the main model's distribution. exact: whether the request gives these tokens
    with any drafter or none, alone or in a batch, as measured at load; False for sampling whose text depends on drafts,
    and if the main model's rows depend on the batch. logprobs: one for each of token_ids; None unless requested.
    """

    text: str
    token_ids: list[int]
    finish_reason: str
    stats: Stats
    seed: int | None
    lossless: bool
    exact: bool = False
    logprobs: list[TokenLogprobs] | None = None

    def as_dict(self) -> dict[str, Any]:
        """All fields, for JSON."""
        return {
            "text": self.text,
            "token_ids": self.token_ids,
            "finish_reason": self.finish_reason,
            "seed": self.seed,
            "lossless": self.lossless,
            "exact": self.exact,
            "logprobs": None if self.logprobs is None else [asdict(token) for token in self.logprobs],
            "stats": self.stats.as_dict(),
        }


@dataclass(frozen=True, slots=True)
class TextChunk:
    """The text that one or more rounds added to an answer.

    stats: of the request so far. result: None until the last chunk, whose text may be empty.
    """

    text: str
    stats: Stats
    result: Result | None = None
