"""A bundle that is served under a name, whatever its model does."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from functools import cached_property
from typing import Any, Generic, TypeVar

import msgspec

from outrider.bundle import Bundle
from outrider.bundle.manifest import MANIFEST_NAME
from outrider.engine.engine import Engine
from outrider.engine.text_encoders import Embedder, Reranker
from outrider.errors import RequestError
from outrider.server.protocol.responses import ModelInfo
from outrider.system.progress import listener
from outrider.version import __version__

log = logging.getLogger("outrider.server")

Loaded = TypeVar("Loaded", bound=Engine | Embedder | Reranker)


class ServedBundle(Generic[Loaded]):
    """A bundle, and what is loaded of it: `engine`, while it is. A subclass says how, in `_load`.

    loading: while it is loaded; `progress` says what that is doing. given_up: the load ends at its next step. closing:
    held while an engine that nobody uses gives up its memory. num_users: those that wait for the engine, too;
    num_answered: those that have it. unused: set when the last of them leaves. last_used: time.monotonic.
    """

    def __init__(self, name: str, bundle: Bundle) -> None:
        self.name, self.bundle = name, bundle
        self.engine: Loaded | None = None
        self.loading: asyncio.Task[None] | None = None
        self.progress, self.given_up = "", False
        self.closing, self.unused = asyncio.Lock(), asyncio.Event()
        self.num_users = self.num_answered = 0
        self.last_used = 0.0

    def load(self) -> None:
        """Load the engine. Takes seconds."""
        with listener(self._take_progress):
            self.engine = self._load()
        self.last_used = time.monotonic()
        log.info("Loaded %s.", self.name)

    def _load(self) -> Loaded:
        raise NotImplementedError

    def _take_progress(self, message: str) -> None:
        if self.given_up:
            raise RequestError(f"{self.name} is not loaded: the server is ending.")
        self.progress = message

    @cached_property
    def fingerprint(self) -> str:
        """Says of two answers whether the same program with the same files made them."""
        files = msgspec.json.encode((__version__, self.bundle.manifest.files))
        return f"outrider-{hashlib.sha256(files).hexdigest()[:12]}"

    @property
    def info(self) -> ModelInfo:
        """What is known of it without loading."""
        main = self.bundle.manifest.main
        about: dict[str, Any] = {
            "drafters": [], "adapters": [], "tools": False, "reasoning": False, "vision": False, **self._abilities
        }  # fmt: skip
        return ModelInfo(
            id=self.name,
            created=int((self.bundle.folder / MANIFEST_NAME).stat().st_mtime),
            loaded=self.engine is not None or self.closing.locked(),
            loading=self.progress if self.loading else None,
            max_model_len=main.geometry.context_length,
            architecture=main.geometry.architecture,
            quantization=main.weights,
            **about,
        )

    @property
    def _abilities(self) -> dict[str, Any]:
        """The fields of `info` that differ between kinds of models."""
        return {}
