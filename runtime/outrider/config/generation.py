"""The options of one request."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from outrider.config.checks import (
    are_biases,
    are_tools,
    are_variables,
    as_biases,
    as_schema,
    as_tool_choice,
    as_tuple,
    as_variables,
    check_grammar,
    is_temperature,
    shown_value,
    value_of,
)
from outrider.config.device import DeviceConfig, SchedulerConfig
from outrider.config.option import (
    Section,
    Values,
    integer,
    number,
    one_of,
    option,
    options_of,
    switch,
    text,
    texts,
    token_ids,
)
from outrider.errors import OptionError, nearest

DEFAULT_MAX_NEW_TOKENS = 512

# How drafts are verified when temperature > 0; see `outrider.tokens.verifiers`.
SAMPLING = {
    "coupled": "lossless, and the same seed always gives the same text",
    "rejection": "lossless in distribution, block by block: accepts the most draft tokens",
    "token-rejection": "lossless in distribution, token by token",
    "threshold": "LOSSY: accepts a token by the ratio of its probabilities",
    "typical": "LOSSY: accepts a token that is likely enough",
}
LOSSY = ("threshold", "typical")

_ALL_PEERS = ("genai", "llamacpp", "ortgenai")

_share = number(0, 1, above=True)
_penalty = number(-2, 2)
_biases = Values(Mapping, "a table of token ids, each once, and numbers from -100 to 100", are_biases, as_biases, float)
_temperature = number(0, 1000, says="0 (greedy), or a number from 0.001 to 1000", allows=is_temperature)
_schema = Values(
    object,
    "a JSON schema as a dict or as its text, or true for any object",
    lambda v: v is True or isinstance(v, Mapping),
    as_schema,
)
_tools = Values(tuple, "a list of functions as in OpenAI's API, each with a name of its own", are_tools, as_tuple)
_variables = Values(
    Mapping,
    "a table of template variables with JSON values, and none of them messages, tools or add_generation_prompt",
    are_variables,
    as_variables,
    value_of,
)
_tool_choice = Values(str, "'auto', 'none', 'required' or a function's name", bool, as_tool_choice)


@dataclass(frozen=True, kw_only=True)
class GenerationConfig(Section):
    """How one request is decoded. The default is greedy.

    Processors run in the order logit bias, repetition penalty, presence and frequency penalty, no-repeat n-gram,
    min_new_tokens, banned tokens, grammar, temperature, top-k, top-p, min-p, typical-p. For their formulas and sources
    see `outrider.tokens.sampling`.
    """

    max_new_tokens: int | None = option(
        None,
        integer(1),
        "longest answer, in tokens",
        means=f"{DEFAULT_MAX_NEW_TOKENS}, or as many as still fit",
        aliases=("n_predict", "num_predict"),
    )
    drafter: str | None = option(
        "auto",
        text("a drafter's name, 'auto'"),
        "one of the engine's drafters: `draft`, `suffix`, `ngram`, or one of `add_drafter`. None: plain decoding",
        means="the fastest by measured costs, chosen each round",
        none_word=True,
        metavar="NAME",
        server=True,
    )
    adapter: str | None = option(
        None,
        text("an adapter's name"),
        "one of the engine's LoRA adapters, to generate the adapted model's text",
        means="no adapter",
        none_word=True,
        metavar="NAME",
        server=True,
        peers=(),
    )
    num_assistant_tokens: int | str = option(
        "auto",
        integer(0, 64),
        "most draft tokens per round. 0: plain decoding",
        means="the fastest number",
        server=True,
    )
    assistant_confidence_threshold: float | None = option(
        None,
        _share,
        "stop drafting after a token whose draft probability is below this. Draft models only",
        means="off",
        server=True,
    )
    max_ngram_size: int = option(
        3, integer(1, 16), "longest n-gram of context that the drafter `ngram` looks up", server=True
    )
    references: tuple[str, ...] = option(
        (),
        texts,
        "texts to copy drafts from, besides prompt and answer. Used by the drafter `suffix`, and by `auto` if it "
        "chooses the draft length or has no draft model; refused by other drafters, ignored in plain decoding",
        flag="",
        server=True,
    )
    earlier_answers: bool = option(
        True,
        switch,
        "whether drafts are also copied from earlier answers, of this and other requests. Set it to False to compare "
        "answers to the same prompt",
        server=True,
    )
    temperature: float = option(
        0.0, _temperature, "temperature of sampling", means="greedy", server=True, peers=_ALL_PEERS
    )
    sampling: str = option(
        "coupled",
        one_of(SAMPLING),
        "how drafts are verified above temperature 0. Lossless: `coupled` (the same seed gives the same text), "
        "`rejection` and "
        "`token-rejection`. Lossy: `threshold` and `typical`",
        metavar="MODE",
        server=True,
    )
    acceptance_threshold: float | None = option(
        None,
        _share,
        "threshold of the lossy modes",
        means="0.5 for `threshold` (a ratio), 0.09 for `typical` (a probability)",
        server=True,
    )
    top_k: int = option(
        0, integer(0), "sample from the k most likely tokens", means="off", server=True, peers=_ALL_PEERS
    )
    top_p: float = option(
        1.0,
        _share,
        "sample from the most likely tokens that together have probability p",
        means="off",
        server=True,
        peers=_ALL_PEERS,
    )
    min_p: float = option(
        0.0,
        number(0, 1),
        "sample from tokens with at least this fraction of the highest probability",
        means="off",
        server=True,
        peers=("genai", "llamacpp"),
    )
    typical_p: float = option(
        1.0,
        _share,
        "locally typical sampling, as in Transformers",
        means="off",
        server=True,
        peers=(),
        aliases=("typ_p", "typical"),
    )
    repetition_penalty: float = option(
        1.0,
        number(0.01, 100),
        "penalty for tokens of prompt and answer, as in Transformers",
        means="off",
        server=True,
        peers=("genai",),
        aliases=("rep_pen", "repeat_penalty"),
    )
    presence_penalty: float = option(
        0.0,
        _penalty,
        "penalty for tokens that the answer contains, as in OpenAI's API",
        means="off",
        server=True,
        peers=("genai", "llamacpp"),
    )
    frequency_penalty: float = option(
        0.0,
        _penalty,
        "penalty for each occurrence of a token in the answer, as in OpenAI's API",
        means="off",
        server=True,
        peers=("genai", "llamacpp"),
    )
    logit_bias: Mapping[int, float] = option(
        {}, _biases, "added to logits, by token id, as in OpenAI's API", metavar="ID=VALUE", server=True, peers=()
    )
    no_repeat_ngram_size: int = option(  # openvino-genai has it in beam search only
        0,
        integer(0),
        "no sequence of n tokens occurs twice in prompt and answer, as in Transformers",
        means="off",
        server=True,
        peers=(),
    )
    banned_token_ids: tuple[int, ...] = option(
        (),
        token_ids,
        "token ids that are never chosen, as Transformers' suppress_tokens",
        metavar="ID",
        server=True,
        peers=(),
    )
    min_new_tokens: int = option(
        0,
        integer(0),
        "shortest answer, in tokens; a stop string may still end it earlier",
        means="off",
        server=True,
        peers=("genai",),
        aliases=("min_tokens",),
    )
    seed: int | None = option(
        None,
        integer(0, 2**64 - 1, "an integer from 0 to 2**64 - 1"),
        "seed of sampling",
        means="a seed is drawn, and reported as `result.seed`",
        server=True,
        aliases=("random_seed",),
    )
    stop: tuple[str, ...] = option(
        (),
        texts,
        "strings that end the answer; cut from the text",
        metavar="TEXT",
        server=True,
        peers=("genai",),
        aliases=("stop_sequences", "stop_strings"),
    )
    stop_token_ids: tuple[int, ...] = option(
        (), token_ids, "token ids that end the answer, besides the model's own", metavar="ID", server=True
    )
    stop_in_reasoning: bool = option(
        False,
        switch,
        "`stop` and `stop_token_ids` count within the model's reasoning, too, and in its markers",
        server=True,
    )
    json_schema: Mapping[str, Any] | str | bool | None = option(
        None,
        _schema,
        "JSON schema that the answer follows: a dict or its text. True: any object. At most one of this, `regex` and "
        '`grammar`; all need `pip install ".[structured]"`. With `tools`, an answer is JSON or calls',
        flag="",
        peers=(),
    )
    regex: str | None = option(
        None,
        text("a text that is not empty"),
        "regular expression that the whole answer matches, in the syntax of Rust's regex crate",
        flag="",
        server=True,
        peers=(),
        aliases=("guided_regex",),
    )
    grammar: str | None = option(
        None,
        text("a text that is not empty"),
        "Lark grammar that the answer follows, in llguidance's dialect; or one in llama.cpp's GBNF",
        flag="",
        server=True,
        peers=(),
        aliases=("ebnf", "grammar_string", "guided_grammar"),
    )
    tools: tuple[Mapping[str, Any], ...] = option(
        (),
        _tools,
        "functions that the model may call, as in OpenAI's API; see `engine.tool_format`. If one of them is `strict`, "
        "calls follow the functions' parameters whatever `tool_choice` is",
        flag="",
        peers=(),
    )
    tool_choice: str | Mapping[str, Any] = option(
        "auto",
        _tool_choice,
        "whether the model calls functions. `none`: it does not see them. `required`: it calls one or several. A "
        'function\'s name: it calls that one. The last two need `pip install ".[structured]"`',
        means="it decides",
        flag="",
    )
    parallel_tool_calls: bool = option(True, switch, "False: the answer ends with its first call", flag="")
    chat_template_kwargs: Mapping[str, Any] = option(
        {},
        _variables,
        "variables of the chat template, such as `enable_thinking` or `reasoning_effort`. A value is JSON, or a text",
        flag="--template-arg",
        metavar="NAME=VALUE",
    )
    continue_final_message: bool = option(
        False, switch, "go on with the last message, which is the assistant's, instead of answering it", flag=""
    )
    reasoning_budget: int | None = option(
        None,
        integer(0),
        "most tokens of reasoning, after which the model has to answer. For models with a known form of it",
        means="no limit",
        server=True,
        peers=(),
        aliases=("reasoning_budget_tokens", "thinking_budget", "thinking_budget_tokens", "thinking_token_budget"),
    )
    ignore_eos: bool = option(
        False, switch, "decode past the end of the answer, for benchmarks", server=True, aliases=("ban_eos_token",)
    )
    logprobs: int | None = option(  # openvino-genai has those of one token per position
        None,
        integer(0, 20),
        "report the log-probability of each token, and of this many of the most likely ones",
        means="off",
        peers=(),
    )
    logprobs_of: str = option(
        "unprocessed",
        one_of(("unprocessed", "processed")),
        "logits of which logprobs are computed. `unprocessed`: the model's. `processed`: after all options",
        metavar="KIND",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        choices = ("auto", "none", "required", *(tool["function"]["name"] for tool in self.tools))
        if self.tool_choice not in choices:
            raise OptionError(f"tool_choice={shown_value(self.tool_choice)} is not one of {', '.join(choices)}.")
        check_grammar(self)
        if self.sampling in LOSSY and not self.temperature:
            raise OptionError(f"sampling={self.sampling!r} needs a temperature above 0: at 0 nothing is sampled.")
        if self.acceptance_threshold is not None and self.sampling not in LOSSY:
            raise OptionError(
                f"acceptance_threshold={self.acceptance_threshold:g} is only for the lossy modes, "
                "sampling='threshold' and "
                f"'typical', and sampling is {self.sampling!r}. Set it to None."
            )
        if self.logprobs_of != "unprocessed" and self.logprobs is None:
            raise OptionError(f"logprobs_of={self.logprobs_of!r} needs logprobs: set it to 0 or more.")
        if self.max_new_tokens is not None and self.min_new_tokens > self.max_new_tokens:
            raise OptionError(
                f"min_new_tokens={self.min_new_tokens} is more than max_new_tokens={self.max_new_tokens}. "
                "Lower the first or raise the second."
            )

    @property
    def offered_tools(self) -> tuple[Mapping[str, Any], ...]:
        """The functions that the model is told of."""
        return () if self.tool_choice == "none" else self.tools

    @property
    def has_strict_tools(self) -> bool:
        """Whether calls follow the functions' parameters even where the model need not call."""
        return any(tool["function"].get("strict") for tool in self.offered_tools)

    @property
    def sampling_is_invariant(self) -> bool:
        """Whether the text depends only on model, prompt, options and seed, not on drafts."""
        return not self.temperature or self.sampling == "coupled"

    def replace(self, **options: Any) -> GenerationConfig:
        """A copy with some options changed.

        Raises:
            OptionError: for an unknown name, an option that belongs to `outrider.load`, or a value out of range.
        """
        own = options_of(GenerationConfig)
        for name in options:
            if name in own:
                continue
            if name in {**options_of(SchedulerConfig), **options_of(DeviceConfig)}:
                raise OptionError(f"{name} is an option of loading: outrider.load(..., {name}=...).")
            raise OptionError(f"There is no generation option '{name}'. {nearest(name, own)}")
        return dataclasses.replace(self, **options)
