"""The embedding models and rerankers that are served."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outrider.bundle import Bundle
from outrider.bundle.manifest import TextEncoderKind
from outrider.engine.text_encoders import Embedder, Reranker
from outrider.errors import nearest
from outrider.server.errors import ApiError
from outrider.server.served import ServedBundle

_WHAT: dict[TextEncoderKind, tuple[str, str]] = {
    "embedding": ("embedding model", "BAAI/bge-small-en-v1.5"),
    "rerank": ("reranker", "BAAI/bge-reranker-base"),
}


class TextEncoder(ServedBundle[Embedder | Reranker]):
    """An embedding model or a reranker. device: "auto" is the CPU."""

    def __init__(self, name: str, bundle: Bundle, kind: TextEncoderKind, device: str) -> None:
        super().__init__(name, bundle)
        self.kind, self.device = kind, "CPU" if device == "auto" else device

    def _load(self) -> Embedder | Reranker:
        return (Embedder if self.kind == "embedding" else Reranker)(self.bundle, self.device)

    @property
    def _abilities(self) -> dict[str, Any]:
        return {"type": "embeddings" if self.kind == "embedding" else "rerank"}


class TextEncoders:
    """Embedding models and rerankers by name. strict: the only one of its kind answers to its own name only."""

    def __init__(self, bundles: Mapping[str, Bundle], device: str, *, strict: bool) -> None:
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
