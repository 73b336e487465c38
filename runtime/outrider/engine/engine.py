"""What apps call: requests in several forms, and conversations. `assembly` has made the parts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from threading import Event
from typing import Any, Unpack

from outrider.bundle.folder import Bundle
from outrider.config import Config, GenerationConfig
from outrider.config.files import load_config
from outrider.config.generation_options import GenerationOptions
from outrider.decoding import event_loop
from outrider.decoding.answer import Answer
from outrider.decoding.request_queue import Submitted
from outrider.decoding.results import Result, TextChunk, Transcription
from outrider.engine import scoring
from outrider.engine.chat import Chat
from outrider.engine.compiled import CompiledBundle
from outrider.engine.opening import open_bundle
from outrider.engine.prompts import AnyPrompt, LaidOut
from outrider.engine.transcription import Transcriber
from outrider.engine.transcription_options import TranscriptionOptions
from outrider.errors import OptionError
from outrider.inputs.vision import has_images
from outrider.system.progress import listener
from outrider.types import TokenLogprobs

# Options of `prepare` beside those of generation: of `Prompts.lay_out`, and of `Preparation.answer`.
_OF_PROMPTS = ("chat_template", "fits")
_OF_ANSWERS = ("cancel", "at_once", "prompt_progress")


def load(
    bundle: str | Path | Bundle,
    config: str | Path | Config | None = None,
    *,
    draft: str | Path | None = None,
    progress: Callable[[str], object] | None = None,
    **options: Any,
) -> Engine:
    """Open a bundle and compile its models.

        engine = outrider.load("my-pair", main_device="GPU", cache_size=1.5)
        engine = outrider.load("model.gguf", draft="small.gguf")

    A model does, too: a .gguf file, a checkpoint folder or a hub id, and `draft` for its draft model, or "auto" for one
    that is found. It is exported once, into the cache folder, with the export's defaults.

    `config` names a preset or a TOML file; `options` are those of `GenerationConfig`, `SchedulerConfig` and
    `DeviceConfig`, and win over it. Generation options become the engine's defaults. With `drafter=None`,
    "ngram" or "suffix" the bundle's draft model is left on disk.

    progress: is called with a line of text at each step, in this thread. An error that it raises ends the load.

    Raises:
        OptionError: for an unknown option, a bad value or a device that is not there.
        BundleError: when the bundle is missing, damaged or does not fit together.
        ExportError: when a model cannot be exported.
        DeviceError: when a device cannot compile a model or has no room for the cache.

    Warns (`DeviceWarning`) when a device that was wanted is replaced by another; `Engine.placement` says where models
    are.
    """
    with listener(progress):
        config = load_config(config).replace(**options)
        free = config.device.takes_any_form
        opened = open_bundle(bundle, draft, for_this_machine=free, main_first=config.drafts_may_join)
        return Engine(opened, config)


class Engine(CompiledBundle):
    """A bundle, compiled and ready.

        engine.generate("Why is the sky blue?", max_new_tokens=200).text
        for chunk in engine.stream(messages, temperature=0.7, seed=1): ...

    A prompt is text, a list of chat messages, token ids, or a `Prompt`. Text goes through the chat template unless
    `chat_template=False`. Both calls are thread-safe: requests that run at the same time share the main model's calls.
    `tokenizer` and `draft_tokenizer` take the place of the bundle's own.
    """

    def generate(
        self,
        prompt: AnyPrompt,
        config: GenerationConfig | None = None,
        *,
        chat_template: bool = True,
        cancel: Event | None = None,
        **options: Unpack[GenerationOptions],
    ) -> Result:
        """Answer a prompt.

        `config` replaces the engine's generation defaults; `options` are fields of `GenerationConfig` and win over
        both. Setting `cancel`, from any thread, ends the answer, and a call that serves it alone.

        Raises:
            OptionError: for an unknown option or a bad value.
            RequestError: when the prompt is empty, or too long for the model's context or the cache, when options that
                ban tokens leave none to choose, when `cancel` fails, or in a fork of the process that has the engine.
            DeviceError: when a device fails.
        """
        answer = self.prepare(prompt, config, chat_template=chat_template, cancel=cancel, at_once=True, **options)
        *_, last = self._queue.run(answer)
        return last.result or answer.result()

    def transcribe(
        self,
        audio: Any,
        *,
        language: str | None = None,
        task: str | None = None,
        timestamps: bool = False,
        without_timestamps: bool = False,
        temperature: float | Sequence[float] | None = None,
        compression_ratio_threshold: float | None = 2.4,
        logprob_threshold: float | None = -1.0,
        no_speech_threshold: float | None = 0.6,
        condition_on_previous_text: bool = False,
        sampling_rate: int | None = None,
        **options: Any,
    ) -> Transcription:
        """The text of audio, by a Whisper model. Longer audio than 30 s is read in windows, one after the other.

            engine.transcribe("talk.mp3", language="en", timestamps=True).segments

        audio: float32 [n] from −1 to 1, or the path of a file. sampling_rate: of an array; None: the model's 16 kHz.
        language: such as "en"; None: found in the first window. task: "transcribe" or "translate" (to English).
        timestamps: a segment for each that the model sees; the text is the same. without_timestamps: the model writes
        none, and windows have a fixed length. options: as of `generate`, for each window.

        temperature: one, or those at which a window is tried in turn while its text repeats itself (its zlib ratio is
        above `compression_ratio_threshold`) or is unlikely (a token's mean log-probability is below
        `logprob_threshold`); None: 0.0, 0.2, … 1.0. A window is left out if its text is unlikely and the model finds
        with more than `no_speech_threshold` that nobody speaks. condition_on_previous_text: the model reads the text of
        earlier windows, too. None turns a threshold off. They are OpenAI's, with OpenAI's defaults but for the last.

        Raises as `generate`; also OptionError for another kind of model, and RequestError for audio that is empty,
        damaged, or needs a package that is not installed.
        """
        model = self.bundle.manifest.main
        encoder = model.encoder
        if encoder is None or encoder.audio is None:
            raise OptionError("This model reads text, not audio. Use engine.generate, or load a Whisper.")
        wanted = TranscriptionOptions(
            language=language,
            task=task,
            timestamps=timestamps,
            without_timestamps=without_timestamps,
            temperature=temperature,
            compression_ratio_threshold=compression_ratio_threshold,
            logprob_threshold=logprob_threshold,
            no_speech_threshold=no_speech_threshold,
            condition_on_previous_text=condition_on_previous_text,
        )
        transcriber = Transcriber(
            encoder,
            encoder.audio,
            model.geometry.context_length,
            self.config.generation,
            self.generate,
            self._score,
            self.tokenizer.decode,
            self.bundle.manifest.tokenizer.eos_token_ids,
        )
        return transcriber.run(audio, wanted, sampling_rate=sampling_rate, **options)

    def stream(
        self,
        prompt: AnyPrompt,
        config: GenerationConfig | None = None,
        *,
        chat_template: bool = True,
        cancel: Event | None = None,
        prompt_progress: bool = False,
        **options: Unpack[GenerationOptions],
    ) -> Generator[TextChunk, None, None]:
        """Answer a prompt piece by piece; as `generate`. Closing or dropping the stream ends the answer.

        prompt_progress: chunks without text say how far a long prompt is read, in `chunk.stats.num_read_tokens` of
        `num_prompt_tokens`.
        """
        how = {"chat_template": chat_template, "cancel": cancel, "prompt_progress": prompt_progress}
        return self._queue.run(self.prepare(prompt, config, **how, **options))

    def submit(
        self,
        prompt: AnyPrompt,
        config: GenerationConfig | None = None,
        *,
        sink: Callable[[TextChunk | BaseException], object],
        chat_template: bool = True,
        **options: Unpack[GenerationOptions],
    ) -> Submitted:
        """Start to answer a prompt, and return at once.

            handle = engine.submit(prompt, sink=lambda news: loop.call_soon_threadsafe(queue.put_nowait, news))

        sink: is called in the engine's thread with each piece of text, the last of which has the result, or with the
        request's error. It must return at once: all requests wait for it. Raises as `generate`, except for device
        errors.
        """
        if not callable(sink):
            raise OptionError(f"sink={sink!r} cannot be called. Pass a function that takes a TextChunk or an error.")
        answer = self.prepare(prompt, config, chat_template=chat_template, **options)
        submitted = Submitted(self._queue, answer, sink)
        self._queue.submit(answer)
        return submitted

    async def astream(
        self,
        prompt: AnyPrompt,
        config: GenerationConfig | None = None,
        *,
        chat_template: bool = True,
        cancel: Event | None = None,
        at_once: bool = False,
        prompt_progress: bool = False,
        **options: Unpack[GenerationOptions],
    ) -> AsyncGenerator[TextChunk, None]:
        """Answer a prompt piece by piece, in an event loop of asyncio; as `stream`.

            async for chunk in engine.astream("Why is the sky blue?"):
                print(chunk.text, end="", flush=True)

        Closing the generator, or cancelling the task that reads it, ends the answer. at_once: the text comes at
        the end.
        """
        how = {"chat_template": chat_template, "cancel": cancel, "at_once": at_once, "prompt_progress": prompt_progress}
        answer = await self.aprepare(prompt, config, **how, **options)
        async with aclosing(self.arun(answer)) as chunks:
            async for chunk in chunks:
                yield chunk

    def arun(self, answer: Answer) -> AsyncGenerator[TextChunk, None]:
        """The pieces of an answer that `aprepare` made; as `astream`."""
        return event_loop.run(self._queue, answer)

    async def agenerate(
        self,
        prompt: AnyPrompt,
        config: GenerationConfig | None = None,
        *,
        chat_template: bool = True,
        cancel: Event | None = None,
        **options: Unpack[GenerationOptions],
    ) -> Result:
        """Answer a prompt, in an event loop of asyncio; as `generate`. Cancelling the task ends the answer."""
        answer = await self.aprepare(
            prompt, config, chat_template=chat_template, cancel=cancel, at_once=True, **options
        )
        async with aclosing(self.arun(answer)) as chunks:
            *_, last = [chunk async for chunk in chunks]
        return last.result or answer.result()

    async def aprepare(self, prompt: AnyPrompt, config: GenerationConfig | None = None, **options: Any) -> Answer:
        """`prepare` in threads: a long prompt takes a while to tokenize, and a grammar may take seconds to compile."""
        of_answer = _taken(options, _OF_ANSWERS)
        prompt = await self.aread_images(prompt, config, **options)
        laid = await asyncio.to_thread(self._lay_out, prompt, config, **options)
        grammars, source = self._preparation.grammars, laid.source
        if source is not None and not grammars.is_quick(source):
            await event_loop.call(grammars.threads, lambda gone: grammars.new_state(source, gone))
        return await asyncio.to_thread(self._answer, laid, **of_answer)

    async def aread_images(
        self, prompt: AnyPrompt, config: GenerationConfig | None = None, **options: Any
    ) -> AnyPrompt:
        """A prompt with its images encoded, for several requests; one without images as it is.

        config, options: those of the requests, as of `astream`. The images of all requests are read in one thread.
        Cancelling the task leaves out those that were not begun. Raises as `generate`.
        """
        if self.vision is None or not has_images(prompt):
            return prompt
        self._queue.check_open()
        chat_template = options.get("chat_template", True)
        of_generation = {name: value for name, value in options.items() if name not in (*_OF_PROMPTS, *_OF_ANSWERS)}
        made, read = self._config_of(config, of_generation), self._preparation.prompts.read_images
        return await event_loop.call(
            self.vision.encoder.thread, lambda gone: read(prompt, made, chat_template=chat_template, gone=gone)
        )

    def score(self, prompt: AnyPrompt, answer: str | Sequence[int], *, chat_template: bool = True) -> list[float]:
        """How likely the main model finds an answer: the natural log-probability of each of its tokens.

        Those of the unprocessed logits, at temperature 1. answer: text, which is tokenized by itself, or token ids. It
        is read after the prompt in calls for up to 64 tokens, in the rows that others' answers leave. Raises as
        `generate`, and RequestError for no answer.
        """
        token_ids = self.tokenizer.encode(answer) if isinstance(answer, str) else scoring.as_token_ids(answer)
        return [each.logprob for each in self.score_tokens(prompt, token_ids, chat_template=chat_template)]

    def score_tokens(
        self, prompt: AnyPrompt, token_ids: Sequence[int], *, top: int = 0, chat_template: bool = True
    ) -> list[TokenLogprobs]:
        """As `score`, with the `top` likeliest tokens in place of each."""
        config = scoring.options(token_ids, self._main.vocab_size, top)
        answer = self.prepare(prompt, config, chat_template=chat_template, at_once=True)
        return scoring.score(self._queue, answer, token_ids)

    def _score(self, prompt: AnyPrompt, token_ids: Sequence[int], config: GenerationConfig) -> list[float]:
        answer = self.prepare(prompt, config, at_once=True)
        return [each.logprob for each in scoring.score(self._queue, answer, token_ids)]

    def count_tokens(
        self,
        prompt: AnyPrompt,
        config: GenerationConfig | None = None,
        *,
        chat_template: bool = True,
        **options: Unpack[GenerationOptions],
    ) -> int:
        """The number of a prompt's tokens. Raises as `encode_prompt`."""
        return len(self.encode_prompt(prompt, config, chat_template=chat_template, **options))

    def encode_prompt(
        self,
        prompt: AnyPrompt,
        config: GenerationConfig | None = None,
        *,
        chat_template: bool = True,
        **options: Unpack[GenerationOptions],
    ) -> list[int]:
        """The tokens of a prompt, with its images'. Raises as `generate`, but for one that does not fit the cache."""
        made = self._config_of(config, options)
        return self._preparation.prompts.encode_prompt(prompt, made, chat_template=chat_template)

    def render(self, messages: Sequence[Mapping[str, Any]], **options: Unpack[GenerationOptions]) -> str:
        """The text that the chat template makes of messages. Raises as `generate`."""
        return self._preparation.prompts.render(messages, self._config_of(None, options))

    def chat(
        self,
        system: str | None = None,
        *,
        messages: Sequence[Mapping[str, Any]] = (),
        tools: Sequence[Mapping[str, Any]] = (),
        **options: Any,
    ) -> Chat:
        """Begin a conversation.

            chat = engine.chat(system="You are terse.", temperature=0.7)
            chat.send("Why is the sky blue?").text

        messages: what was said before, such as examples. tools: functions that the model may call, as JSON schemas, for
        the chat template. options: of every turn.

        Raises:
            OptionError: for an unknown option or a bad value, or when the bundle has no chat template.
        """
        adapter = self.config.generation.replace(**options).adapter
        options |= {} if adapter is None else {"adapter": adapter}  # it is saved with the conversation
        return Chat(self, system, messages=messages, tools=tools, **options)

    def load_chat(self, path: str | Path, *, same_model: bool = True, **options: Any) -> Chat:
        """Go on with a conversation that `Chat.save` wrote. options: of every turn from now on.

        same_model: False to go on with another main model that has the same tokenizer.

        Raises:
            OptionError: when the file is missing, damaged, or of another model; otherwise as `chat`.
        """
        self.config.generation.replace(**options)
        return Chat.load(self, path, same_model=same_model, **options)

    def prepare(self, prompt: AnyPrompt, config: GenerationConfig | None = None, **options: Any) -> Answer:
        """The answer of `generate`, checked and ready for the loop.

        options: also those of `Prompts.lay_out` and `Preparation.answer`. Raises as `generate`.
        """
        of_answer = _taken(options, _OF_ANSWERS)
        return self._answer(self._lay_out(prompt, config, **options), **of_answer)

    def _lay_out(self, prompt: AnyPrompt, config: GenerationConfig | None, **options: Any) -> LaidOut:
        of_prompt = _taken(options, _OF_PROMPTS)
        with self._if_open():
            return self._preparation.prompts.lay_out(prompt, self._config_of(config, options), **of_prompt)

    def _answer(self, laid: LaidOut, **of_answer: Any) -> Answer:
        with self._if_open():
            answer = self._preparation.answer(laid, overlaps=self.overlaps, **of_answer)
        if (observer := self._queue.observer) is not None:
            observer.entered(answer, laid.config.drafter)
        return answer

    def _config_of(self, config: GenerationConfig | None, options: Mapping[str, Any]) -> GenerationConfig:
        """A request's options."""
        if not isinstance(config, GenerationConfig | None):
            raise OptionError(f"config={config!r} is not a GenerationConfig. Give options as keywords, or make one.")
        return (config or self.config.generation).replace(**options)


def _taken(options: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Take the options of these names out of others."""
    return {name: options.pop(name) for name in names if name in options}
