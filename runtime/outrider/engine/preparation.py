"""Makes answers for the loop from prompts and options."""

import json
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from threading import Event
from typing import Any, TypeAlias, cast

from outrider.bundle.manifest import TokenizerEntry
from outrider.config import GenerationConfig
from outrider.decoding.admission import Admission
from outrider.decoding.answer import Answer
from outrider.decoding.delivery import Delivery
from outrider.decoding.request import Request
from outrider.drafters import AnswerStore
from outrider.drafters.controller import ConfidenceThreshold
from outrider.drafters.drafter_registry import DrafterRegistry
from outrider.engine.reasoning import Reasoning
from outrider.errors import OptionError, RequestError, nearest
from outrider.inputs.encoder_input import adapt_config, decode_text, read_prompt, rules_of
from outrider.inputs.text import TextStream, Tokenizer
from outrider.inputs.tools import ToolCallDelta, ToolFormat, dropped_markers, keep_markers, source_of_calls
from outrider.inputs.tools.stream import joined
from outrider.inputs.vision import Vision, check_images, has_images
from outrider.inputs.vision.prompts import PartsTokenizer
from outrider.models.kv import Fetched, PrefixStore
from outrider.models.tuning.loading import LoadedModel
from outrider.tokens.grammar import Grammars, GrammarSource
from outrider.tokens.sampling import LogitsSampler
from outrider.tokens.verifiers import SAMPLING_VERIFIERS, Greedy
from outrider.types import (
    NO_PROMPT,
    ChatTokenizer,
    Noise,
    Prompt,
    TextTokenizer,
    TokenSequence,
    Verifier,
    embed_keys,
    num_common_tokens,
)

AnyPrompt: TypeAlias = str | Sequence[Mapping[str, Any]] | Sequence[int] | Prompt


class Uncompiled(Exception):
    """A request's grammar is yet to be compiled."""

    def __init__(self, source: GrammarSource) -> None:
        super().__init__()
        self.source = source


