"""The values that travel between the parts of the runtime, and the roles that the parts play.

One round, for one sequence::

    DraftPolicy.choose ──Turn──▶ Drafter.propose ──Draft──▶ Backend.submit ──Step──▶ Verifier.verify ──Outcome──▶ commit
           ◀────────────────────────◀───────────────────Committed────────────────────────────────────────────┘

The roles know these types and not each other; `outrider.engine.assembly` wires them together.
"""

from outrider.types.backend import (
    Backend,
    BenchmarkSlot,
    CacheUse,
    Call,
    CallObserver,
    Chunk,
    CompiledModel,
    ListedLogits,
    Logits,
    LogitsRow,
    PaddedBackend,
    Pending,
    Slot,
    Step,
)
from outrider.types.cache_keys import UNKNOWN_KEY, CacheKey, answer_keys, embed_keys, num_common_tokens, prompt_keys
from outrider.types.capabilities import Capabilities, Exactness, FixedShape, Rounding, RowCost, RowRule, SteadyRows
from outrider.types.decoding import NO_DRAFT, Draft, Outcome, Rows, Sampler, TokenLogprobs, TokenSequence, Verifier
from outrider.types.drafting import (
    Committed,
    Copier,
    Drafter,
    DraftPolicy,
    DraftRequest,
    DraftRule,
    Guess,
    Proposer,
    Requirements,
    Turn,
)
from outrider.types.layout import Layout
from outrider.types.prompt import LONG_POSITION, NO_PROMPT, EncoderSource, Prompt, Span, undivided
from outrider.types.randomness import Distribution, Noise
from outrider.types.tokenizers import ChatTokenizer, TextTokenizer

__all__ = [
    "LONG_POSITION", "NO_DRAFT", "NO_PROMPT", "UNKNOWN_KEY", "Backend", "BenchmarkSlot", "CacheKey", "CacheUse", "Call",
    "CallObserver", "Capabilities", "ChatTokenizer", "Chunk", "Committed", "CompiledModel", "Copier", "Distribution",
    "Draft", "DraftPolicy", "DraftRequest", "DraftRule", "Drafter", "EncoderSource", "Exactness", "FixedShape", "Guess",
    "Layout", "ListedLogits", "Logits", "LogitsRow", "Noise", "Outcome", "PaddedBackend", "Pending", "Prompt",
    "Proposer", "Requirements", "Rounding", "RowCost", "RowRule", "Rows", "Sampler", "Slot", "Span", "SteadyRows",
    "Step", "TextTokenizer", "TokenLogprobs", "TokenSequence", "Turn", "Verifier", "answer_keys", "embed_keys",
    "num_common_tokens", "prompt_keys", "undivided",
]  # fmt: skip
