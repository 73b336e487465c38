"""The values that travel between the parts of the runtime, and the roles that the parts play.

One round, for one sequence::

    Drafter.propose ──Draft──▶ Backend.submit ──Step (rows of logits)──▶ Verifier.verify ──Outcome──▶ commit
           ◀───────────────────────────────Committed─────────────────────────────────────┘

The roles know these types and not each other; `outrider.engine` wires them together.
"""

from outrider.types.backend import (
    NO_PROMPT,
    Backend,
    CacheUse,
    Capabilities,
    Chunk,
    CompiledModel,
    Exactness,
    FixedShape,
    Logits,
    LogitsRow,
    PaddedBackend,
    Pending,
    Prompt,
    Rounding,
    RowRule,
    Slot,
    Span,
    Step,
    TopLogits,
)
from outrider.types.calls import Call, CallObserver
from outrider.types.decoding import (
    NO_DRAFT,
    AheadDrafter,
    Committed,
    Distribution,
    Draft,
    Drafter,
    DraftRequest,
    DraftRule,
    Noise,
    Outcome,
    Requirements,
    Rows,
    Sampler,
    Sequence,
    TextTokenizer,
    TokenLogprobs,
    Verifier,
)

__all__ = [
    "NO_DRAFT",
    "NO_PROMPT",
    "AheadDrafter",
    "Backend",
    "CacheUse",
    "Call",
    "CallObserver",
    "Capabilities",
    "Chunk",
    "Committed",
    "CompiledModel",
    "Distribution",
    "Draft",
    "DraftRequest",
    "DraftRule",
    "Drafter",
    "Exactness",
    "FixedShape",
    "Logits",
    "LogitsRow",
    "Noise",
    "Outcome",
    "PaddedBackend",
    "Pending",
    "Prompt",
    "Requirements",
    "Rounding",
    "RowRule",
    "Rows",
    "Sampler",
    "Sequence",
    "Slot",
    "Span",
    "Step",
    "TextTokenizer",
    "TokenLogprobs",
    "TopLogits",
    "Verifier",
]
