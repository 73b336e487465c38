"""Speculative decoding for edge machines: the same text, sooner.

    import outrider

    engine = outrider.load("my-pair")
    for chunk in engine.stream("Why is the sky blue?", max_new_tokens=200):
        print(chunk.text, end="", flush=True)
    print(chunk.stats)

Importing the package loads nothing heavy: all names but errors are fetched from their modules when they are first used
(PEP 562).
What apps may import, here and elsewhere, is listed in docs/api.md. Packages that are not there are internal.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from outrider.errors import (
    BundleError,
    DeviceError,
    DeviceWarning,
    DrafterError,
    ExactnessWarning,
    ExportError,
    NoTokenLeft,
    OptionError,
    OutriderError,
    RequestError,
    TooLong,
    VocabularyMismatch,
)
from outrider.version import __version__ as __version__

if TYPE_CHECKING:
    from outrider.bundle.folder import read_bundle
    from outrider.config import Config, DeviceConfig, GenerationConfig, SchedulerConfig
    from outrider.decoding.metrics import Stats
    from outrider.decoding.results import AnswerToken, Result, TextChunk
    from outrider.engine.chat import Chat, ChatTurn
    from outrider.engine.engine import Engine, load
    from outrider.engine.text_encoders import Embedder, Embeddings, Ranked, Ranking, Reranker
    from outrider.models.backends.devices import Device, find_devices
    from outrider.types import CacheUse, Prompt, TokenLogprobs

__all__ = [
    "AnswerToken", "BundleError", "CacheUse", "Chat", "ChatTurn", "Config", "Device", "DeviceConfig", "DeviceError",
    "DeviceWarning", "DrafterError", "Embedder", "Embeddings", "Engine", "ExactnessWarning", "ExportError",
    "GenerationConfig", "NoTokenLeft", "OptionError", "OutriderError", "Prompt", "Ranked", "Ranking", "RequestError",
    "Reranker", "Result", "SchedulerConfig", "Stats", "TextChunk", "TokenLogprobs", "TooLong", "VocabularyMismatch",
    "find_devices", "load", "read_bundle",
]  # fmt: skip

_MODULES = {
    "bundle": ("read_bundle",),
    "engine.chat": ("Chat", "ChatTurn"),
    "config": ("Config", "DeviceConfig", "GenerationConfig", "SchedulerConfig"),
    "engine.engine": ("Engine", "load"),
    "engine.text_encoders": ("Embedder", "Embeddings", "Ranked", "Ranking", "Reranker"),
    "decoding.metrics": ("Stats",),
    "decoding.results": ("AnswerToken", "Result", "TextChunk"),
    "models.backends.devices": ("Device", "find_devices"),
    "types": ("CacheUse", "Prompt", "TokenLogprobs"),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

try:
    Path.home()
except RuntimeError:  # without a home folder, OpenVINO's statistics fail, and its import with them
    sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'outrider' has no attribute '{name}'")
    value = getattr(importlib.import_module(f"outrider.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
