"""The header of a GGUF file: metadata, and the names, types and shapes of the tensors.

Every value's type is checked when it is accessed. `gguf_reader` reads it.

Source: the GGUF specification, ggml/docs/gguf.md, versions 2 and 3, little-endian.
"""

from __future__ import annotations

import math
import reprlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.errors import ExportError
from outrider_export.sources.gguf_shards import shards_of

# id: name, weights per block, bytes per block
TENSOR_TYPES = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 9: ("Q8_1", 32, 40), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82), 23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1), 25: ("I16", 1, 2), 26: ("I32", 1, 4), 27: ("I64", 1, 8), 28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56), 30: ("BF16", 1, 2), 34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17), 40: ("NVFP4", 64, 36),
}  # fmt: skip
_BLOCKS = {name: (count, size) for name, count, size in TENSOR_TYPES.values()}
# general.file_type: the name under which people know a mixture of tensor types
FILE_TYPES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 7: "Q8_0", 8: "Q5_0", 9: "Q5_1", 10: "Q2_K", 11: "Q3_K_S",
    12: "Q3_K_M", 13: "Q3_K_L", 14: "Q4_K_S", 15: "Q4_K_M", 16: "Q5_K_S", 17: "Q5_K_M", 18: "Q6_K", 32: "BF16",
}  # fmt: skip

DIVISORS = "rope_freqs.weight"  # a tensor: of rotary frequencies, as Llama 3 scales them


@dataclass(frozen=True)
class UnreadArray:
    """An array of the metadata that is not needed, or has items of a wrong type."""

    num_items: int

    def __len__(self) -> int:
        return self.num_items


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of the file."""

    type: str  # "F32", "Q4_K", …
    shape: tuple[int, ...]  # rows first, as in NumPy; GGUF stores the reverse order
    path: Path  # the file that has its data
    begin: int  # of its data in that file, in bytes

    @property
    def num_weights(self) -> int:
        """The number of weights."""
        return math.prod(self.shape)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of weights."""
        return _BLOCKS[self.type][1]

    @property
    def num_bytes(self) -> int:
        """Bytes of its data."""
        return self.num_weights // _BLOCKS[self.type][0] * self.block_bytes

    def stored(self) -> NDArray[np.uint8]:
        """Its bytes, as the file has them: uint8 [num_bytes], mapped."""
        return np.asarray(np.memmap(self.path, np.uint8, "r", self.begin, (self.num_bytes,)))


@dataclass(frozen=True)
class GGUFHeader:
    """The header of a GGUF file; of a model in several files, the first one's with the tensors of all."""

    path: Path
    metadata: dict[str, Any]  # arrays as lists of str, memoryviews of numbers, or `UnreadArray`
    tensors: dict[str, TensorInfo]
    entries: dict[str, tuple[int, int]]  # where each key with its value lies in the file: first byte, one past the last

    @property
    def num_bytes(self) -> int:
        """Bytes of all files."""
        return sum(path.stat().st_size for path in shards_of(self.path))

    @property
    def alignment(self) -> int:
        """Alignment of tensors, in bytes."""
        return self.integer("general.alignment", 32, least=1)

    @property
    def architecture(self) -> str:
        """`general.architecture`: llama, qwen2, …"""
        return self.text("general.architecture")

    @property
    def num_modules(self) -> int:
        """How many blocks after the model's layers are MTP modules."""
        return self.integer(".nextn_predict_layers", 0, least=0)

    @property
    def num_layers(self) -> int:
        """The number of layers, without MTP modules."""
        count = self.integer(".block_count", least=1)
        if self.num_modules >= count:
            raise ExportError(
                f"{self.path} has {count:,} blocks, and {self.num_modules:,} of them are MTP modules. There has to be "
                "a layer before them: fetch it again."
            )
        return count - self.num_modules

    def full_key(self, key: str) -> str:
        """A key as the file has it: of ".block_count", which is one of its architecture's, "llama.block_count"."""
        return f"{self.architecture}{key}" if key.startswith(".") else key

    def value(self, key: str, default: Any = None) -> Any:
        """What the metadata has under a key, of any type. This and all that follow take architectures' keys as ".…"."""
        return self.metadata.get(self.full_key(key), default)

    # The typed values of keys. All raise ExportError if there is no such key and no default, or one of another type.

    def integer(self, key: str, default: int | None = None, least: int | None = None) -> int:
        """An integer, of at least `least`."""
        value = self._require(key, default)
        if type(value) is not int or (least is not None and value < least):  # isinstance would accept bools
            raise self._wrong(key, value, "an integer" if least is None else f"an integer of at least {least}")
        return value

    def real(self, key: str, default: float | None = None) -> float:
        """A number."""
        value = self._require(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self._wrong(key, value, "a number")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """A bool."""
        value = self._require(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, value, "true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """A text, in UTF-8."""
        value = self._require(key, default)
        if not (isinstance(value, str) and _is_utf8(value)):
            raise self._wrong(key, value, "text in UTF-8")
        return value

    def texts(self, key: str) -> list[str]:
        """An array of texts in UTF-8, one of the arrays that are read."""
        value = self._require(key)
        if not isinstance(value, list) or {*map(type, value)} - {str}:
            raise self._wrong(key, value, "an array of texts")
        if not _is_utf8("".join(value)):
            raise ExportError(f"{self.path}: {key} has a text that is not UTF-8, which tokenizer.json cannot hold.")
        return value

    def integers(self, key: str) -> Sequence[int]:
        """An array of integers, one of the arrays that are read."""
        value = self._require(key)
        if not isinstance(value, (list, memoryview)) or getattr(value, "format", "") == "f":
            raise self._wrong(key, value, "an array of integers")
        return value

    def floats(self, key: str) -> Sequence[float]:
        """An array of float32, one of the arrays that are read."""
        value = self._require(key)
        if not isinstance(value, memoryview) or value.format != "f":
            raise self._wrong(key, value, "an array of float32")
        return value

    def _require(self, key: str, default: Any = None) -> Any:
        value = self.value(key, default)
        if value is None:
            raise ExportError(
                f"{self.path} has no {self.full_key(key)} in its metadata, so it is not a whole language model."
            )
        return value

    def _wrong(self, key: str, value: Any, rule: str) -> ExportError:
        found = f"an array of {len(value):,}" if is_array(value) else reprlib.repr(value)
        return ExportError(
            f"{self.path}: {self.full_key(key)} is {found}; it has to be {rule}. Fetch the file again, or convert its "
            "model again."
        )

    @property
    def quantisation(self) -> str:
        """The file's quantisation as people name it: "Q4_K_M", or the type that most weights have."""
        named = FILE_TYPES.get(self.integer("general.file_type", -1))
        if named:
            return named
        weights: Counter[str] = Counter()
        for tensor in self.tensors.values():
            weights[tensor.type] += tensor.num_weights
        return weights.most_common(1)[0][0]


def is_array(value: object) -> bool:
    """Whether a value of the metadata is an array, read or not."""
    return isinstance(value, (list, memoryview, UnreadArray))


def _is_utf8(text: str) -> bool:
    """Whether `text` was read from UTF-8. The reader turns other bytes into surrogates."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
