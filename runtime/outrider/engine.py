"""The one place where the parts are wired together."""

from __future__ import annotations

import dataclasses
import functools
import math
import secrets
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from outrider import __version__, kept
from outrider.bundle.folder import Bundle, draft_models_of, read_bundle
from outrider.config import COPYING, DEFAULT_MAX_NEW_TOKENS, Config, GenerationConfig
from outrider.config.files import load_config, user_path
from outrider.drafters import AnswerStore, DraftModel, Subset, load_vocabulary
from outrider.drafting import Drafting
from outrider.errors import OptionError, RequestError
from outrider.forks import spare
from outrider.loading import check_room, contention_of, cost_of, least_tokens, load_parts
from outrider.part import parts_of
from outrider.request import Request
from outrider.request_queue import RequestQueue
from outrider.sampling import LogitsSampler
from outrider.schedule import (
    Auto,
    ConfidenceThreshold,
    Contention,
    PassCost,
    Record,
    Records,
    measure_contention,
    pays,
    trial,
)
from outrider.setting import SMALL, choice_of, log
from outrider.text import TextStream, Tokenizer, check_tokenizer
from outrider.trace import Trace, TracedRequest
from outrider.types import Noise, Sequence
from outrider.verifiers import SAMPLING_VERIFIERS, Greedy

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Mapping
    from collections.abc import Sequence as Seq
    from pathlib import Path
    from threading import Event

    from outrider.bundle.manifest import DrafterEntry, ModelEntry
    from outrider.part import Part
    from outrider.results import Result, TextChunk
    from outrider.setting import Choice
    from outrider.types import Backend, CacheUse, CompiledModel, Drafter, TextTokenizer, Verifier


def load(bundle: str | Path, config: str | Path | Config | None = None, **options: Any) -> Engine:
    """Open a bundle and compile its models.

        engine = outrider.load("my-pair", main_device="GPU", cache_size=1.5)

    `config` names a preset or a TOML file; `options` are those of `GenerationConfig`, `SchedulerConfig` and
    `DeviceConfig`, and win over it. Generation options become the engine's defaults. With `drafter=None`,
    "ngram" or "suffix" the bundle's draft model is left on disk.

    Raises:
        OptionError: for an unknown option, a bad value or a device that is not there.
        BundleError: when the bundle is missing, damaged or does not fit together.
        DeviceError: when a device cannot compile a model or has no room for the cache.

    Warns (`DeviceWarning`) when a device that was wanted is replaced by another; `Engine.placement` says where models
    are.
    """
    return Engine(read_bundle(bundle), load_config(config).replace(**options))


