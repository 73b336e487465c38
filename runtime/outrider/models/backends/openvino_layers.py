"""Models that use the cache of a main model in OpenVINO's format, among them some of its own layers."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from outrider.models.backends.openvino_paged import OpenVINOPaged
from outrider.types import CacheUse


class OpenVINOSharing(OpenVINOPaged):
    """A model without a cache of its own: its slots are the main model's, whose calls its own must not overlap with."""

    _main: OpenVINOPaged

    def allocate(self, max_tokens: int) -> None:  # noqa: ARG002
        """Bind the main model's cache, which was allocated before."""
        self._cache = self._main.paged_cache
        self._cache.bind(self._request)

    @property
    def bytes_per_token(self) -> float:
        """0: the cache is the main model's."""
        return 0.0

    @property
    def prefixes(self) -> None:
        """None: the cache is the main model's."""
        return

    @property
    def cache(self) -> CacheUse:
        """The main model's cache, of which nothing is this model's own."""
        return dataclasses.replace(self._main.cache, bytes_per_token=0.0)


class OpenVINOLayers(OpenVINOSharing):
    """Some of the layers of a model that was compiled in segments.

        main = OpenVINOPaged(path, vocab_size=49_152, cuts=(4, 20))
        main.allocate(max_tokens=8_192)
        draft = OpenVINOLayers(main, [*range(4), *range(20, 30)])
        draft.allocate(max_tokens=8_192)
        draft.submit([Chunk(slot, token_ids, num_rows=1)]).wait()    # a slot of the main model

    The weights are the main model's. So is the cache: these layers read what the main model has written there, and
    write where it would write next, in their own part of it. What they have written has to be trimmed, because the
    other layers' part is missing.

    Raises:
        ValueError: when the main model is not cut for these layers.
    """

    def __init__(self, main: OpenVINOPaged, layers: Iterable[int]) -> None:
        self._main, self.layers = main, tuple(layers)
        self.columns = main.columns
        if main.segments is None:
            raise ValueError("the model is not cut into segments")
        compiled = main.segments.only(self.layers)
        self._begin(main.core, compiled, main.device, main.vocab_size, adapters=main.adapters, graph=main.graph)

    @property
    def fingerprint(self) -> dict[str, str]:
        """What the time of a call depends on besides the model, as far as it is known."""
        return super().fingerprint | {"layers": ",".join(map(str, self.layers))}