@dataclass(frozen=True, slots=True)
class Preparation:
    """Checks a prompt and its options, and makes the answer that is to be decoded.

        answer = preparation.answer("Why is the sky blue?", config)

    loaded: the models by role, including "main". special: the bundle's special tokens. grammars: compiles those of
    requests. adapters: by name a hash of each adapter that is loaded. store, prefixes: where answers and prefixes are
    stored. reuse: whether requests start from cached prefixes and publish their own. vision: of a main model that sees
    images.
    """

    loaded: dict[str, LoadedModel]
    tokenizer: TextTokenizer
    special: TokenizerEntry
    admission: Admission
    registry: DrafterRegistry
    grammars: Grammars
    adapters: Mapping[str, str]
    store: AnswerStore | None = None
    prefixes: PrefixStore | None = None
    reuse: bool = True
    vision: Vision | None = None

    def answer(
        self,
        prompt: AnyPrompt,
        config: GenerationConfig,
        *,
        chat_template: bool = True,
        cancel: Event | None = None,
        at_once: bool = False,
        prompt_progress: bool = False,
        overlaps: bool = False,
        compiles: bool = True,
        fits: bool = False,
    ) -> Answer:
        """Make an answer. at_once: its text is only read at the end. overlaps: draft models draft ahead.

        prompt_progress: its reader is told how far the prompt is read.

        fits: an answer for which there is less room than max_new_tokens gets as many as there are.

        Raises:
            Uncompiled: for a grammar that is to be compiled first, unless `compiles`.
            OptionError: for a bad value, or one that does not fit the model or the drafter.
            RequestError: when the prompt cannot be tokenized, or does not fit.
        """
        created = time.perf_counter()
        if cancel is not None and (isinstance(cancel, type) or not callable(getattr(cancel, "is_set", None))):
            raise OptionError(f"cancel={cancel!r} has no is_set() to ask. Pass a threading.Event.")
        encoder = self.loaded["main"].spec.model.encoder
        if encoder is not None:
            prompt = read_prompt(prompt, encoder, self.tokenizer)
            config = adapt_config(config, encoder, prompt.token_ids)
            chat_template = False
        form = self._tool_format(config)
        given, messages = self._laid_out(config), prompt
        if not isinstance(prompt, Prompt):
            prompt = self._with_images(prompt, chat_template, given) or prompt
        whole = prompt if isinstance(prompt, Prompt) else NO_PROMPT
        if encoder is None:
            whole.check_embeds(self.loaded["main"].backend)
        if whole.adapter is not None:
            if config.adapter not in (None, whole.adapter):
                raise OptionError(
                    f"The prompt is for the adapter '{whole.adapter}', and adapter={config.adapter!r}. Leave one out."
                )
            config = config.replace(adapter=whole.adapter)
        token_ids = self._encode(prompt, chat_template, given)
        rules = rules_of(encoder, token_ids, self.special.eos_token_ids) if encoder else ()
        max_new_tokens = self.admission.check(token_ids, config, fits=fits)
        check_adapter(config.adapter, self.adapters)
        scope = whole.scope
        if config.adapter is not None:
            scope = b"adapter %s " % self.adapters[config.adapter].encode() + scope
        long_from = self.loaded["main"].backend.capabilities.long_from
        scope = Prompt((), scope).of_length(len(token_ids) + max_new_tokens, long_from).scope
        policy, num_assistant_tokens = self.registry.policy_for(config)
        threshold = config.assistant_confidence_threshold
        seed = secrets.randbits(63) if config.seed is None else config.seed
        eos_token_ids = () if config.ignore_eos else self.special.eos_token_ids
        stop_token_ids = frozenset(config.stop_token_ids).union(self._special_stops(config))
        end_token_ids = stop_token_ids.union(eos_token_ids)
        reasoning = None
        if chat_template and encoder is None:
            reasoning = Reasoning.of(self.tokenizer, token_ids, _written(messages, whole, config))
        source = self._source(config, form)
        is_free = config.offered_tools and config.tool_choice == "auto" and config.json_schema is None
        if source is not None and reasoning is not None and not is_free:  # whose grammar has room for it
            source = reasoning.before(source, form if source.option == "tools" else None)
        if not (compiles or source is None or self.grammars.is_quick(source)):
            raise Uncompiled(source)
        grammar = None if source is None else self.grammars.new_state(source)
        budget = None
        if reasoning is not None:
            is_forced = source is not None and source.option == "tools" and not is_free
            budget = reasoning.budget(config.reasoning_budget, eos_token_ids, form, forced=is_forced)
        splitter = None if reasoning is None or config.stop_in_reasoning else reasoning.splitter
        markers = (*(form.markers if form else ()), *(reasoning.form.markers if reasoning else ()))
        decode = keep_markers(markers, self.tokenizer) if markers else self.tokenizer.decode
        if encoder is not None:
            decode = decode_text(encoder, decode)
        until = _end_of_calls(config, form)
        text = TextStream(
            decode, config.stop, stop_token_ids if splitter else (), until=until, at_once=at_once, reasoning=splitter
        )
        request = Request(
            Prompt(token_ids, scope, whole.embeds, whole.answers, adapter=config.adapter, source=whole.source),
            verifier=_verifier(config),
            noise=Noise(seed),
            max_new_tokens=max_new_tokens,
            eos_token_ids=frozenset(eos_token_ids) if splitter else end_token_ids,
            policy=policy,
            num_assistant_tokens=num_assistant_tokens,
            ahead=overlaps and policy is not None and policy.goes_ahead,
            rule=None if threshold is None else ConfidenceThreshold(threshold),
            sampled=config.temperature > 0,
            exact=self.loaded["main"].backend.capabilities.bit_exact_batching and config.sampling_is_invariant,
            reuse=self.reuse,
            name_of=self.registry.name_of,
            created=created,
        )
        references = self.registry.texts(config, policy, whole.source)
        answer = Answer(
            request,
            TokenSequence.of(request.prompt, references, earlier_answers=config.earlier_answers),
            LogitsSampler(config, token_ids, end_token_ids=end_token_ids, grammar=grammar, rules=rules, budget=budget),
            Delivery(
                text,
                cancel,
                thinks=reasoning is not None and reasoning.is_open,
                save=self.store.add_soon if self.store else None,
                prompt_progress=prompt_progress,
            ),
            grammar,
            logprobs=None if config.logprobs is None else [],
        )
        answer.stats.num_prompt_tokens = len(token_ids)
        if self.reuse and self.loaded["main"].backend.capabilities.states:
            opening = whole.opening if whole is prompt else self._opening(prompt, token_ids, given)
            answer.fetched = self._noted(request.prompt, opening)
        if self.prefixes is not None:
            answer.fetched += self._fetch(self.prefixes, answer)
        return answer

    def encode_prompt(self, prompt: AnyPrompt, config: GenerationConfig, *, chat_template: bool = True) -> list[int]:
        """The tokens of a prompt as `answer` lays it out."""
        given = self._laid_out(config)
        if not isinstance(prompt, Prompt):
            prompt = self._with_images(prompt, chat_template, given) or prompt
        return self._encode(prompt, chat_template, given)

    def render(self, messages: Sequence[Mapping[str, Any]], config: GenerationConfig) -> str:
        """The text of messages as `answer` lays them out."""
        given = self._laid_out(config) | ({"parts": True} if self.vision else {})
        text = cast("ChatTokenizer", self.tokenizer).render(messages, **given)
        return "".join(self.tokenizer.parts(text)) if isinstance(self.tokenizer, Tokenizer) else text

    def _encode(self, prompt: AnyPrompt, chat_template: bool, given: dict[str, Any]) -> list[int]:
        text = prompt.token_ids if isinstance(prompt, Prompt) else prompt
        return list(map(int, self.tokenizer.encode_prompt(text, chat_template=chat_template, **given)))

    def _opening(self, prompt: AnyPrompt, token_ids: Sequence[int], given: dict[str, Any]) -> int:
        """How many of a prompt's tokens are those of its first message, if that is not the user's."""
        first = prompt[:1] if isinstance(prompt, list) and len(prompt) > 1 else []
        if not first or not isinstance(first[0], Mapping) or first[0].get("role") not in ("system", "developer"):
            return 0
        try:
            options = {name: value for name, value in given.items() if name != "continuing"}
            return num_common_tokens(self.tokenizer.encode_prompt(first, **options), token_ids)
        except (OptionError, RequestError):  # a template that refuses it alone
            return 0

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

    def read_images(
        self, prompt: AnyPrompt, config: GenerationConfig, *, chat_template: bool = True, gone: Event | None = None
    ) -> AnyPrompt:
        """A prompt with its images encoded; one without images as it is. gone: ends it before the next image.

        Raises as `request`.
        """
        if isinstance(prompt, Prompt) or not has_images(prompt):
            return prompt
        given = self._laid_out(config)
        return self._with_images(prompt, chat_template, given | {"gone": gone}) or prompt

    def _with_images(self, prompt: Any, chat_template: bool, given: dict[str, Any]) -> Prompt | None:
        """A prompt with its images' embeddings; None for one that is laid out as text."""
        check_images(prompt, self.vision)
        if has_images(prompt) and not chat_template:
            raise RequestError(
                "The prompt has an image, which the chat template has to place. Leave out chat_template=False."
            )
        is_text = isinstance(prompt, str) and chat_template and bool(self.tokenizer.chat_template)
        if self.vision is None or not (is_text or _are_messages(prompt)):
            return None
        return self.vision.prompt(prompt, cast("PartsTokenizer", self.tokenizer), **given)

    def _source(self, config: GenerationConfig, form: ToolFormat | None) -> GrammarSource | None:
        """The grammar that the answer follows; None for any text."""
        answer = GrammarSource.of(config)
        free = config.tool_choice == "auto"
        if form is None or (free and answer is None and not config.has_strict_tools):
            return answer
        only = None if free or config.tool_choice == "required" else str(config.tool_choice)
        once = not config.parallel_tool_calls
        schema = json.loads(answer.text) if free and answer else None
        return source_of_calls(form, config.tools, only, self.tokenizer, once=once, free=free, schema=schema)

    def _laid_out(self, config: GenerationConfig) -> dict[str, Any]:
        """How the tokenizer lays a prompt out, as far as the request says it: an app's may know nothing of the rest."""
        given: dict[str, Any] = {"tools": config.offered_tools} if self._tool_format(config) else {}
        if config.chat_template_kwargs:
            given["variables"] = config.chat_template_kwargs
        return given | ({"continuing": True} if config.continue_final_message else {})

    def _special_stops(self, config: GenerationConfig) -> list[int]:
        """The tokens of stop strings that are special tokens, which no text has."""
        named = [stop for stop in config.stop if stop[0] + stop[-1] in ("<>", "[]")]
        return list(dropped_markers(named, self.tokenizer))

    def _tool_format(self, config: GenerationConfig) -> ToolFormat | None:
        """How the model writes calls of the request's tools; None if it has none."""
        if not config.offered_tools:
            return None
        form = ToolFormat.of_tokenizer(self.tokenizer)
        if form is None:
            raise OptionError(
                "tools need a chat template that has a known format for them, and this bundle's has none. Use a model "
                "that was trained to call functions, or describe them in the prompt."
            )
        return form


