"""Lays out the prompts of requests: as tokens, with images, an adapter and the grammar that the answer follows."""

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from threading import Event
from typing import Any, TypeAlias, cast

from outrider.bundle.manifest import TokenizerEntry
from outrider.config import GenerationConfig
from outrider.decoding.admission import Admission
from outrider.engine.reasoning import Reasoning
from outrider.errors import OptionError, RequestError, nearest
from outrider.inputs.encoder_input import adapt_config, read_prompt, rules_of
from outrider.inputs.text import Tokenizer
from outrider.inputs.tools import ToolFormat, source_of_calls
from outrider.inputs.vision import Vision, check_images, has_images
from outrider.inputs.vision.prompts import PartsTokenizer
from outrider.models.tuning.loading import LoadedModel
from outrider.tokens.grammar import GrammarSource
from outrider.tokens.sampling import Processor
from outrider.types import NO_PROMPT, ChatTokenizer, Prompt, TextTokenizer, num_common_tokens

AnyPrompt: TypeAlias = str | Sequence[Mapping[str, Any]] | Sequence[int] | Prompt


@dataclass(frozen=True, slots=True)
class LaidOut:
    """A request that is checked and laid out, before an answer is made of it."""

    created: float  # seconds of `time.perf_counter`, before its prompt was read
    prompt: Prompt
    config: GenerationConfig  # with the prompt's adapter, and what an encoder changes
    max_new_tokens: int
    opening: int  # tokens of the first message that other prompts may begin with; 0: not looked for
    rules: Sequence[Processor]  # of an encoder-decoder model's tokens
    form: ToolFormat | None  # of calls
    reasoning: Reasoning | None
    source: GrammarSource | None  # the grammar that the answer follows; None for any text

    @property
    def is_free(self) -> bool:
        """Whether the answer may have calls, and anything else."""
        config = self.config
        return bool(config.offered_tools) and config.tool_choice == "auto" and config.json_schema is None


@dataclass(frozen=True, slots=True)
class Prompts:
    """Lays out prompts for a main model.

        laid = prompts.lay_out("Why is the sky blue?", config)

    special: the bundle's special tokens. adapters: by name a hash of each adapter that is loaded. vision: of a main
    model that sees images. finds_openings: whether prompts begin with states of earlier ones.
    """

    loaded: dict[str, LoadedModel]  # by role; emptied when the engine is closed, which frees the models
    tokenizer: TextTokenizer
    special: TokenizerEntry
    admission: Admission
    adapters: Mapping[str, str]
    vision: Vision | None = None
    finds_openings: bool = False

    def lay_out(
        self, prompt: AnyPrompt, config: GenerationConfig, *, chat_template: bool = True, fits: bool = False
    ) -> LaidOut:
        """Check a prompt and its options.

        fits: an answer for which there is less room than max_new_tokens gets as many as there are.

        Raises:
            OptionError: for a bad value, or one that does not fit the model.
            RequestError: when the prompt cannot be tokenized, or does not fit.
        """
        created = time.perf_counter()
        main = self.loaded["main"]
        encoder = main.spec.model.encoder
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
            whole.check_embeds(main.backend)
        config = self._with_adapter(config, whole)
        token_ids = self._encode(prompt, chat_template, given)
        max_new_tokens = self.admission.check(token_ids, config, fits=fits)
        reasoning = None
        if chat_template and encoder is None:
            reasoning = Reasoning.of(self.tokenizer, token_ids, _written(messages, whole, config))
        opening = 0
        if self.finds_openings:
            opening = whole.opening if whole is prompt else self._opening(prompt, token_ids, given)
        scope = self._scope(whole, config, len(token_ids) + max_new_tokens)
        laid = LaidOut(
            created,
            Prompt(token_ids, scope, whole.embeds, whole.answers, adapter=config.adapter, source=whole.source),
            config,
            max_new_tokens,
            opening,
            rules_of(encoder, token_ids, self.special.eos_token_ids) if encoder else (),
            form,
            reasoning,
            self._source(config, form),
        )
        if laid.source is None or reasoning is None or laid.is_free:  # a free one's grammar has room for reasoning
            return laid
        return replace(laid, source=reasoning.before(laid.source, form if laid.source.option == "tools" else None))

    def _with_adapter(self, config: GenerationConfig, whole: Prompt) -> GenerationConfig:
        """The options with the adapter that the prompt is for."""
        if whole.adapter is not None:
            if config.adapter not in (None, whole.adapter):
                raise OptionError(
                    f"The prompt is for the adapter '{whole.adapter}', and adapter={config.adapter!r}. Leave one out."
                )
            config = config.replace(adapter=whole.adapter)
        check_adapter(config.adapter, self.adapters)
        return config

    def _scope(self, whole: Prompt, config: GenerationConfig, length: int) -> bytes:
        """What else than its tokens a prompt's keys and values depend on. length: of prompt and answer, in tokens."""
        scope = whole.scope
        if config.adapter is not None:
            scope = b"adapter %s " % self.adapters[config.adapter].encode() + scope
        return Prompt((), scope).of_length(length, self.loaded["main"].backend.capabilities.long_from).scope

    def encode_prompt(self, prompt: AnyPrompt, config: GenerationConfig, *, chat_template: bool = True) -> list[int]:
        """The tokens of a prompt as `lay_out` lays it out."""
        given = self._laid_out(config)
        if not isinstance(prompt, Prompt):
            prompt = self._with_images(prompt, chat_template, given) or prompt
        return self._encode(prompt, chat_template, given)

    def render(self, messages: Sequence[Mapping[str, Any]], config: GenerationConfig) -> str:
        """The text of messages as `lay_out` lays them out."""
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

    def read_images(
        self, prompt: AnyPrompt, config: GenerationConfig, *, chat_template: bool = True, gone: Event | None = None
    ) -> AnyPrompt:
        """A prompt with its images encoded; one without images as it is. gone: ends it before the next image.

        Raises as `lay_out`.
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
