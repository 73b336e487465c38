"""The GGUF header reader against files that the `gguf` package wrote, whole and damaged."""

from __future__ import annotations

import contextlib
import struct
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from outrider.errors import ExportError
from outrider_export.gguf_file import TENSOR_TYPES, read_header, write_slim_copy

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def small(tmp_path: Path) -> Path:
    path = tmp_path / "small.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("llama.block_count", 3)
    writer.add_float32("llama.scale", 0.5)
    writer.add_bool("flag", True)
    writer.add_string("name", "Zwölf 🙂")
    writer.add_array("tokenizer.ggml.tokens", ["a", "ß", ""])
    writer.add_array("numbers", [1, -2, 3])
    writer.add_tensor("matrix", np.arange(64, dtype=np.float32).reshape(2, 32))
    quantised = gguf.quantize(np.ones((4, 64), np.float32), gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("quantised", quantised, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_reads_metadata_and_tensors(small: Path) -> None:
    header = read_header(small)
    assert header.architecture == "llama"
    assert header.of_architecture("block_count") == 3
    assert header.of_architecture("missing", 7) == 7
    assert header.metadata["llama.scale"] == 0.5
    assert header.metadata["flag"] is True
    assert header.metadata["name"] == "Zwölf 🙂"
    assert header.metadata["tokenizer.ggml.tokens"] == ["a", "ß", ""]
    assert header.metadata["numbers"] == [1, -2, 3]
    assert {name: (t.type, t.shape) for name, t in header.tensors.items()} == {
        "matrix": ("F32", (2, 32)),
        "quantised": ("Q8_0", (4, 64)),
    }
    with pytest.raises(ExportError, match=r"has no llama\.nothing in its metadata"):
        header.of_architecture("nothing")


def test_quantisation_is_named_or_the_most_frequent(small: Path) -> None:
    assert read_header(small).quantisation == "Q8_0"  # 256 weights against 64


def test_type_table_is_that_of_the_gguf_package() -> None:
    known = {int(kind): (kind.name, *sizes) for kind, sizes in gguf.GGML_QUANT_SIZES.items()}
    assert {i: known[i] for i in TENSOR_TYPES if i in known} == {i: TENSOR_TYPES[i] for i in TENSOR_TYPES if i in known}
    assert len(set(TENSOR_TYPES) & set(known)) >= 30


def test_every_truncation_is_noticed(small: Path, tmp_path: Path) -> None:
    whole = small.read_bytes()
    # The writer pads after the last tensor: what is missing there is not missed.
    last = read_header(small).data_start + 2 * 32 * 4 + 4 * 2 * 34
    cut = tmp_path / "cut.gguf"
    for size in range(last):
        cut.write_bytes(whole[:size])
        with pytest.raises(ExportError, match=r"cut short|damaged|not a GGUF file|cannot be read"):
            read_header(cut)
    cut.write_bytes(whole[:last])
    read_header(cut)


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damage_never_crashes(small: Path, tmp_path: Path, data: st.DataObject) -> None:
    """Any bytes overwritten: a header comes out or an ExportError, quickly, and nothing else."""
    damaged = bytearray(small.read_bytes())
    for _ in range(data.draw(st.integers(1, 8))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path / "damaged.gguf"
    path.write_bytes(damaged)
    with contextlib.suppress(ExportError):
        read_header(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "cannot be read"),
        (b"PK\x03\x04" + bytes(100), "is not a GGUF file: it starts with b'PK"),
        (b"GGUF" + struct.pack("<I", 1) + bytes(100), "has GGUF version 1"),
        (b"GGUF" + struct.pack(">I", 3) + bytes(100), "has GGUF version 50331648"),  # big-endian
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 60) + bytes(100), "promises 1,152,921,504,606,846,976 items"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 0) + bytes(100), "holds no tensors"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(ExportError, match=message):
        read_header(path)


def test_a_part_of_several_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model-00001-of-00002.gguf"
    _write(path, {"split.count": 2})
    with pytest.raises(ExportError, match="one of 2 parts"):
        read_header(path)


def test_nested_arrays_are_bounded(tmp_path: Path) -> None:
    path = tmp_path / "nested.gguf"
    key = b"k"
    nested = struct.pack("<IQ", 9, 1) * 2000
    path.write_bytes(
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + key + struct.pack("<I", 9) + nested
    )
    with pytest.raises(ExportError, match="nests arrays too deeply"):
        read_header(path)


def test_slim_copy_keeps_all_but_the_lists(small: Path, tmp_path: Path) -> None:
    slim = tmp_path / "slim.gguf"
    write_slim_copy(small, slim)
    old, new = read_header(small), read_header(slim)
    assert new.tensors == old.tensors
    assert new.metadata == {k: v for k, v in old.metadata.items() if not isinstance(v, list)} | {"llama.vocab_size": 3}
    theirs = {tensor.name: tensor.data for tensor in gguf.GGUFReader(slim).tensors}
    for tensor in gguf.GGUFReader(small).tensors:
        np.testing.assert_array_equal(theirs[tensor.name], tensor.data)


def _write(path: Path, metadata: dict[str, Any]) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in metadata.items():
        writer.add_uint16(key, value)
    writer.add_tensor("t", np.zeros(4, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
