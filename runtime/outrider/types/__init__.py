"""The values that travel between the parts of the runtime, and the roles that the parts play.

One round, for one sequence::

    DraftPolicy.choose ──Turn──▶ Drafter.propose ──Draft──▶ Backend.submit ──Step──▶ Verifier.verify ──Outcome──▶ commit
           ◀────────────────────────◀───────────────────Committed────────────────────────────────────────────┘

The roles know these types and not each other; `outrider.engine.assembly` wires them together.
"""

from outrider.types.backend import (
    Backend,
    CacheUse,
    CallCancelled,
    Capabilities,
    Chunk,
    CompiledModel,
    Exactness,
    FixedShape,
    Logits,
    LogitsRow,
    PaddedBackend,
    Pending,
    Rounding,
    RowRule,
    Slot,
    Step,
    TopLogits,
)
from outrider.types.calls import Call, CallObserver
from outrider.types.decoding import (
    NO_DRAFT,
    ChatTokenizer,
    Draft,
    Outcome,
    Rows,
    Sampler,
    Sequence,
    TextTokenizer,
    TokenLogprobs,
    Verifier,
)
from outrider.types.drafting import (
    Committed,
    Drafter,
    DraftPolicy,
    DraftRequest,
    DraftRule,
    Guess,
    Proposer,
    Requirements,
    Turn,
)
from outrider.types.prompt import NO_PROMPT, Prompt, Source, Span, keyed, mark, num_common_tokens, unmarked
from outrider.types.randomness import Distribution, Noise

__all__ = [
    "NO_DRAFT",
    "NO_PROMPT",
    "Backend",
    "CacheUse",
    "Call",
    "CallCancelled",
    "CallObserver",
    "Capabilities",
    "ChatTokenizer",
    "Chunk",
    "Committed",
    "CompiledModel",
    "Distribution",
    "Draft",
    "DraftPolicy",
    "DraftRequest",
    "DraftRule",
    "Drafter",
    "Exactness",
    "FixedShape",
    "Guess",
    "Logits",
    "LogitsRow",
    "Noise",
    "Outcome",
    "PaddedBackend",
    "Pending",
    "Prompt",
    "Proposer",
    "Requirements",
    "Rounding",
    "RowRule",
    "Rows",
    "Sampler",
    "Sequence",
    "Slot",
    "Source",
    "Span",
    "Step",
    "TextTokenizer",
    "TokenLogprobs",
    "TopLogits",
    "Turn",
    "Verifier",
    "keyed",
    "mark",
    "num_common_tokens",
    "unmarked",
]
