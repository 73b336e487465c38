"""Admission: whether a request fits the model's context, the caches and the sizes a model was compiled for."""

from __future__ import annotations

import math
from collections.abc import Sequence

from outrider.bundle import Manifest
from outrider.config import DEFAULT_MAX_NEW_TOKENS, GenerationConfig
from outrider.errors import OptionError, RequestError, TooLong
from outrider.models.backends.devices import check_room
from outrider.models.cost.measure import timed_rows
from outrider.types import CompiledModel


class Admission:
    """Checks requests before they are queued. A request that can never fit fails at once, and says what would fit.

        admission = Admission(manifest, cache_size=1.5)
        admission.allocate(backends)
        max_new_tokens = admission.check(prompt_token_ids, config)

    cache_size: GB, for the caches of all models.
    """

    def __init__(self, manifest: Manifest, cache_size: float) -> None:
        self._context_length = manifest.main.geometry.context_length
        self._vocab_size = manifest.main.vocab_size
        self._cache_size = cache_size
        self._max_tokens = 0  # of each cache
        self.backends: dict[str, CompiledModel] = {}  # by role, "main" among them

    def allocate(self, backends: dict[str, CompiledModel], later: float = 0.0) -> None:
        """Allocate the caches of these models. Each cache holds the same number of tokens.

        later: bytes of a token in the caches of models that come later.

        Raises:
            OptionError: when `cache_size` is less than an engine needs.
            DeviceError: when a device has no room for it.
        """
        self.backends = backends
        max_tokens = int(self._cache_size * 1e9 / (self._bytes_per_token + later))
        self._max_tokens = max_tokens
        check_room(self.backends.values(), max_tokens)
        for backend in self.backends.values():
            backend.allocate(max_tokens)
        # The caches are to have room for timing the models' calls.
        least = max(backend.tokens_for(timed_rows(role, backend)[-1]) for role, backend in backends.items())
        if max_tokens < least:
            raise OptionError(
                f"{self._cache_holds(max_tokens)}; an engine needs room for {least:,}. {self._raise_cache_size(least)}"
            )

    def allocate_beside(self, backend: CompiledModel) -> None:
        """Allocate the cache of a model that comes later, with as many tokens as the others'. Raises as `allocate`."""
        check_room([backend], self._max_tokens)
        backend.allocate(self._max_tokens)
        if (lacking := self.max_tokens - backend.max_tokens) > 0:  # which its padding takes
            backend.allocate(self._max_tokens + lacking)

    @property
    def max_tokens(self) -> int:
        """Most tokens of one request, prompt and answer: the model's context or, if that is less, the cache."""
        return min(self._context_length, self._cache_tokens)

    def check(self, token_ids: Sequence[int], config: GenerationConfig, *, fits: bool = False) -> int:
        """How many tokens the answer to a prompt may have. fits: as many as there is room for, if these are fewer.

        Raises:
            RequestError: for a prompt that cannot be read, or does not fit.
            OptionError: for options that do not fit this vocabulary, or this prompt.
        """
        self._check_vocabulary(token_ids, config)
        wanted = config.max_new_tokens
        if fits and wanted is not None:
            wanted = max(min(wanted, self._most(len(token_ids))), 1)
        max_new_tokens = self._room(len(token_ids), wanted)
        if config.min_new_tokens > max_new_tokens:
            raise OptionError(
                f"min_new_tokens={config.min_new_tokens:,} is more than the {max_new_tokens:,} tokens that this answer "
                "may have. Lower it, or set max_new_tokens."
            )
        return max_new_tokens

    def _check_vocabulary(self, token_ids: Sequence[int], config: GenerationConfig) -> None:
        last = self._vocab_size - 1
        if unknown := [token_id for token_id in token_ids if not 0 <= token_id <= last]:
            raise RequestError(f"The prompt has token id {unknown[0]}; the vocabulary ends at {last:,}.")
        for name in ("stop_token_ids", "banned_token_ids", "logit_bias"):
            if unknown := [token_id for token_id in getattr(config, name) if token_id > last]:
                raise OptionError(f"{name} has token id {unknown[0]}; the vocabulary ends at {last:,}.")

    def _most(self, num_prompt_tokens: int) -> int:
        """Tokens that there is room for after a prompt."""
        fixed = self.backends["main"].capabilities.fixed
        rooms = [self._context_length, self._cache_tokens, *([fixed.max_tokens] if fixed else [])]
        return min(rooms) - num_prompt_tokens

    def _room(self, num_prompt_tokens: int, max_new_tokens: int | None) -> int:
        """Most tokens of the answer. Raises for a request that cannot fit."""
        context, cache = self._context_length, self._cache_tokens
        wanted = num_prompt_tokens + (max_new_tokens or 1)
        asked = f"{num_prompt_tokens:,} prompt tokens and max_new_tokens={max_new_tokens or 1:,}"
        if wanted > context:
            raise TooLong(f"{asked} exceed the model's context of {context:,} tokens. Shorten one of them.")
        self._check_fixed(num_prompt_tokens, wanted)
        if wanted > cache:
            most = max(backend.tokens_for(wanted) for backend in self._limiting)
            raise TooLong(f"{self._cache_holds(cache)}; {asked} need more. {self._raise_cache_size(most)}")
        return max_new_tokens or min(DEFAULT_MAX_NEW_TOKENS, min(context, cache) - num_prompt_tokens)

    def _check_fixed(self, num_prompt_tokens: int, num_tokens: int) -> None:
        """Raise for more tokens than a main model on an NPU was compiled for."""
        main = self.backends["main"]
        fixed, device = main.capabilities.fixed, main.device
        if fixed and num_prompt_tokens > fixed.max_prompt_tokens:
            raise TooLong(
                f"main_device={device!r} was compiled for prompts of up to {fixed.max_prompt_tokens:,} tokens; "
                f"this one has {num_prompt_tokens:,}. Load with npu_max_prompt_tokens={num_prompt_tokens}."
            )
        if fixed and num_tokens > fixed.max_tokens:
            wanted = num_tokens - fixed.max_prompt_tokens
            raise TooLong(
                f"main_device={device!r} was compiled for {fixed.max_tokens:,} tokens of prompt and answer; "
                f"this request needs {num_tokens:,}. Lower max_new_tokens, or load with "
                f"npu_max_new_tokens={wanted}."
            )

    @property
    def _cache_tokens(self) -> int:
        """Tokens that fit in the cache of every model that a request needs a slot in."""
        return min(backend.max_tokens for backend in self._limiting)

    @property
    def _limiting(self) -> list[CompiledModel]:
        """The models in which every request needs a slot. A draft model in fixed shapes is not one of them."""
        return [b for role, b in self.backends.items() if role == "main" or not b.capabilities.fixed]

    @property
    def _bytes_per_token(self) -> float:
        return sum(backend.bytes_per_token for backend in self.backends.values())

    def _cache_holds(self, num_tokens: int) -> str:
        return f"cache_size={self._cache_size:g} GB holds {num_tokens:,} tokens"

    def _raise_cache_size(self, num_tokens: int) -> str:
        size = _round_up((num_tokens + 1) * self._bytes_per_token / 1e9)
        return f"Raise cache_size to at least {size:g}."


def _round_up(size: float) -> float:
    """To three digits."""
    step = 10.0 ** (math.floor(math.log10(size)) - 2)
    return math.ceil(size / step) * step
