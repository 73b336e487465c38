"""The embedding models and rerankers that are served: loaded at the first request, unloaded when nobody uses them."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import msgspec

from outrider.bundle import Bundle
from outrider.bundle.manifest import MANIFEST_NAME, TextEncoderKind
from outrider.engine.text_encoders import Embedder, Reranker
from outrider.errors import nearest
from outrider.server.errors import ApiError
from outrider.server.protocol.responses import ModelInfo
from outrider.version import __version__

log = logging.getLogger("outrider.server")

_WHAT: dict[TextEncoderKind, tuple[str, str]] = {
    "embedding": ("embedding model", "BAAI/bge-small-en-v1.5"),
    "rerank": ("reranker", "BAAI/bge-reranker-base"),
}


def fingerprint_of(bundle: Bundle) -> str:
    """Says of two answers whether the same program with the same files made them."""
    files = msgspec.json.encode((__version__, bundle.manifest.files))
    return f"outrider-{hashlib.sha256(files).hexdigest()[:12]}"


@dataclass(eq=False)
class TextEncoder:
    """A bundle that is served under a name. loaded: while it is."""

    name: str
    bundle: Bundle
    kind: TextEncoderKind
    device: str
    loaded: Embedder | Reranker | None = None
    loading: asyncio.Lock = field(default_factory=asyncio.Lock)
    num_users: int = 0
    last_used: float = 0.0  # time.monotonic

    @property
    def fingerprint(self) -> str:
        """As a model's that writes."""
        return fingerprint_of(self.bundle)

    @property
    def info(self) -> ModelInfo:
        """What is known of it without loading."""
        main = self.bundle.manifest.main
        return ModelInfo(
            id=self.name,
            created=int((self.bundle.folder / MANIFEST_NAME).stat().st_mtime),
            loaded=self.loaded is not None,
            loading=None,
            drafters=[],
            adapters=[],
            max_model_len=main.geometry.context_length,
            architecture=main.geometry.architecture,
            quantization=main.weights,
            tools=False,
            reasoning=False,
            vision=False,
            type="embeddings" if self.kind == "embedding" else "rerank",
        )


class TextEncoders:
    """Embedding models and rerankers by name.

    device: "auto" is the CPU. strict: the only one of its kind answers to its own name only. Belongs to one event loop.
    """

    def __init__(self, bundles: Mapping[str, Bundle], device: str, *, strict: bool) -> None:
        device = "CPU" if device == "auto" else device
        self._strict = strict
        self.by_name = {
            name: TextEncoder(name, bundle, entry.kind, device)
            for name, bundle in bundles.items()
            if (entry := bundle.manifest.main.text_encoder) is not None
        }

    def find(self, name: str, kind: TextEncoderKind) -> TextEncoder:
        """The model of this name; the only one of its kind answers to any, unless the server is strict.

        Raises:
            ApiError: with status 404.
        """
        known = {each.name: each for each in self.by_name.values() if each.kind == kind}
        what, example = _WHAT[kind]
        if not known:
            message = f"No {what} is served. Name one beside the others, such as: outrider serve MODEL {example}"
            raise ApiError(404, message, param="model", code="model_not_found")
        if name in known:
            return known[name]
        if len(known) == 1 and not self._strict:
            return next(iter(known.values()))
        shown = name[:100]
        raise ApiError(
            404, f"There is no {what} '{shown}'. {nearest(shown, known)}", param="model", code="model_not_found"
        )

    @asynccontextmanager
    async def use(self, model: TextEncoder) -> AsyncIterator[Embedder | Reranker]:
        """The model, which is loaded if it is not, and stays while the block runs.

        Raises:
            OutriderError: when it cannot be loaded.
        """
        model.num_users += 1
        try:
            async with model.loading:
                if (loaded := model.loaded) is None:
                    made: Callable[..., Embedder | Reranker] = Embedder if model.kind == "embedding" else Reranker
                    found = await asyncio.to_thread(made, model.bundle, model.device)
                    model.loaded = loaded = found
                    log.info("Loaded %s.", model.name)
            yield loaded
        finally:
            model.num_users -= 1
            model.last_used = time.monotonic()

    async def unload_idle(self, idle_seconds: float) -> None:
        """Unload the models that nobody has used for so long."""
        now = time.monotonic()
        for model in self.by_name.values():
            if model.loaded and not model.num_users and now - model.last_used >= idle_seconds:
                loaded, model.loaded = model.loaded, None
                await asyncio.to_thread(loaded.close)
                log.info("Unloaded %s.", model.name)
