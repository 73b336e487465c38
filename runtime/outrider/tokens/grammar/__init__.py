"""Answers that follow a grammar: a JSON schema, a regular expression, or a grammar in Lark or GBNF, through llguidance.

    grammars = Grammars(bundle.tokenizer_path, vocab_size, eos_token_ids)
    state = grammars.new_state(Source("regex", "[0-9]+"))
    sampler = LogitsSampler(config, prompt, grammar=state)    # bans what the grammar does not allow
    state.forced([], most=8)                                  # drafts that cost nothing

A mask is a function of the answer's tokens alone, so texts do not depend on drafts. Draft models see the same masks.

Source: Moskal et al. 2025, llguidance (https://github.com/guidance-ai/llguidance).
"""

from outrider.tokens.grammar.cache import Grammars
from outrider.tokens.grammar.kinds import JSON_STYLE, GrammarSource
from outrider.tokens.grammar.limits import GrammarLimits, check_length
from outrider.tokens.grammar.schemas import say_once, widened, with_real_dates
from outrider.tokens.grammar.state import GrammarState, fill_masks

__all__ = [
    "JSON_STYLE", "GrammarLimits", "GrammarSource", "GrammarState", "Grammars", "check_length", "fill_masks",
    "say_once", "widened", "with_real_dates",
]  # fmt: skip
