"""The models that are served: loaded when a request asks for them, unloaded when nobody does."""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

from outrider.bundle import Bundle
from outrider.bundle.kinds import COPYING
from outrider.config import Config
from outrider.engine.engine import Engine
from outrider.engine.opening import open_bundle
from outrider.errors import OptionError, nearest, one_line
from outrider.inputs.reasoning import ReasoningFormat
from outrider.inputs.text.chat_template import ChatTemplates
from outrider.inputs.tools import ToolFormat
from outrider.server.errors import ApiError
from outrider.server.logprobs import TokenTexts
from outrider.server.protocol.responses import ModelInfo
from outrider.server.served import Loaded, ServedBundle
from outrider.server.text_encoders import TextEncoder, TextEncoders
from outrider.system.memory import return_free_pages

log = logging.getLogger("outrider.server")


class Model(ServedBundle[Engine]):
    """A bundle whose model writes. texts: of the engine's tokens."""

    texts: TokenTexts

    def __init__(self, name: str, bundle: Bundle, config: Config) -> None:
        super().__init__(name, bundle)
        self.config = config

    def _load(self) -> Engine:
        engine = Engine(self.bundle, self.config)
        self.texts = TokenTexts(engine.tokenizer, self.bundle.tokenizer_path)
        return engine

    @cached_property
    def chat_templates(self) -> ChatTemplates:
        """Those of the bundle's files."""
        try:
            return ChatTemplates.read(self.bundle.tokenizer_path)
        except (OSError, ValueError) as error:  # the load says so
            log.warning("The chat template of %s cannot be read: %s.", self.name, one_line(error))
            return ChatTemplates()

    @property
    def adapters(self) -> tuple[str, ...]:
        """The adapters that requests may choose."""
        wanted = self.config.device.adapters
        names = (entry.name for entry in self.bundle.manifest.adapters)
        return tuple(name for name in names if wanted is None or name in wanted)

    @property
    def cache_use(self) -> float:
        """The share of the main model's cache that requests hold; 0 while it is not loaded, or closed."""
        cache = self.engine.cache.get("main") if self.engine else None
        if cache is None:
            return 0.0
        of_rows = cache.num_used_rows / cache.num_rows if cache.num_rows else 0.0
        return max(cache.num_used_tokens / cache.num_tokens, of_rows)

    @property
    def _abilities(self) -> dict[str, Any]:
        manifest = self.bundle.manifest
        drafters = self.engine.drafters if self.engine else (*(d.name for d in manifest.drafters), *COPYING)
        return {
            "drafters": [*drafters],
            "adapters": [*self.adapters],
            "tools": ToolFormat.of_template(self.chat_templates.own_with_tools) is not None,
            "reasoning": ReasoningFormat.of_template(self.chat_templates.default) is not None,
            "vision": manifest.main.vision is not None,
        }


