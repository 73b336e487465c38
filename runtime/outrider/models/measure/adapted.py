"""A backend that reads everything with one adapter, for measurements."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from outrider.types import NO_PROMPT, Backend, Prompt, Slot


class Adapted:
    """A backend whose slots all have an adapter. All else is the backend's own.

    measure_exactness(Adapted(backend, "pirate"))    # of rows that have the adapter
    """

    def __init__(self, backend: Backend, adapter: str) -> None:
        self._backend, self._adapter = backend, adapter

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def open(self, max_tokens: int, prompt: Prompt = NO_PROMPT) -> Slot | None:
        """A slot with the adapter."""
        return self._backend.open(max_tokens, replace(prompt, adapter=self._adapter))