def check_adapter(name: str | None, loaded: Iterable[str]) -> None:
    """Raise OptionError for an adapter that is not loaded."""
    known = tuple(loaded)
    if name is not None and name not in known:
        remedy = nearest(name, known) if known else "Add one: outrider add BUNDLE FOLDER --name NAME."
        names = ", ".join(map(repr, known)) or "none"
        raise OptionError(f"There is no adapter '{name}' here: loaded are {names}. {remedy}")


def _written(prompt: Any, whole: Prompt, config: GenerationConfig) -> str | Sequence[int]:
    """What of the answer a prompt ends with, as text or tokens. whole: the prompt, if it is one already."""
    if whole.answers and whole.answers[-1][1] == len(whole.token_ids):
        return whole.token_ids[whole.answers[-1][0] :]
    if not (config.continue_final_message and _are_messages(prompt)):
        return ""
    last = prompt[-1]
    content = last["content"]
    text: str = content if isinstance(content, str) else content[-1].get("text", "")
    return text or last.get("reasoning_content", "")


def _are_messages(prompt: object) -> bool:
    """Whether a prompt is a list of messages, not of token ids."""
    return isinstance(prompt, list | tuple) and bool(prompt) and all(isinstance(each, Mapping) for each in prompt)


def _end_of_calls(config: GenerationConfig, form: ToolFormat | None) -> Callable[[str], bool] | None:
    """Is given each new text, and says whether the one call that is wanted is complete.

    Where calls are required, small models repeat the same one: the answer ends then.
    """
    repeats = config.parallel_tool_calls and config.tool_choice == "required"
    if form is None or (config.parallel_tool_calls and not repeats):
        return None
    calls = form.stream(max_calls=None if repeats else 1)
    pieces: list[str | ToolCallDelta] = []

    def is_over(text: str) -> bool:
        new = calls.push(text)
        if not repeats:
            return calls.is_over
        pieces.extend(new)
        made = joined(pieces)[1] if new and not calls.is_in_call else []
        return made[-1] in made[:-1] if made else False

    return is_over


def _verifier(config: GenerationConfig) -> Verifier:
    if not config.temperature:
        return Greedy()
    options = {} if config.acceptance_threshold is None else {"threshold": config.acceptance_threshold}
    return SAMPLING_VERIFIERS[config.sampling](**options)
