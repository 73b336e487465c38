"""All options: generation, memory and calls, devices.

    engine = outrider.load("my-pair", config="gpu", num_threads=4)
    engine.generate("Hello", temperature=0.7, seed=1)

Options come from a preset or a TOML file (`outrider.config.files`), then from keywords, which win. All are checked when
they are set (`outrider.config.checks`). The error for an unknown name gives the nearest known one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any

from outrider.config.checks import (
    are_biases,
    are_ids,
    are_named,
    are_texts,
    are_tools,
    as_biases,
    as_schema,
    as_tool_choice,
    as_tuple,
    check,
    check_grammar,
    is_temperature,
    make_plain,
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

PRECISIONS = ("auto", "f32", "bf16", "f16")  # that models calculate in
MOST_THREADS = 1024  # of a model; OpenVINO makes as many as it is told, however many that are
COPYING = ("ngram", "suffix")  # drafters without a model, which every engine has


@dataclass(frozen=True, kw_only=True)
class GenerationConfig:
    """How one request is decoded. The default is greedy.

    Processors run in the order logit bias, repetition penalty, presence and frequency penalty, no-repeat n-gram,
    min_new_tokens, banned tokens, grammar, temperature, top-k, top-p, min-p, typical-p. For their formulas and sources
    see `outrider.tokens.sampling`.
    """

    max_new_tokens: int | None = None  # longest answer, in tokens; None: 512, or as many as still fit
    # One of the engine's drafters: "draft", "suffix", "ngram" or a name given to `add_drafter`. "auto": whichever pays,
    # round by round. None: plain decoding.
    drafter: str | None = "auto"
    adapter: str | None = None  # one of the engine's LoRA adapters, whose text it is then; None: the main model's own
    num_assistant_tokens: int | str = "auto"  # draft tokens a round, at most; "auto": as many as pay; 0: plain decoding
    # Stop drafting after a token whose draft probability is below this. Draft models only. None: off.
    assistant_confidence_threshold: float | None = None
    max_ngram_size: int = 3  # longest n-gram of context that drafter="ngram" looks up
    # Texts to copy drafts from, besides prompt and answer. Read by drafter="suffix", and by "auto" where it chooses the
    # draft length or has no draft model; refused elsewhere, ignored where nothing is drafted.
    references: tuple[str, ...] = ()
    temperature: float = 0.0  # of the distribution that is sampled from; 0: greedy
    # How drafts are verified above temperature 0. Lossless: "coupled", "rejection" and "token-rejection". Lossy:
    # "threshold" and "typical". See `SAMPLING`.
    sampling: str = "coupled"
    # Of the lossy modes. None: 0.5 for "threshold" (a ratio), 0.09 for "typical" (a probability).
    acceptance_threshold: float | None = None
    top_k: int = 0  # sample from the k likeliest tokens; 0: off
    top_p: float = 1.0  # sample from the likeliest tokens that together have probability p; 1: off
    min_p: float = 0.0  # sample from tokens with at least this share of the likeliest one's probability; 0: off
    typical_p: float = 1.0  # locally typical sampling, as Transformers; 1: off
    repetition_penalty: float = 1.0  # over prompt and answer, as Transformers; 1: off
    presence_penalty: float = 0.0  # over the answer, as OpenAI's API; 0: off
    frequency_penalty: float = 0.0  # over the answer, as OpenAI's API; 0: off
    logit_bias: Mapping[int, float] = field(default_factory=dict)  # added to logits, by token id, as OpenAI's API
    no_repeat_ngram_size: int = 0  # no n tokens in a row come twice in prompt and answer, as Transformers; 0: off
    banned_token_ids: tuple[int, ...] = ()  # token ids that are never chosen; Transformers' suppress_tokens
    min_new_tokens: int = 0  # shortest answer, in tokens; a stop string may still end it earlier; 0: off
    seed: int | None = None  # of sampling; None: one is drawn, and reported as `result.seed`
    stop: tuple[str, ...] = ()  # strings that end the answer; cut from the text
    stop_token_ids: tuple[int, ...] = ()  # token ids that end the answer, besides the model's own
    # JSON schema that the answer follows: a table or its text. True: any object. At most one of this, `regex` and
    # `grammar`; all need `pip install ".[structured]"`.
    json_schema: Mapping[str, Any] | str | bool | None = None
    regex: str | None = None  # regular expression that the whole answer matches, in the syntax of Rust's regex crate
    grammar: str | None = None  # Lark grammar that the answer follows, in llguidance's dialect
    # Functions that the model may call, as in OpenAI's API; see `engine.tool_format`. If one of them is `strict`, calls
    # follow the functions' parameters whatever `tool_choice` is.
    tools: tuple[Mapping[str, Any], ...] = ()
    # "auto": the model decides. "none": it is not told of the functions. "required": it calls one or several. A
    # function's name: it calls that one. The last two need `pip install ".[structured]"`.
    tool_choice: str | Mapping[str, Any] = "auto"
    parallel_tool_calls: bool = True  # False: the answer ends with its first call
    ignore_eos: bool = False  # decode past the end of the answer (for benchmarks)
    logprobs: int | None = None  # log probability of each token, and of this many of the likeliest; None: off
    # Which logits logprobs are made of. "unprocessed": the model's own. "processed": what the token was chosen from.
    logprobs_of: str = "unprocessed"

    def __post_init__(self) -> None:
        make_plain(self)
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else as_tuple(self.stop))
        references = (self.references,) if isinstance(self.references, str) else as_tuple(self.references)
        object.__setattr__(self, "references", references)
        object.__setattr__(self, "stop_token_ids", as_tuple(self.stop_token_ids))
        object.__setattr__(self, "banned_token_ids", as_tuple(self.banned_token_ids))
        object.__setattr__(self, "logit_bias", as_biases(self.logit_bias))
        object.__setattr__(self, "json_schema", as_schema(self.json_schema))
        object.__setattr__(self, "tools", as_tuple(self.tools))
        object.__setattr__(self, "tool_choice", as_tool_choice(self.tool_choice))
        check(self, "max_new_tokens", None, Integral, lambda n: n >= 1, "an integer of at least 1")
        check(self, "drafter", None, str, bool, "a drafter's name, 'auto', or None")
        check(self, "adapter", None, str, bool, "an adapter's name, or None")
        count = "'auto', or an integer from 0 to 64"
        check(self, "num_assistant_tokens", "auto", Integral, lambda n: 0 <= n <= 64, count)
        share = "a number above 0 and at most 1"
        check(self, "assistant_confidence_threshold", None, Real, lambda t: 0 < t <= 1, share)
        check(self, "max_ngram_size", ..., Integral, lambda n: 1 <= n <= 16, "an integer from 1 to 16")
        if not isinstance(references, tuple) or not are_texts(references):  # too long to be shown
            raise OptionError("references is not a text or a list of texts, none of them empty.")
        check(self, "temperature", ..., Real, is_temperature, "0 (greedy), or a number from 0.001 to 1000")
        check(self, "sampling", ..., str, SAMPLING.__contains__, f"one of {', '.join(SAMPLING)}")
        check(self, "acceptance_threshold", None, Real, lambda r: 0 < r <= 1, "a number above 0 and at most 1")
        check(self, "top_k", ..., Integral, lambda k: k >= 0, "an integer of at least 0 (0 is off)")
        check(self, "top_p", ..., Real, lambda p: 0 < p <= 1, "a number above 0 and at most 1 (1 is off)")
        check(self, "min_p", ..., Real, lambda p: 0 <= p <= 1, "a number from 0 (off) to 1")
        check(self, "typical_p", ..., Real, lambda p: 0 < p <= 1, "a number above 0 and at most 1 (1 is off)")
        check(self, "repetition_penalty", ..., Real, lambda r: 0.01 <= r <= 100, "a number from 0.01 to 100 (1 is off)")
        for name in ("presence_penalty", "frequency_penalty"):
            check(self, name, ..., Real, lambda x: -2 <= x <= 2, "a number from -2 to 2 (0 is off)")
        biases = "a table of token ids, each once, and numbers from -100 to 100"
        check(self, "logit_bias", ..., Mapping, are_biases, biases)
        check(self, "banned_token_ids", ..., tuple, are_ids, "a list of token ids")
        for name in ("no_repeat_ngram_size", "min_new_tokens"):
            check(self, name, ..., Integral, lambda n: n >= 0, "an integer of at least 0 (0 is off)")
        check(self, "seed", None, Integral, lambda s: 0 <= s < 2**64, "an integer from 0 to 2**64 - 1")
        check(self, "stop", ..., tuple, are_texts, "a text or a list of texts, none of them empty")
        check(self, "stop_token_ids", ..., tuple, are_ids, "a list of token ids")
        if self.json_schema is not True:
            schema = "a JSON schema as a table or as its text, or true for any object"
            check(self, "json_schema", None, Mapping, lambda _: True, schema)
        for name in ("regex", "grammar"):
            check(self, name, None, str, bool, "a text, and not empty")
        functions = "a list of functions as in OpenAI's API, each with a name of its own"
        check(self, "tools", ..., tuple, are_tools, functions)
        choices = ("auto", "none", "required", *(tool["function"]["name"] for tool in self.tools))
        check(self, "tool_choice", ..., str, choices.__contains__, f"one of {', '.join(choices)}")
        check(self, "parallel_tool_calls", ..., bool, lambda _: True, "true or false")
        check(self, "ignore_eos", ..., bool, lambda _: True, "true or false")
        check(self, "logprobs", None, Integral, lambda n: 0 <= n <= 20, "an integer from 0 to 20, or None")
        ways = ("unprocessed", "processed")
        check(self, "logprobs_of", ..., str, ways.__contains__, "'unprocessed' or 'processed'")
        check_grammar(self)
        if self.sampling in LOSSY and not self.temperature:
            raise OptionError(f"sampling={self.sampling!r} needs a temperature above 0: at 0 nothing is sampled.")
        if self.acceptance_threshold is not None and self.sampling not in LOSSY:
            raise OptionError(
                f"acceptance_threshold={self.acceptance_threshold:g} is for the lossy modes, sampling='threshold' and "
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
        for name in options:
            section = SECTION_OF.get(name)
            if section is None:
                known = [option.name for option in dataclasses.fields(self)]
                raise OptionError(f"There is no generation option '{name}'. {nearest(name, known)}")
            if section != "generation":
                raise OptionError(f"{name} is chosen when the engine is made: outrider.load(..., {name}=...).")
        return dataclasses.replace(self, **options)


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """How memory and calls are shared."""

    # GB (10^9 bytes) for the KV caches of main and draft model together, the prefix cache included.
    cache_size: float = 2.0
    # Publish committed tokens to the prefix cache, for prompts that begin with the same tokens.
    enable_prefix_caching: bool = True
    max_num_batched_tokens: int = 512  # tokens that one call reads, at most; more if answers alone need them
    # Seconds of a round in which answers are decoded. Pieces of long prompts are as large as that allows. "auto": 0.1,
    # or twice the round's time without prompts if that is more.
    max_round_seconds: float | str = "auto"
    overlap: bool | str = "auto"  # draft for the next round during this round's target pass; "auto": if it pays
    keep_records: bool = True  # save acceptance records on disk, by bundle and kind of request, for later starts
    image_memory: float = 0.5  # GB to decode an image in, one at a time; larger images are refused
    # File for earlier answers, unencrypted, to copy drafts from. None: no file.
    answer_store: str | None = None

    def __post_init__(self) -> None:
        make_plain(self)
        check(self, "cache_size", ..., Real, lambda s: 0 < s <= 1e6, "a number of GB above 0")
        check(self, "image_memory", ..., Real, lambda s: 0 < s <= 1e6, "a number of GB above 0")
        for name in ("enable_prefix_caching", "keep_records"):
            check(self, name, ..., bool, lambda _: True, "true or false")
        check(self, "max_num_batched_tokens", ..., Integral, lambda n: n >= 32, "an integer of at least 32")
        check(
            self,
            "max_round_seconds",
            "auto",
            Real,
            lambda s: 0.001 <= s <= 3600,
            "seconds from 0.001 to 3600, or 'auto'",
        )
        check(self, "overlap", "auto", bool, lambda _: True, "true, false or 'auto'")
        check(self, "answer_store", None, str, bool, "a file's name")


@dataclass(frozen=True, kw_only=True)
class DeviceConfig:
    """Where the models run and how they are compiled.

    A device is one that `outrider devices` lists, "auto", or "AUTO". "auto" is the first GPU that runs the model,
    otherwise the CPU. "AUTO" is the device that OpenVINO's own AUTO chooses. A main device that was named and fails is
    an error. One that "auto" chose, or a draft device, is replaced with a warning. "auto" never takes an NPU: a main
    model there limits every request, and a draft model there drafts for one request at a time, for prompts of up to
    `npu_max_prompt_tokens`, while others run without it.

    With precision="auto", the CPU's is measured at the first load: f32, or another one if it is exact, near enough to
    f32 and faster by a tenth. Other devices choose their own. The cache gets the same precision unless you name one.
    With a quantised cache, the text depends on drafts and on earlier texts: 8-bit blocks are quantised again whenever a
    token is written, rejected tokens included.
    """

    main_device: str = "CPU"  # device of the main model
    draft_device: str | None = None  # device of the draft models; None: the main device
    draft_bundle: str | None = None  # another bundle to take draft models from, or else its main model; None: this one
    # Names of the bundle's LoRA adapters to load, for requests to choose one. They make all calls slower. None: all of
    # them. (): none.
    adapters: tuple[str, ...] | None = None
    precision: str = "auto"  # what models calculate in
    cache_precision: str = "auto"  # what the KV cache is stored in; "u8" is smaller, and not exact
    num_threads: int = 0  # CPU threads of the models; 0: what is fastest with OpenVINO, else the device's choice
    draft_num_threads: int | None = None  # CPU threads of the draft models; None: as num_threads
    # Largest logits of a row that the device picks out; the others stay there. 0: off. "auto": 128, and 0 on CPU.
    # OpenVINO only.
    top_logits: int | str = "auto"
    npu_max_prompt_tokens: int | None = None  # prompt length that models on an NPU are compiled for; None: 1024 or less
    npu_max_new_tokens: int | None = None  # answer length that models on an NPU are compiled for; None: 512 or less
    npu_window: int | None = None  # rows of a main model's call on an NPU; None: the longest draft + 1
    # Device properties for all models, passed on unchanged: to ONNX Runtime with a dot in the name, else to OpenVINO.
    properties: Mapping[str, Any] = field(default_factory=dict)
    main_properties: Mapping[str, Any] = field(default_factory=dict)  # the same for the main model; these win
    draft_properties: Mapping[str, Any] = field(default_factory=dict)  # the same for the draft models; these win
    # Folder for models that OpenVINO compiled for devices other than the CPU. "auto": one of Outrider's. "off": none.
    compiled_cache: str = "auto"

    def __post_init__(self) -> None:
        make_plain(self)
        check(self, "main_device", ..., str, bool, "a device such as 'CPU', 'GPU' or 'GPU.1', or 'auto'")
        check(self, "draft_device", None, str, bool, "a device such as 'CPU', 'GPU' or 'GPU.1', or 'auto'")
        check(self, "draft_bundle", None, str, bool, "a bundle's folder")
        object.__setattr__(self, "adapters", as_tuple(self.adapters))
        check(self, "adapters", None, tuple, are_texts, "a list of adapters' names, or None for all")
        check(self, "precision", ..., str, PRECISIONS.__contains__, f"one of {', '.join(PRECISIONS)}")
        known = (*PRECISIONS, "u8")
        check(self, "cache_precision", ..., str, known.__contains__, f"one of {', '.join(known)}")
        most = f"an integer from 0 to {MOST_THREADS}"
        check(self, "num_threads", ..., Integral, lambda n: 0 <= n <= MOST_THREADS, most)
        check(self, "draft_num_threads", None, Integral, lambda n: 0 <= n <= MOST_THREADS, f"{most}, or None")
        for name in ("properties", "main_properties", "draft_properties"):
            check(self, name, ..., Mapping, are_named, "a table of properties, by their names")
        check(self, "top_logits", "auto", Integral, lambda n: 0 <= n <= 4096, "'auto', or an integer from 0 to 4096")
        for name in ("npu_max_prompt_tokens", "npu_max_new_tokens", "npu_window"):
            check(self, name, None, Integral, lambda n: n >= 1, "an integer of at least 1, or None")
        check(self, "compiled_cache", ..., str, bool, "a folder's name, 'auto' or 'off'")

    def of(self, role: str) -> DeviceConfig:
        """The options of one model, "main" or a draft model's name. Options of its role replace the general ones."""
        threads, own = self.num_threads, self.main_properties
        if role != "main":
            threads = threads if self.draft_num_threads is None else self.draft_num_threads
            own = self.draft_properties
        return dataclasses.replace(
            self,
            num_threads=threads,
            draft_num_threads=None,
            properties={**self.properties, **own},
            main_properties={},
            draft_properties={},
        )


