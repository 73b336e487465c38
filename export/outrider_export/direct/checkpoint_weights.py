"""The weights of a checkpoint folder with safetensors files, by the names of Llama's checkpoints; see `weights`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from outrider.errors import ExportError
from outrider_export.direct import fp8, mxfp4
from outrider_export.direct.decoder import Decoder
from outrider_export.direct.experts import DOWN, GATE_UP
from outrider_export.direct.weights import EMBEDDING, HEAD, Indices, Rows, StoredMatrix, Weights, flat
from outrider_export.sources.safetensors import Tensor, tensors_of
from outrider_export.sources.source import name_in_text, read_json

_MODEL = "model."
_PIECE = 1 << 24  # bytes that are compared at once


class CheckpointWeights(Weights):
    """The weights of a checkpoint folder with safetensors files, one or several."""

    def __init__(self, folder: Path, decoder: Decoder) -> None:
        super().__init__(decoder, interleaved=decoder.arch.matrices.interleaved)
        self._folder = folder
        # Of a model that reads images, the text's part.
        tensors = {name_in_text(name): tensor for name, tensor in tensors_of(folder).items()}
        if not any(name.startswith(_MODEL) for name in tensors):  # saved without its head
            tensors = {name if name.startswith(HEAD) else f"{_MODEL}{name}": each for name, each in tensors.items()}
        self._tensors = tensors
        self._files: dict[Path, NDArray[np.uint8]] = {}
        self._config = read_json(folder / "config.json")
        self._settle_head()

    def stored(self, name: str) -> StoredMatrix | None:
        """See `Weights`. Norms have the architecture's offset."""
        stored = self.decoder.arch.in_checkpoint(self.decoder.in_file(name))
        if name.endswith((f"{GATE_UP}.weight", f"{DOWN}.weight")):
            if self.decoder.arch.experts.clamped or self.decoder.arch.experts.by_columns:
                return self._by_columns(stored)
            if (module := name.removesuffix(".weight")) != stored and module in self._tensors:  # Qwen3-VL's experts
                return self._by_columns(module)
        plain = stored.replace(".shared_expert.", ".")  # of layers without experts, in Llama 4
        beside = stored.replace(".mixer.", ".mixer.shared_experts.")  # of layers with experts, in Nemotron-H
        tensor = next((self._tensors[each] for each in (stored, beside, plain, name) if each in self._tensors), None)
        if tensor is None or not tensor.shape:
            return None
        if tensor.kind == fp8.KIND and len(tensor.shape) == 2:
            return self._scaled(stored if stored in self._tensors else name, tensor)
        data = self._data(tensor)
        rows = data.reshape(flat(tensor.shape)[0], -1)
        offset = np.float32(self.decoder.arch.offset_of(name))

        def read(part: slice | Indices) -> Rows:
            found = tensor.unpacked(np.ascontiguousarray(rows[part]))
            return found + offset if offset else found

        return StoredMatrix(flat(tensor.shape), tensor.size, read)

    def _settle_head(self) -> None:
        """Have the decoder say what the files have, as Transformers 5.5: an output matrix that differs is not tied.

        Raises:
            ExportError: when the configuration says that there is one, and there is none.
        """
        embedding, head = (self.decoder.arch.in_checkpoint(f"{name}.weight") for name in (EMBEDDING, HEAD))
        if head in self._tensors and self.decoder.tied:
            own = self._tensors[head]
            if (other := self._tensors.setdefault(embedding, own)) is not own and not self._are_equal(own, other):
                self.decoder = replace(self.decoder, tied=False)
        elif head not in self._tensors and not self.decoder.tied:
            raise ExportError(
                f"{self._folder} has no {head}, and its config.json says that the output matrix is not the embedding. "
                "Download the checkpoint again; if it is, write tie_word_embeddings: true there."
            )

    def _are_equal(self, one: Tensor, other: Tensor) -> bool:
        """Whether two tensors have the same bytes."""
        if (one.kind, one.shape) != (other.kind, other.shape):
            return False
        parts = (slice(begin, begin + _PIECE) for begin in range(0, one.size, _PIECE))
        first, second = self._data(one), self._data(other)
        return all(np.array_equal(first[part], second[part]) for part in parts)

    def _data(self, tensor: Tensor) -> NDArray[np.uint8]:
        if tensor.path not in self._files:
            self._files[tensor.path] = np.memmap(tensor.path, dtype=np.uint8, mode="r")
        return self._files[tensor.path][tensor.begin : tensor.begin + tensor.size]

    def _scaled(self, name: str, tensor: Tensor) -> StoredMatrix:
        """A matrix in FP8, with its scales."""
        scales = self._tensors.get(f"{name}{fp8.SCALES}")
        if scales is None:
            raise self.missing(f"{name}{fp8.SCALES}")
        codes, numbers = self._data(tensor).reshape(tensor.shape), scales.numbers()
        shape = (tensor.shape[0], tensor.shape[1])
        block = fp8.block_of(self._config, shape)

        def read(part: slice | Indices) -> Rows:
            try:
                factors = fp8.scales_of_rows(numbers, shape, block, np.arange(shape[0])[part])
            except ValueError as error:
                raise ExportError(f"{tensor.path} has {error} of {name}. Download the checkpoint again.") from error
            return fp8.unpacked(codes[part]) * factors

        return StoredMatrix(shape, tensor.size + scales.size, read)

    def _by_columns(self, name: str) -> StoredMatrix | None:
        """All matrices of experts: [experts, columns, rows], or in MXFP4. Transformers may save Qwen3-VL's by rows."""
        blocks, scales, whole = (self._tensors.get(f"{name}{end}") for end in ("_blocks", "_scales", ""))
        if blocks is not None and scales is not None and len(blocks.shape) == 4 and scales.shape == blocks.shape[:3]:
            groups = scales.shape[2]
            codes = self._data(blocks).reshape(-1, groups * mxfp4.GROUP // 2)
            powers = self._data(scales).reshape(-1, groups)
            shape, num_bytes = (len(powers), groups * mxfp4.GROUP), blocks.size + scales.size
            return StoredMatrix(shape, num_bytes, lambda part: mxfp4.unpacked(codes[part], powers[part]), is_mxfp4=True)
        if whole is None or len(whole.shape) != 3:
            return None
        count, columns, rows = whole.shape
        numbers = self._data(whole).reshape(count, columns, rows, -1)
        hidden = self.decoder.hidden_size
        if hidden != (columns if name.endswith("gate_up_proj") else rows):
            columns, rows, numbers = rows, columns, numbers.swapaxes(1, 2)

        def read(part: slice | Indices) -> Rows:
            chosen = np.arange(count * rows)[part]
            picked = np.ascontiguousarray(numbers[chosen // rows, :, chosen % rows])
            return whole.unpacked(picked.reshape(len(chosen), -1))

        return StoredMatrix((count * rows, columns), whole.size, read)

    def missing(self, name: str) -> ExportError:
        """See `Weights`."""
        name = self.decoder.arch.in_checkpoint(self.decoder.in_file(name))
        return ExportError(f"{self._folder} has no matrix {name}. Download the checkpoint again.")
