"""From an image's tiles to embeddings, through the bundle's vision encoder."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np

from outrider.errors import BundleError, DeviceError, one_line
from outrider.system.core import new_core
from outrider.system.processes import spare

if TYPE_CHECKING:
    from pathlib import Path

    import openvino as ov
    from numpy.typing import NDArray

    from outrider.inputs.vision.processor import Tiles

_MOST_KEPT = 8  # images whose embeddings are in memory: those of a conversation are asked for at every turn


class VisionEncoder:
    """The bundle's vision encoder, compiled at the first image. Thread-safe.

        embeds, keys = encoder.encode(tiles)    # of each run of tokens float32 [n, hidden], and what identifies it

    One image is encoded at a time, in one call, so that its embeddings do not depend on other images.

    Raises:
        BundleError: at the first image, when the file cannot be read.
        DeviceError: when the device cannot compile or run it.
    """

    def __init__(self, path: Path, device: str = "CPU", precision: str = "f32") -> None:
        self._path, self._device, self._precision = path, device, precision
        self._lock = Lock()
        self._request: ov.InferRequest | None = None
        self._known: OrderedDict[bytes, NDArray[np.float32]] = OrderedDict()
        self.thread = ThreadPoolExecutor(1, "outrider images")  # where event loops have images read, one by one

    def encode(self, tiles: Tiles) -> tuple[list[NDArray[np.float32]], list[bytes]]:
        """The embeddings of an image's runs of tokens, and the sha256 of each one's number and all that is read.

        The encoder's bits for a tile may depend on how many others are in the call. So its key names the call, too.
        """
        shape = *tiles.pixels.shape, tiles.rows, tiles.columns
        read = hashlib.sha256(repr(shape).encode() + tiles.pixels.tobytes())
        for name in sorted(tiles.others):  # of two black images, say, their size
            read.update(tiles.others[name].tobytes())
        whole = read.digest()
        with self._lock:
            embeds = self._known.pop(whole, None)
            if embeds is None:
                embeds = self._infer({"pixel_values": tiles.pixels, **tiles.others})
            self._known[whole] = embeds
            if len(self._known) > _MOST_KEPT:
                self._known.popitem(last=False)
        runs = np.split(embeds.reshape(-1, embeds.shape[-1]), np.cumsum(tiles.lengths)[:-1])
        return runs, [hashlib.sha256(whole + b"%d" % i).digest() for i in range(len(runs))]

    def close(self) -> None:
        """Drop the compiled encoder and the embeddings that are kept. Closing twice does no harm."""
        self.thread.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            self._request = None
            self._known.clear()

    def _infer(self, inputs: dict[str, NDArray[Any]]) -> NDArray[np.float32]:
        if self._request is None:
            self._request = self._compile()
        try:
            self._request.infer(inputs)
        except RuntimeError as error:
            self._request = None  # a failed call may leave a graph that computes other numbers: compile it again
            raise DeviceError(f"{self._device} cannot encode an image: {one_line(error)}") from error
        made: NDArray[Any] = self._request.get_output_tensor(0).data
        return made.astype(np.float32)  # a copy: the next image's are written there

    def _compile(self) -> ov.InferRequest:
        core = new_core()
        try:
            model = core.read_model(self._path)
        except RuntimeError as error:
            raise BundleError(f"{self._path} cannot be read: {one_line(error)}. Export the bundle again.") from error
        hints = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": self._precision}
        try:
            request = core.compile_model(model, self._device, hints).create_infer_request()
        except RuntimeError as error:
            raise DeviceError(f"{self._device} cannot compile the vision encoder: {one_line(error)}") from error
        spare(self, request)
        return request