class Models:
    """The models by name.

        models = Models({"qwen": "qwen-coder-pair"}, Config())
        async with models.use("qwen") as engine:
            ...

    strict: a single model answers to its own name only. Belongs to one event loop.

    Raises:
        BundleError: when a bundle is missing or damaged.
    """

    def __init__(self, bundles: Mapping[str, str | Path | Bundle], config: Config, *, strict: bool = False) -> None:
        if not bundles:
            raise OptionError("No model is served. Name at least one bundle.")
        any_form = config.device.takes_any_form
        opened = {name: open_bundle(path, for_this_machine=any_form) for name, path in bundles.items()}
        encoders = {name for name, bundle in opened.items() if bundle.manifest.main.text_encoder is not None}
        self._models = {name: Model(name, opened[name], config) for name in opened if name not in encoders}
        self.encoders = TextEncoders(
            {name: opened[name] for name in opened if name in encoders}, config.device.main_device, strict=strict
        )
        self._strict = strict or len(self._models) != 1

    @property
    def all(self) -> list[Model]:
        """The models that write, in the order they were named in."""
        return list(self._models.values())

    @property
    def served(self) -> list[Model | TextEncoder]:
        """All models, those that write first."""
        return [*self.all, *self.encoders.by_name.values()]

    def find(self, name: str) -> Model:
        """The model of this name; a single model answers to any, unless the server is strict.

        Raises:
            ApiError: with status 404.
        """
        if name not in self._models and not self._strict and name not in self.encoders.by_name:
            return self.all[0]
        return self.known(name)

    def known(self, name: str) -> Model:
        """The model of exactly this name. Raises as `find`."""
        if name in self._models:
            return self._models[name]
        shown = name[:100]
        message = f"There is no model '{shown}'. {nearest(shown, self._models)}"
        if not name:
            message = f"The request names no model. {nearest(shown, self._models)}"
        elif name in self.encoders.by_name:
            message = f"There is no model '{shown}' that writes. {nearest(shown, self._models)}"
        raise ApiError(404, message, param="model", code="model_not_found")

    def info(self, name: str) -> ModelInfo:
        """What is known of the model of exactly this name, whatever it does. Raises as `find`."""
        encoder = self.encoders.by_name.get(name)
        return self.known(name).info if encoder is None else encoder.info

    def find_adapted(self, name: str) -> tuple[Model, str | None]:
        """The model of this name; for "model:adapter" the adapter, too.

        Raises:
            ApiError: with status 404.
        """
        name = name if name in self._models else name.removesuffix(":latest")  # Ollama's name of all models' versions
        base, _, adapter = name.rpartition(":")
        if base not in self._models and not self._strict and adapter in self.all[0].adapters:
            base = self.all[0].name
        if name in self._models or base not in self._models:
            return self.find(name), None
        model = self._models[base]
        if adapter not in model.adapters:
            message = f"The model '{base}' has no adapter '{adapter[:100]}'. {nearest(adapter[:100], model.adapters)}"
            raise ApiError(404, message, param="model", code="model_not_found")
        return model, adapter

    @property
    def is_starting(self) -> bool:
        """Whether the first model is being loaded."""
        return any(m.loading for m in self.all) and not any(m.engine for m in self.all)

    @property
    def progress(self) -> str:
        """What the load of the first model is doing; empty when none is under way."""
        return next((model.progress for model in self.all if model.loading), "")

    @asynccontextmanager
    async def use(self, model: ServedBundle[Loaded]) -> AsyncIterator[Loaded]:
        """The model's engine, which is loaded if it is not, and stays while the block runs.

        It is loaded again after a device has failed, or when somebody has closed it. If it is a draft model's device,
        answers without that draft model end first.

        Raises:
            OutriderError: when it cannot be loaded.
        """
        model.num_users += 1
        try:
            while (engine := model.engine) is None or not engine.is_working or engine.has_failed:
                if engine is None:
                    if model.loading is None:
                        model.loading = asyncio.create_task(self._load(model))
                    await asyncio.shield(model.loading)  # the client may leave: others wait for the model too
                elif engine.is_working and model.num_answered:
                    model.unused.clear()
                    await model.unused.wait()
                else:
                    log.warning("%s is loaded again, as a device has failed, or its engine was closed.", model.name)
                    await self._unload(model)
            model.num_answered += 1
            try:
                yield engine
            finally:
                model.num_answered -= 1
                if not model.num_answered:
                    model.unused.set()
        finally:
            model.num_users -= 1
            model.last_used = time.monotonic()

    async def _load(self, model: ServedBundle[Any]) -> None:
        try:
            async with model.closing:  # there may be no room for a second engine beside the first one
                pass
            await asyncio.to_thread(model.load)
        finally:
            model.loading, model.progress = None, ""

    async def unload(self, model: ServedBundle[Any]) -> None:
        """Unload a model, unless somebody uses it."""
        if model.engine and not model.num_users:
            await self._unload(model)

    async def unload_idle(self, idle_seconds: float) -> None:
        """Unload the models that nobody has used for so long."""
        now = time.monotonic()
        for model in self.served:
            if now - model.last_used >= idle_seconds:
                await self.unload(model)

    async def watch(self, idle_seconds: float) -> None:
        """Unload idle models, for ever."""
        while True:
            await asyncio.sleep(min(max(idle_seconds / 4, 0.01), 30.0))
            await self.unload_idle(idle_seconds)

    def give_up_loading(self) -> None:
        """End the loads that are under way, each at its next step, and those to come."""
        for model in self.served:
            model.given_up = True

    async def close(self) -> None:
        """Unload all models. Requests that still run end with an error."""
        for model in self.served:
            if model.loading:
                await asyncio.gather(model.loading, return_exceptions=True)
            if model.engine:
                await self._unload(model)

    async def _unload(self, model: ServedBundle[Any]) -> None:
        engine, model.engine = model.engine, None
        if engine is not None:
            async with model.closing:
                await asyncio.to_thread(engine.close)  # waits for the engine's thread
                del engine
                vars(model).pop("texts", None)  # which has the engine's tokenizer
                # Errors of requests and their frames refer to each other, and to what the engine has had. A server
                # that has nothing to do collects no garbage by itself.
                await asyncio.to_thread(gc.collect)
                await asyncio.to_thread(return_free_pages)
            log.info("Unloaded %s.", model.name)
