"""Makes answers for the loop of requests that are laid out."""

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Event

from outrider.config import GenerationConfig
from outrider.decoding.answer import Answer
from outrider.decoding.delivery import Delivery
from outrider.decoding.request import Request
from outrider.drafters import AnswerStore
from outrider.drafters.controller import ConfidenceThreshold
from outrider.drafters.drafter_registry import DrafterRegistry
from outrider.engine.prompts import LaidOut, Prompts
from outrider.errors import OptionError
from outrider.inputs.encoder_input import decode_text
from outrider.inputs.reasoning.stream import Splitter
from outrider.inputs.text import TextStream
from outrider.inputs.tools import ToolFormat, dropped_markers, keep_markers
from outrider.models.kv import Fetched, PrefixStore
from outrider.models.tuning.loading import LoadedModel
from outrider.tokens.grammar import Grammars
from outrider.tokens.sampling import LogitsSampler
from outrider.tokens.sampling.reasoning_budget import ReasoningBudget
from outrider.tokens.verifiers import SAMPLING_VERIFIERS, Greedy
from outrider.types import Noise, Prompt, TokenSequence, Verifier, embed_keys


@dataclass(frozen=True, slots=True)
class Preparation:
    """Makes the answers that are to be decoded, of requests that are laid out.

        laid = preparation.prompts.lay_out("Why is the sky blue?", config)
        answer = preparation.answer(laid)

    loaded: the models by role, including "main". grammars: compiles those of requests. store, prefixes: where answers
    and prefixes are stored. reuse: whether requests start from cached prefixes and publish their own.
    """

    loaded: dict[str, LoadedModel]
    prompts: Prompts
    registry: DrafterRegistry
    grammars: Grammars
    store: AnswerStore | None = None
    prefixes: PrefixStore | None = None
    reuse: bool = True

    def answer(
        self,
        laid: LaidOut,
        *,
        cancel: Event | None = None,
        at_once: bool = False,
        prompt_progress: bool = False,
        overlaps: bool = False,
    ) -> Answer:
        """Make an answer. at_once: its text is only read at the end. overlaps: draft models draft ahead.

        prompt_progress: its reader is told how far the prompt is read.

        Raises:
            OptionError: for a bad value, or one that does not fit the drafter.
        """
        if cancel is not None and (isinstance(cancel, type) or not callable(getattr(cancel, "is_set", None))):
            raise OptionError(f"cancel={cancel!r} has no is_set() to ask. Pass a threading.Event.")
        config, reasoning = laid.config, laid.reasoning
        eos_token_ids = () if config.ignore_eos else self.prompts.special.eos_token_ids
        stop_token_ids = frozenset(config.stop_token_ids).union(self._special_stops(config))
        end_token_ids = stop_token_ids.union(eos_token_ids)
        splitter = None if reasoning is None or config.stop_in_reasoning else reasoning.splitter
        request = self._request(laid, frozenset(eos_token_ids) if splitter else end_token_ids, overlaps=overlaps)
        grammar = None if laid.source is None else self.grammars.new_state(laid.source)
        references = self.registry.texts(config, request.policy, laid.prompt.source)
        answer = Answer(
            request,
            TokenSequence.of(request.prompt, references, earlier_answers=config.earlier_answers),
            LogitsSampler(
                config, laid.prompt.token_ids, end_token_ids=end_token_ids, grammar=grammar, rules=laid.rules,
                budget=self._budget(laid, eos_token_ids),
            ),
            Delivery(
                self._text(laid, splitter, stop_token_ids, at_once=at_once),
                cancel,
                thinks=reasoning is not None and reasoning.is_open,
                save=self.store.add_soon if self.store else None,
                prompt_progress=prompt_progress,
            ),
            grammar,
            logprobs=None if config.logprobs is None else [],
        )  # fmt: skip
        answer.stats.num_prompt_tokens = len(laid.prompt.token_ids)
        answer.fetched = self._noted(laid.prompt, laid.opening)
        if self.prefixes is not None:
            answer.fetched += self._fetch(self.prefixes, answer)
        return answer

    def _request(self, laid: LaidOut, eos_token_ids: frozenset[int], *, overlaps: bool) -> Request:
        """What of an answer does not change. eos_token_ids: what ends it, wherever they stand."""
        config, threshold = laid.config, laid.config.assistant_confidence_threshold
        policy, num_assistant_tokens = self.registry.policy_for(config)
        return Request(
            laid.prompt,
            verifier=_verifier(config),
            noise=Noise(secrets.randbits(63) if config.seed is None else config.seed),
            max_new_tokens=laid.max_new_tokens,
            eos_token_ids=eos_token_ids,
            policy=policy,
            num_assistant_tokens=num_assistant_tokens,
            ahead=overlaps and policy is not None and policy.goes_ahead,
            rule=None if threshold is None else ConfidenceThreshold(threshold),
            sampled=config.temperature > 0,
            exact=self.loaded["main"].backend.capabilities.bit_exact_batching and config.sampling_is_invariant,
            reuse=self.reuse,
            name_of=self.registry.name_of,
            created=laid.created,
        )

    def _budget(self, laid: LaidOut, eos_token_ids: Sequence[int]) -> ReasoningBudget | None:
        """What ends the reasoning, if the request limits it."""
        if laid.reasoning is None:
            return None
        is_forced = laid.source is not None and laid.source.option == "tools" and not laid.is_free
        return laid.reasoning.budget(laid.config.reasoning_budget, eos_token_ids, laid.form, forced=is_forced)

    def _text(
        self, laid: LaidOut, splitter: Splitter | None, stop_token_ids: frozenset[int], *, at_once: bool
    ) -> TextStream:
        """What makes an answer's text of its tokens, and says where it stops."""
        config, form, tokenizer = laid.config, laid.form, self.prompts.tokenizer
        markers = (*(form.markers if form else ()), *(laid.reasoning.form.markers if laid.reasoning else ()))
        decode = keep_markers(markers, tokenizer) if markers else tokenizer.decode
        if (encoder := self.loaded["main"].spec.model.encoder) is not None:
            decode = decode_text(encoder, decode)
        until, ends = _end_of_calls(config, form), stop_token_ids if splitter else ()
        return TextStream(decode, config.stop, ends, until=until, at_once=at_once, reasoning=splitter)

    def _noted(self, prompt: Prompt, opening: int) -> tuple[Fetched, ...]:
        """Tells the main model's prefix cache that other prompts may begin with a prompt's first tokens, too."""
        prefixes = self.loaded["main"].backend.prefixes
        if prefixes is None or not opening:
            return ()
        common = embed_keys(prompt.token_ids[:opening], prompt.embeds)
        return (Fetched(prefixes, (), prompt.scope, [], common=common),)

    def _fetch(self, prefixes: PrefixStore, answer: Answer) -> tuple[Fetched, ...]:
        """What files have of an answer's prompt, for the main model and its draft models."""
        found = [prefixes.fetch("main", answer.request.prompt)]
        for name, model in self.registry.models.items():
            if model in answer.request.drafters and (own := model.prompt_of(answer.sequence)) is not None:
                found.append(prefixes.fetch(name, own))
        return tuple(each for each in found if each is not None)

    def _special_stops(self, config: GenerationConfig) -> list[int]:
        """The tokens of stop strings that are special tokens, which no text has."""
        named = [stop for stop in config.stop if stop[0] + stop[-1] in ("<>", "[]")]
        return list(dropped_markers(named, self.prompts.tokenizer))


def _end_of_calls(config: GenerationConfig, form: ToolFormat | None) -> Callable[[str], bool] | None:
    """Is given each new text, and says whether the one call that is wanted is complete.

    Where calls are required, small models repeat the same one: the answer ends then.
    """
    repeats = config.parallel_tool_calls and config.tool_choice == "required"
    if form is None or (config.parallel_tool_calls and not repeats):
        return None
    calls = form.stream(max_calls=None if repeats else 1, once=repeats)

    def is_over(text: str) -> bool:
        calls.push(text)
        return calls.is_over

    return is_over


def _verifier(config: GenerationConfig) -> Verifier:
    if not config.temperature:
        return Greedy()
    options = {} if config.acceptance_threshold is None else {"threshold": config.acceptance_threshold}
    return SAMPLING_VERIFIERS[config.sampling](**options)