class Engine:
    """A bundle, compiled and ready.

        engine.generate("Why is the sky blue?", max_new_tokens=200).text
        for chunk in engine.stream(messages, temperature=0.7, seed=1): ...

    A prompt is text, a list of chat messages, or token ids. Text goes through the chat template unless
    `chat_template=False`. Both calls are thread-safe: requests that run at the same time share the main model's calls.
    `tokenizer` and `draft_tokenizer` take the place of the bundle's own.
    """

    def __init__(
        self,
        bundle: Bundle,
        config: Config | None = None,
        *,
        tokenizer: TextTokenizer | None = None,
        draft_tokenizer: TextTokenizer | None = None,
    ) -> None:
        self.bundle = bundle
        self.config = config or Config()
        self.tokenizer = tokenizer or Tokenizer(bundle.tokenizer_path)
        self._trace: Trace | None = None
        store = self.config.scheduler.answer_store
        self._store = None if store is None else AnswerStore(store, bundle.manifest.main.vocab_sha256)
        device = self.config.device
        # The draft models may be those of another bundle, in another format perhaps.
        self._draft_bundle = bundle if device.draft_bundle is None else read_bundle(device.draft_bundle)
        self._entries = draft_models_of(self._draft_bundle, bundle)
        entries = self._entries if self.config.generation.drafter not in (None, *COPYING) else ()
        for entry in entries if draft_tokenizer is None else ():  # a missing one is named before models are loaded
            if entry.vocabulary != "same" and entry.tokenizer:
                check_tokenizer(self._draft_bundle.folder / entry.tokenizer.folder)
        main, drafts = parts_of(bundle, self._draft_bundle)
        drafts = drafts if entries else []
        self._parts = {part.role: part for part in (main, *drafts)}
        overlap = bool(self.config.scheduler.overlap)
        count = self.config.generation.num_assistant_tokens
        if device.npu_window is None and not isinstance(count, str):
            device = dataclasses.replace(device, npu_window=count + 1)
        self._device = device
        backends, self.placement = load_parts(main, drafts, device, overlap=overlap)
        where = {"main_device": self.placement.main, "draft_device": self.placement.draft or device.draft_device}
        self.config = self.config.replace(**where)  # what "auto" has become
        spare(self, backends)
        self._main = backends["main"]
        self._backends = {f"{role}_device": backend for role, backend in backends.items()}
        self._bytes_per_token = sum(backend.bytes_per_token for backend in self._backends.values())
        max_tokens = int(self.config.scheduler.cache_size * 1e9 / self._bytes_per_token)
        check_room(self._backends, max_tokens)
        for backend in self._backends.values():
            backend.allocate(max_tokens)
        if max_tokens < (least := least_tokens(backends)):
            raise OptionError(
                f"{self._cache_holds(max_tokens)}; an engine needs room for {least:,}. {self._raise_cache_size(least)}"
            )
        models = {
            entry.name: self._draft_model(entry, self._backends[f"{entry.name}_device"], draft_tokenizer)
            for entry in entries
        }
        self.costs = {role: self._cost(role) for role in self._parts}
        self._drafting = Drafting(
            self._main,
            self.costs,
            models,
            [entry.name for entry in self._entries],
            encode=self.tokenizer.encode,
            loaded_with=self.config.generation.drafter,
            store=self._store,
            records=functools.partial(_records, self.config.scheduler.keep_records, tuple(self._parts.values())),
        )
        self._overlaps = False
        self.overlaps = self._decide_overlap(self.config.scheduler.overlap)
        self._queue = RequestQueue(self._main, self.config.scheduler.max_num_batched_tokens)
        self._try_drafters()

    def _try_drafters(self) -> None:
        """Find out what drafts are worth before the first answer; once a bundle."""
        if not self.config.scheduler.keep_records or self._parts["main"].size < SMALL:
            return
        for model, records in self._drafting.untried:
            log.info("Trying the draft model on %d prompts.", len(trial.PROMPTS))
            for prompt in trial.PROMPTS:
                request = self.prepare(prompt, GenerationConfig(max_new_tokens=trial.NUM_TOKENS, drafter=None))
                request.drafter = trial.Trial(model, records.of(request.verifier))
                request.num_assistant_tokens = trial.NUM_DRAFT_TOKENS
                request.reuse, request.keep = False, None
                for _ in self._queue.run(request):
                    pass
            records.save(at_once=True)

    @property
    def drafters(self) -> tuple[str, ...]:
        """The names that `drafter` can have, besides "auto" and None."""
        return self._drafting.names

    @property
    def bundled_drafters(self) -> tuple[str, ...]:
        """The names of the draft models that come with the bundle."""
        return self._drafting.bundled

    def add_drafter(self, name: str, drafter: Drafter) -> None:
        """Let requests choose a drafter of your own as `drafter=name`; what it must do is `outrider.types.Drafter`.

        Whatever it proposes, the text stays the main model's: a bad drafter costs time, never words.

        Raises:
            OptionError: for a name that is taken, or none.
        """
        self._drafting.add(name, drafter)

    def find_drafter(self, name: str, max_ngram_size: int = 3) -> Drafter:
        """The drafter of this name; "auto" is the bundle's own, else "suffix".

        Raises:
            OptionError: when there is none, or it was left on disk.
        """
        return self._drafting.find(name, max_ngram_size)

    def reads_references(self, config: GenerationConfig) -> bool:
        """Whether what drafts for such a request copies from `references` and the answer store."""
        return self._drafting.reads_references(config)

    @property
    def models(self) -> dict[str, ModelEntry]:
        """The models that are loaded, "main" and by the drafters' names."""
        return {role: part.model for role, part in self._parts.items()}

    @property
    def overlaps(self) -> bool:
        """Whether draft models draft while the main model checks. Not to be set while requests run."""
        return self._overlaps

    @overlaps.setter
    def overlaps(self, wanted: bool) -> None:
        if wanted != self._overlaps:
            self._main.run_in_background(wanted)
        self._overlaps = wanted

    @property
    def main(self) -> Backend:
        """The main model's backend, for measurements; not to be called while requests run."""
        return self._main

    @property
    def setting(self) -> dict[str, str]:
        """Where and how precisely the models run; of the main model, whether its rows are exact and what that takes."""
        found = {}
        for role, backend in self._backends.items():
            group_size = backend.fingerprint.get("DYNAMIC_QUANTIZATION_GROUP_SIZE")
            groups = f" in groups of {group_size}" if group_size else ""
            exact = ""
            if backend is self._main:
                exact = f", exact with {backend.exactness.rule}" if backend.exactness.holds else ", not exact"
            cache = f"cache {backend.cache_precision}"
            found[role] = f"{backend.device} {backend.precision}{groups}{exact}, {cache}, {backend.runtime}"
        return found

    @property
    def choices(self) -> dict[str, Choice]:
        """The settings that the models run in, and those that they were chosen from."""
        parts = self._parts.items()
        return {role: choice_of(part, self._backends[f"{role}_device"].device, self._device) for role, part in parts}

    @property
    def cache(self) -> dict[str, CacheUse]:
        """What is in the models' caches, "main" and by the drafters' names: room, kept tokens, hits."""
        return {role.removesuffix("_device"): backend.cache for role, backend in self._backends.items()}

    @property
    def max_tokens(self) -> int:
        """Tokens that prompt and answer of one request may have: the model's context or what fits in the cache."""
        return min(self.bundle.manifest.main.geometry.context_length, self._cache_tokens)

    @property
    def _cache_tokens(self) -> int:
        """Tokens that fit in the cache of every model that a request needs a place in."""
        return min(backend.max_tokens for backend in self._limiting)

    @property
    def _limiting(self) -> list[CompiledModel]:
        """The models that a request needs a place in: not a draft model in fixed shapes, which it can do without."""
        return [b for b in self._backends.values() if b is self._main or not b.capabilities.fixed]

    def generate(
        self,
        prompt: str | Seq[Mapping[str, Any]] | Seq[int],
        config: GenerationConfig | None = None,
        *,
        chat_template: bool = True,
        cancel: Event | None = None,
        **options: Any,
    ) -> Result:
        """Answer a prompt.

        `config` replaces the engine's generation defaults; `options` are fields of `GenerationConfig` and win over
        both. Setting `cancel`, from any thread, ends the answer after the round under way.

        Raises:
            OptionError: for an unknown option or a bad value.
            RequestError: when the prompt is empty, or too long for the model's context or the cache, when options that
                ban tokens leave none to choose, when `cancel` fails, or in a fork of the process that has the engine.
            DeviceError: when a device fails.
        """
        request = self.prepare(prompt, config, chat_template=chat_template, cancel=cancel, at_once=True, **options)
        *_, last = self._queue.run(request)
        return last.result or request.result()

    def stream(
        self,
        prompt: str | Seq[Mapping[str, Any]] | Seq[int],
        config: GenerationConfig | None = None,
        *,
        chat_template: bool = True,
        cancel: Event | None = None,
        **options: Any,
    ) -> Generator[TextChunk, None, None]:
        """Answer a prompt piece by piece; as `generate`. A stream that is closed or forgotten ends as well."""
        return self._queue.run(self.prepare(prompt, config, chat_template=chat_template, cancel=cancel, **options))

    @contextmanager
    def trace(self, path: str | Path) -> Iterator[None]:
        """Write a timeline of the requests that begin in the block, for ui.perfetto.dev; see `outrider.trace`.

            with engine.trace("out.json"):
                engine.generate("Why is the sky blue?")

        Outside of such a block nothing is timed.

        Raises:
            OptionError: when the file cannot be written, or the engine is being traced already.
        """
        if self._trace:
            raise OptionError(f"This engine is being traced to {self._trace.path} already. One trace runs at a time.")
        trace = Trace(user_path(path), (f"{role}: {where}" for role, where in self.setting.items()))
        backends = {name: self._backends[f"{name}_device"] for name in self._parts}
        traced = {name: trace.backend(backend, name, backend.device) for name, backend in backends.items()}
        self._run_on(traced)
        self._trace = trace
        try:
            yield
        finally:
            self._trace = None
            self._run_on(backends)
            trace.close()

    def _run_on(self, backends: Mapping[str, Backend]) -> None:
        """Have the models called by way of these, wrappers of their backends or those themselves."""
        self._queue.run_on(backends["main"])
        for name, model in self._drafting.models.items():
            model.backend = backends[name]

    def _draft_model(self, entry: DrafterEntry, backend: CompiledModel, tokenizer: TextTokenizer | None) -> DraftModel:
        """A draft model of the bundle, whose cache is there; `tokenizer` is its own, where one was given."""
        vocabulary = subset = None
        if entry.vocabulary != "same" and entry.tokenizer:
            tokenizer = tokenizer or Tokenizer(self._draft_bundle.folder / entry.tokenizer.folder)
            vocabulary = load_vocabulary(self._draft_bundle, entry, self.tokenizer, tokenizer)
        if entry.num_proposed_tokens:
            subset = Subset(self._draft_bundle.read_proposed(entry), entry.model.vocab_size)
        return DraftModel(
            backend,
            context_length=min(entry.model.geometry.context_length, backend.max_tokens),
            max_num_batched_tokens=self.config.scheduler.max_num_batched_tokens,
            vocabulary=vocabulary,
            subset=subset,
            reuse=self.config.scheduler.enable_prefix_caching,
        )

    def measure_costs(self, repeats: int) -> None:
        """Measure anew, and keep for later starts, what the models' calls cost. Not while requests run."""
        for role, known in self.costs.items():
            measured = self._cost(role, repeats)
            known.near, known.far, known.scale = measured.near, measured.far, 1.0

    def measure_contention(self, drafter: str) -> Contention:
        """Measure how much slower calls of the main model and of a draft model get at the same time; and expect it.

        Not while requests run.
        """
        try:
            contention = measure_contention(self._main, self._backends[f"{drafter}_device"])
        finally:
            self._main.run_in_background(self.overlaps)
        self._drafting.expect(contention)
        return contention

    def _cost(self, role: str, repeats: int | None = None) -> PassCost:
        """What a model's calls cost here: as it was measured before, or, with `repeats` or for the first time, now."""
        return cost_of(self._parts[role], self._backends[f"{role}_device"], repeats)

    def _decide_overlap(self, wanted: bool | str) -> bool:
        """Whether draft models draft while the main model checks; asked of the machine where `wanted` is "auto"."""
        roles = [role for role in self._parts if role != "main"]
        if not roles or not wanted:
            if wanted is True:
                raise OptionError("overlap=True needs a draft model, and none is loaded. Leave it at 'auto'.")
            return False
        main, draft = ((self._parts[role], self._backends[f"{role}_device"]) for role in ("main", roles[0]))
        contention = contention_of(*main, *draft)
        self._drafting.expect(contention)
        return wanted is True or pays(self.costs["main"], self.costs[roles[0]], contention)

    def prepare(
        self,
        prompt: str | Seq[Mapping[str, Any]] | Seq[int],
        config: GenerationConfig | None = None,
        *,
        chat_template: bool = True,
        cancel: Event | None = None,
        at_once: bool = False,
        **options: Any,
    ) -> Request:
        """What `generate` would run, checked and ready for the loop. at_once: its text is read in the end alone."""
        created = time.perf_counter()
        self._queue.check_process()
        if not isinstance(config, GenerationConfig | None):
            raise OptionError(f"config={config!r} is not a GenerationConfig. Give options as keywords, or make one.")
        if cancel is not None and (isinstance(cancel, type) or not callable(getattr(cancel, "is_set", None))):
            raise OptionError(f"cancel={cancel!r} has no is_set() to ask. Pass a threading.Event.")
        config = (config or self.config.generation).replace(**options)
        token_ids = list(map(int, self.tokenizer.encode_prompt(prompt, chat_template=chat_template)))
        vocab_size = self.bundle.manifest.main.vocab_size
        if unknown := [token_id for token_id in token_ids if not 0 <= token_id < vocab_size]:
            raise RequestError(f"The prompt has token id {unknown[0]}; the vocabulary ends at {vocab_size - 1:,}.")
        for name in ("stop_token_ids", "banned_token_ids", "logit_bias"):
            if unknown := [token_id for token_id in getattr(config, name) if token_id >= vocab_size]:
                raise OptionError(f"{name} has token id {unknown[0]}; the vocabulary ends at {vocab_size - 1:,}.")
        max_new_tokens = self._room(len(token_ids), config.max_new_tokens)
        if config.min_new_tokens > max_new_tokens:
            raise OptionError(
                f"min_new_tokens={config.min_new_tokens:,} is more than the {max_new_tokens:,} tokens that this answer "
                "may have. Lower it, or set max_new_tokens."
            )
        drafter, num_assistant_tokens = self._drafting.choose(config)
        threshold = config.assistant_confidence_threshold
        tokenizer = self.bundle.manifest.tokenizer
        sampled = config.temperature > 0
        seed = secrets.randbits(63) if config.seed is None else config.seed
        end_token_ids = frozenset(config.stop_token_ids).union(() if config.ignore_eos else tokenizer.eos_token_ids)
        new_request = functools.partial(TracedRequest, self._trace, config.drafter) if self._trace else Request
        request = new_request(
            sequence=Sequence(token_ids, len(token_ids), self._drafting.texts(config, drafter)),
            sampler=LogitsSampler(config, token_ids, end_token_ids=end_token_ids),
            verifier=_verifier(config),
            noise=Noise(seed),
            text=TextStream(self.tokenizer.decode, config.stop, at_once=at_once),
            max_new_tokens=max_new_tokens,
            eos_token_ids=end_token_ids,
            drafter=drafter,
            sampled=sampled,
            exact=self._main.capabilities.bit_exact_batching and config.sampling_is_invariant,
            num_assistant_tokens=num_assistant_tokens,
            ahead_drafter=drafter if self.overlaps and isinstance(drafter, DraftModel | Auto) else None,
            rule=None if threshold is None else ConfidenceThreshold(threshold),
            logprobs=None if config.logprobs is None else [],
            cancel=cancel,
            keep=self._store.add if self._store else None,
            reuse=self.config.scheduler.enable_prefix_caching,
            created=created,
        )
        request.stats.num_prompt_tokens = len(token_ids)
        return request

    def _room(self, num_prompt_tokens: int, max_new_tokens: int | None) -> int:
        """How many tokens the answer may have; refuses what cannot fit."""
        context, cache = self.bundle.manifest.main.geometry.context_length, self._cache_tokens
        wanted = num_prompt_tokens + (max_new_tokens or 1)
        asked = f"{num_prompt_tokens:,} prompt tokens and max_new_tokens={max_new_tokens or 1:,}"
        if wanted > context:
            raise RequestError(f"{asked} exceed the model's context of {context:,} tokens. Shorten one of them.")
        self._check_fixed(num_prompt_tokens, wanted)
        if wanted > cache:
            most = max(backend.tokens_for(wanted) for backend in self._limiting)
            raise RequestError(f"{self._cache_holds(cache)}; {asked} need more. {self._raise_cache_size(most)}")
        return max_new_tokens or min(DEFAULT_MAX_NEW_TOKENS, min(context, cache) - num_prompt_tokens)

    def _cache_holds(self, num_tokens: int) -> str:
        return f"cache_size={self.config.scheduler.cache_size:g} GB holds {num_tokens:,} tokens"

    def _raise_cache_size(self, num_tokens: int) -> str:
        size = _round_up((num_tokens + 1) * self._bytes_per_token / 1e9)
        return f"Raise cache_size to at least {size:g}."

    def _check_fixed(self, num_prompt_tokens: int, num_tokens: int) -> None:
        """Refuse what is more than a main model on an NPU was compiled for."""
        fixed, device = self._main.capabilities.fixed, self._main.device
        if fixed and num_prompt_tokens > fixed.max_prompt_tokens:
            raise RequestError(
                f"main_device={device!r} was compiled for prompts of up to {fixed.max_prompt_tokens:,} tokens; "
                f"this one has {num_prompt_tokens:,}. Load with npu_max_prompt_tokens={num_prompt_tokens}."
            )
        if fixed and num_tokens > fixed.max_tokens:
            wanted = num_tokens - fixed.max_prompt_tokens
            raise RequestError(
                f"main_device={device!r} was compiled for {fixed.max_tokens:,} tokens of prompt and answer; "
                f"this request needs {num_tokens:,}. Lower max_new_tokens, or load with "
                f"npu_max_new_tokens={wanted}."
            )


def _records(keep: bool, parts: Seq[Part], drafter: str) -> Records:
    """What the drafters of this name have earned with these models, in a file unless that is not wanted."""
    if not keep:
        return Records()
    key = {"drafter": drafter, "files": {part.role: part.files for part in parts}, "outrider": __version__}
    return Records(kept.Kept(kept.FOLDER / "records", key, dict[str, Record]))


def _round_up(size: float) -> float:
    """To three digits."""
    step = 10.0 ** (math.floor(math.log10(size)) - 2)
    return math.ceil(size / step) * step


def _verifier(config: GenerationConfig) -> Verifier:
    if not config.temperature:
        return Greedy()
    options = {} if config.acceptance_threshold is None else {"threshold": config.acceptance_threshold}
    return SAMPLING_VERIFIERS[config.sampling](**options)