def format_of_property(name: str) -> str:
    """The format of the models that a device property is for: ONNX Runtime's have dots in their names."""
    return "onnx" if "." in name else "openvino"


def is_npu_property(name: str) -> bool:
    """Whether a device property is only for NPUs. It is not passed on to other devices."""
    return name.startswith(("NPU_", "NPUW_", "++NPUW_"))


@dataclass(frozen=True, kw_only=True)
class Config:
    """All options, in the sections of a TOML file."""

    generation: GenerationConfig = field(default_factory=GenerationConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    device: DeviceConfig = field(default_factory=DeviceConfig)

    def replace(self, **options: Any) -> Config:
        """A copy with some options changed, whichever section they belong to.

        Raises:
            OptionError: for an unknown name or a value out of range.
        """
        changed: dict[str, dict[str, Any]] = {}
        for name, value in options.items():
            if name not in SECTION_OF:
                raise OptionError(f"There is no option '{name}'. {nearest(name, SECTION_OF)}")
            changed.setdefault(SECTION_OF[name], {})[name] = value
        sections = {name: dataclasses.replace(getattr(self, name), **values) for name, values in changed.items()}
        return dataclasses.replace(self, **sections)


SECTIONS = {"generation": GenerationConfig, "scheduler": SchedulerConfig, "device": DeviceConfig}
SECTION_OF = {option.name: name for name, cls in SECTIONS.items() for option in dataclasses.fields(cls)}
