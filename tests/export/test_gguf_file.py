"""The GGUF header reader against files that the `gguf` package wrote, whole and damaged."""

import contextlib
import re
import struct
import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fuzzing import damaged, few_or_many, fuzz
from outrider.errors import ExportError, OutriderError
from outrider_export.describe.plan import make_plan
from outrider_export.describe.special_tokens import eos_of, eos_of_gguf, infill_of
from outrider_export.sources.gguf_copy import write_slim_copy
from outrider_export.sources.gguf_file import TENSOR_TYPES, UnreadArray, is_array
from outrider_export.sources.gguf_reader import read_header
from outrider_export.sources.source import locate
from outrider_export.tokenizers.gguf_tokenizer import write_tokenizer
from outrider_export.tokenizers.vocabulary import Vocabulary
from tiny import finish_gguf

# Metadata as the format has it: the number of a type, and a value's bytes.
Value = tuple[int, bytes]
UINT8, UINT32, STRING, ARRAY = 0, 4, 8, 9


def integer(value: int) -> Value:
    return UINT32, struct.pack("<I", value)


def text(value: str, encoding: str = "utf-8") -> Value:
    content = value.encode(encoding)
    return STRING, struct.pack("<Q", len(content)) + content


def array(item: int, items: list[bytes]) -> Value:
    return ARRAY, struct.pack("<IQ", item, len(items)) + b"".join(items)


def write_raw(path: Path, metadata: dict[str, Value], name: str = "token_embd.weight") -> Path:
    """A GGUF file with this metadata, byte for byte, and one float32 matrix [4, 2]."""
    with path.open("wb") as file:
        file.write(b"GGUF" + struct.pack("<IQQ", 3, 1, len(metadata)))
        for key, (kind, value) in metadata.items():
            file.write(text(key)[1] + struct.pack("<I", kind) + value)
        file.write(text(name)[1] + struct.pack("<IQQIQ", 2, 2, 4, 0, 0))
        file.write(b"\0" * (-file.tell() % 32) + bytes(range(32)))
    return path


# All that is read of a file's metadata.
READ: dict[str, Value] = {
    "general.architecture": text("llama"),
    "general.alignment": integer(32),
    "general.file_type": integer(0),
    "split.count": integer(1),
    "split.no": integer(0),
    "split.tensors.count": integer(1),
    "llama.block_count": integer(1),
    "llama.context_length": integer(8),
    "llama.embedding_length": integer(2),
    "llama.attention.head_count": integer(1),
    "llama.attention.head_count_kv": integer(1),
    "llama.attention.key_length": integer(2),
    "llama.rope.scaling.type": text("none"),
    "llama.vocab_size": integer(4),
    "tokenizer.ggml.model": text("gpt2"),
    "tokenizer.ggml.pre": text("smollm"),
    "tokenizer.ggml.tokens": array(STRING, [text(token)[1] for token in ("a", "b", "ab", "<s>")]),
    "tokenizer.ggml.token_type": array(UINT32, [struct.pack("<I", kind) for kind in (1, 1, 1, 3)]),
    "tokenizer.ggml.merges": array(STRING, [text("a b")[1]]),
    "tokenizer.ggml.add_bos_token": (7, b"\1"),
    **{f"tokenizer.ggml.{name}_token_id": integer(3) for name in ("bos", "eos", "eot", "eom", "padding", "unknown")},
    **{f"tokenizer.ggml.fim_{name}_token_id": integer(3) for name in ("pre", "suf", "mid", "pad", "rep", "sep")},
    "tokenizer.chat_template": text("{{ messages }}"),
}


def read_for_conversion(path: Path, folder: Path) -> None:
    """Read of a GGUF file what an export reads that converts it."""
    header = read_header(path)
    plan = make_plan("main", locate(path), "openvino", "int8")
    assert header.quantisation
    eos_of(plan)
    infill_of(plan)
    write_tokenizer(header, folder)
    write_slim_copy(path, path.with_name("slim.gguf"))


def read_all(path: Path, folder: Path) -> None:
    """Read of a GGUF file what an export reads."""
    read_for_conversion(path, folder)
    make_plan("main", locate(path), "openvino", None)


@pytest.fixture
def small(tmp_path: Path) -> Path:
    path = tmp_path / "small.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("llama.block_count", 3)
    writer.add_float32("llama.scale", 0.5)
    writer.add_bool("flag", True)
    writer.add_string("name", "Zwölf 🙂")
    writer.add_array("tokenizer.ggml.tokens", ["a", "ß", ""])
    writer.add_array("tokenizer.ggml.token_type", [1, 1, 300])
    writer.add_array("numbers", [1, -2, 3])
    writer.add_array("nested", [["a", "b"], ["c"]])
    writer.add_tensor("matrix", np.arange(64, dtype=np.float32).reshape(2, 32))
    quantised = gguf.quantize(np.ones((4, 64), np.float32), gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("quantised", quantised, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    finish_gguf(writer)
    return path


def test_a_hole_that_a_download_left_is_found_before_anything_is_converted(gguf_file: Path, tmp_path: Path) -> None:
    tensors = read_header(gguf_file).tensors
    make_plan("main", locate(gguf_file), "openvino", "int8")
    whole = gguf_file.read_bytes()
    path = tmp_path / "hole.gguf"

    def write_hole(begin: int, end: int) -> None:
        path.write_bytes(whole[:begin] + bytes(end - begin) + whole[end:])

    for name, beyond in (("token_embd.weight", 100), ("blk.0.ffn_down.weight", 100), ("output_norm.weight", 0)):
        begin, end = tensors[name].begin, tensors[name].begin + tensors[name].num_bytes
        write_hole(begin, end + beyond)
        with pytest.raises(
            ExportError, match=rf"hole\.gguf has a hole at byte {begin:,}: {name} .*of {len(tensors)} are"
        ):
            make_plan("main", locate(path), "openvino", "int8")
    alone = tensors["blk.0.ffn_down.weight"]
    write_hole(alone.begin, alone.begin + alone.num_bytes)
    make_plan("main", locate(path), "openvino", "int8")  # a layer that does nothing yet
    begin = tensors["blk.1.attn_q.weight"].begin
    path.write_bytes(whole[:begin] + bytes(len(whole) - begin))
    with pytest.raises(ExportError, match=rf"has a hole at byte {begin:,}: \S+ and \d+ more tensors of"):
        make_plan("main", locate(path), "openvino", "int8")


def test_reads_metadata_and_tensors(small: Path) -> None:
    header = read_header(small)
    assert header.architecture == "llama"
    assert header.integer(".block_count") == 3
    assert header.integer("llama.missing", 7) == 7
    assert header.metadata["llama.scale"] == 0.5
    assert header.metadata["flag"] is True
    assert header.metadata["name"] == "Zwölf 🙂"
    assert header.metadata["tokenizer.ggml.tokens"] == ["a", "ß", ""]
    assert list(header.integers("tokenizer.ggml.token_type")) == [1, 1, 300]
    assert header.metadata["numbers"] == UnreadArray(3)
    assert header.metadata["nested"] == UnreadArray(2)
    assert {name: (t.type, t.shape) for name, t in header.tensors.items()} == {
        "matrix": ("F32", (2, 32)),
        "quantised": ("Q8_0", (4, 64)),
    }
    with pytest.raises(ExportError, match=r"has no llama\.nothing in its metadata"):
        header.integer("llama.nothing")


def test_quantisation_is_named_or_the_most_frequent(small: Path) -> None:
    assert read_header(small).quantisation == "Q8_0"  # 256 weights against 64


def test_type_table_is_that_of_the_gguf_package() -> None:
    known = {int(kind): (kind.name, *sizes) for kind, sizes in gguf.GGML_QUANT_SIZES.items()}
    assert {i: known[i] for i in TENSOR_TYPES if i in known} == {i: TENSOR_TYPES[i] for i in TENSOR_TYPES if i in known}
    assert len(set(TENSOR_TYPES) & set(known)) >= 30


def test_every_truncation_is_noticed(small: Path, tmp_path: Path) -> None:
    whole = small.read_bytes()
    # The writer pads after the last tensor: what is missing there is not missed.
    last = max(tensor.begin + tensor.num_bytes for tensor in read_header(small).tensors.values())
    cut = tmp_path / "cut.gguf"
    for size in range(last):
        cut.write_bytes(whole[:size])
        with pytest.raises(ExportError, match=r"cut short|damaged|not a GGUF file|cannot be read"):
            read_header(cut)
    cut.write_bytes(whole[:last])
    read_header(cut)


def test_tensors_share_no_bytes(small: Path) -> None:
    """A thousand tensors of the same megabyte are a gigabyte."""
    whole = small.read_bytes()
    at = whole.index(b"quantised") + len("quantised") + 4 + 2 * 8 + 4  # after dimensions, shape and type
    small.write_bytes(whole[:at] + struct.pack("<Q", 32) + whole[at + 8 :])
    with pytest.raises(ExportError, match="two tensors have the bytes from"):
        read_header(small)


@few_or_many
def test_damage_never_crashes(tmp_path: Path, num_examples: int) -> None:
    path = tmp_path / "damaged.gguf"

    def read(content: bytes) -> None:
        path.write_bytes(content)
        read_for_conversion(path, tmp_path / "tokenizer")

    whole = write_raw(tmp_path / "whole.gguf", READ).read_bytes()
    fuzz(read, whole, damaged(whole), num_examples)


@pytest.mark.parametrize(("content", "message"), [
    (b"", "cannot be read"),
    (b"PK\x03\x04" + bytes(100), "is not a GGUF file: it starts with b'PK"),
    (b"GGUF" + struct.pack("<I", 1) + bytes(100), "has GGUF version 1"),
    (b"GGUF" + struct.pack(">I", 3) + bytes(100), "has GGUF version 50331648"),  # big-endian
    (b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 60) + bytes(100), "promises 1,152,921,504,606,846,976 items"),
    (b"GGUF" + struct.pack("<IQQ", 3, 0, 0) + bytes(100), "holds no tensors"),
])  # fmt: skip
def test_other_files_are_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(ExportError, match=message):
        read_header(path)


NO_CODE = {key: value for key, value in READ.items() if ".fim_" not in key}


def ends_of(folder: Path, tokens: list[str], kind: int = 3, **ids: int) -> list[str]:
    """The texts of the tokens that end an answer, in a file with these tokens and these ids in its metadata."""
    path = write_raw(
        folder / "ends.gguf",
        NO_CODE
        | {
            "tokenizer.ggml.tokens": array(STRING, [text(token)[1] for token in tokens]),
            "tokenizer.ggml.token_type": array(UINT32, [struct.pack("<I", kind)] * len(tokens)),
            "tokenizer.ggml.merges": array(STRING, []),
        }
        | {f"tokenizer.ggml.{name}_token_id": integer(99) for name in ("bos", "eos", "eot", "eom")}
        | {f"tokenizer.ggml.{name}_token_id": integer(token_id) for name, token_id in ids.items()},
    )
    vocabulary = Vocabulary.of_gguf(read_header(path))
    return [tokens[token_id] for token_id in eos_of_gguf(read_header(path), vocabulary)]


def test_tokens_end_an_answer_where_llamacpp_ends_it(tmp_path: Path) -> None:
    code = ["<|fim_prefix|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "x", "y"]
    assert ends_of(tmp_path, code, eos=4) == ["<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "x"]
    assert ends_of(tmp_path, code, fim_pad=5) == ["<|repo_name|>", "<|file_sep|>", "y"]  # the key before the text
    assert ends_of(tmp_path, ["<|user|>", "<|end|>", "</s>", "<|call|>"]) == ["<|end|>", "</s>", "<|call|>"]
    harmony = ["<|end|>", "<|return|>", "<|call|>", "<|message|>"]
    assert ends_of(tmp_path, harmony, eos=1) == ["<|return|>", "<|call|>"]
    assert ends_of(tmp_path, harmony, eos=0, eom=3) == ["<|return|>", "<|call|>", "<|message|>"]
    assert ends_of(tmp_path, ["</s>", "x"], kind=1, eos=1) == ["x"]  # plain text, of HTML
    assert ends_of(tmp_path, ["</s>", "<turn|>", "<|tool_response>"], eos=1) == ["<turn|>", "<|tool_response>"]


def test_a_file_names_the_tokens_between_which_it_fills_in(tmp_path: Path) -> None:
    keys = {"fim_pre": 2, "suffix": 1, "fim_mid": 0}  # one by its older name
    for names, found in ((keys, ("ab", "b", "a")), ({"fim_pre": 2}, None), (keys | {"fim_mid": 9}, None)):
        metadata = {f"tokenizer.ggml.{name}_token_id": integer(token_id) for name, token_id in names.items()}
        path = write_raw(tmp_path / "fim.gguf", NO_CODE | metadata)
        assert infill_of(make_plan("main", locate(path), "openvino", "int8")) == found


def part(folder: Path, number: int, count: int = 2, **said: int) -> Path:
    """One part of a model whose parts have a tensor each. said: what its metadata says otherwise."""
    split = {"count": count, "no": number - 1, "tensors.count": 2} | said
    first = READ if number == 1 else {}
    metadata = first | {f"split.{key}": integer(value) for key, value in split.items()}
    name = "token_embd.weight" if number == 1 else "output.weight"
    return write_raw(folder / f"model-{number:05d}-of-{count:05d}.gguf", metadata, name)


def test_all_parts_of_a_model_are_read_whichever_is_named(tmp_path: Path) -> None:
    paths = [part(tmp_path, number) for number in (1, 2)]
    headers = [read_header(path) for path in paths]
    for header in headers:
        assert (header.path, header.architecture) == (paths[0], "llama")
        assert {name: tensor.path for name, tensor in header.tensors.items()} == {
            "token_embd.weight": paths[0], "output.weight": paths[1]
        }  # fmt: skip
        assert header.num_bytes == sum(path.stat().st_size for path in paths)
    for named in (paths[1], tmp_path):
        assert locate(named).fetched == paths[0]
        assert locate(named).id == "model.gguf"
    whole = tmp_path / "whole.gguf"
    write_slim_copy(paths[1], whole)
    assert read_header(whole).tensors.keys() == headers[0].tensors.keys()


def test_parts_that_are_missing_or_of_another_model_are_named(tmp_path: Path) -> None:
    second = part(tmp_path, 2)
    for named in (second, tmp_path, tmp_path / "model-00001-of-00002.gguf"):
        with pytest.raises(ExportError, match=r"one of 2 parts, and model-00001-of-00002\.gguf is missing\. Download"):
            read_header(locate(named).fetched)
    part(tmp_path, 1)
    part(tmp_path, 2, count=2, no=0)
    with pytest.raises(
        ExportError, match=r"00002-of-00002\.gguf says that it is part 1 of 2, and its name says part 2"
    ):
        read_header(second)
    part(tmp_path, 1, **{"tensors.count": 3})
    part(tmp_path, 2)
    with pytest.raises(ExportError, match=r"hold 2 tensors, and 3 belong to the model: they are not of one model"):
        read_header(second)
    renamed = part(tmp_path, 1).rename(tmp_path / "renamed.gguf")
    with pytest.raises(ExportError, match=r"one of 2 parts, and its name does not say which\. Give all parts"):
        read_header(renamed)
    mixed = part(tmp_path, 1, count=2).rename(tmp_path / "x-00001-of-00003.gguf")
    for number in (2, 3):
        part(tmp_path, number, count=3).rename(tmp_path / f"x-{number:05d}-of-00003.gguf")
    with pytest.raises(ExportError, match=r"x-00001-of-00003\.gguf says that it is part 1 of 2, and its name says"):
        read_header(mixed)


def test_what_is_read_is_all_there(tmp_path: Path) -> None:
    path = write_raw(tmp_path / "model.gguf", READ)
    read_all(path, tmp_path / "tokenizer")
    assert (tmp_path / "tokenizer" / "tokenizer.json").is_file()


SCALARS = st.one_of(
    *(
        st.tuples(st.just(kind), st.binary(min_size=size, max_size=size))
        for kind, size in ((0, 1), (1, 1), (2, 2), (3, 2), (4, 4), (5, 4), (6, 4), (7, 1), (10, 8), (11, 8), (12, 8))
    ),
    st.sampled_from([0, 1, 2, 3, 4, 1 << 31, (1 << 32) - 1]).map(integer),
    st.sampled_from(["", "1", "llama", "qwen2", "none", "gpt2", "smollm", "ÿþ", "🙂"]).map(text),
    st.just(text("ÿþ", "latin-1")),
)


def arrays(items: st.SearchStrategy[Value]) -> st.SearchStrategy[Value]:
    """Arrays of several of these, all of the first one's type."""

    def of_one_type(values: list[Value]) -> Value:
        kind = values[0][0] if values else UINT32
        return array(kind, [content for other, content in values if other == kind])

    return st.lists(items, max_size=5).map(of_one_type)


VALUES = SCALARS | arrays(SCALARS | arrays(SCALARS))


@settings(max_examples=400, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=st.dictionaries(st.sampled_from(sorted(READ)), st.none() | VALUES, min_size=1))
def test_no_type_is_taken_on_trust(tmp_path: Path, changes: dict[str, Value | None]) -> None:
    """Whatever the keys that are read hold, if they are there, it is used or refused."""
    metadata = {key: value for key, value in (READ | changes).items() if value is not None}
    path = write_raw(tmp_path / "model.gguf", metadata)
    with contextlib.suppress(OutriderError):
        read_all(path, tmp_path / "tokenizer")


@pytest.mark.parametrize(("key", "value", "message"), [
    ("split.count", text("2"), "split.count is '2'; it has to be an integer. Fetch the file again"),
    ("split.count", array(STRING, []), "split.count is an array of 0; it has to be an integer"),
    ("general.alignment", integer(0), "general.alignment is 0; it has to be an integer of at least 1"),
    ("general.alignment", (7, b"\1"), "general.alignment is True; it has to be an integer"),
    ("general.file_type", array(UINT8, [b"1"]), "general.file_type is an array of 1; it has to be an integer"),
    ("general.architecture", integer(1), "general.architecture is 1; it has to be text in UTF-8"),
    ("general.architecture", text("ÿ", "latin-1"), r"general.architecture is '\udcff'; it has to be text in UTF-8"),
    ("llama.block_count", text("1"), "llama.block_count is '1'; it has to be an integer of at least 1"),
    ("llama.attention.head_count", integer(0), "llama.attention.head_count is 0; it has to be an integer of at le"),
    ("llama.attention.head_count_kv", array(UINT32, [bytes(4)]), "has layers with different numbers of heads"),
    ("tokenizer.ggml.pre", array(STRING, []), "tokenizer.ggml.pre is an array of 0; it has to be text in UTF-8"),
    ("tokenizer.ggml.tokens", integer(4), "tokenizer.ggml.tokens is 4; it has to be an array of texts"),
    ("tokenizer.ggml.tokens", array(UINT8, [b"a"] * 4), "tokens is an array of 4; it has to be an array of texts"),
    ("tokenizer.ggml.tokens", array(STRING, [text("ÿ", "latin-1")[1]] * 4), "tokens has a text that is not UTF-8"),
    ("tokenizer.ggml.token_type", array(STRING, []), "token_type is an array of 0; it has to be an array of inte"),
    ("tokenizer.ggml.merges", array(STRING, [text("ÿ a", "latin-1")[1]]), "merges has a text that is not UTF-8"),
    ("tokenizer.ggml.add_bos_token", text("yes"), "add_bos_token is 'yes'; it has to be true or false"),
    ("tokenizer.ggml.bos_token_id", integer(9), "its BOS token has the id 9, and it has 4 tokens"),
    ("tokenizer.ggml.eot_token_id", text("3"), "tokenizer.ggml.eot_token_id is '3'; it has to be an integer"),
    ("tokenizer.chat_template", integer(1), "tokenizer.chat_template is 1; it has to be text in UTF-8"),
])  # fmt: skip
def test_a_wrong_type_is_named(tmp_path: Path, key: str, value: Value, message: str) -> None:
    path = write_raw(tmp_path / "model.gguf", READ | {key: value})
    with pytest.raises(ExportError, match=re.escape(message)) as caught:
        read_all(path, tmp_path / "tokenizer")
    assert str(path) in str(caught.value)


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize(("key", "item", "content", "most"), [
    ("anything", UINT8, b"\7", 0.1),
    ("anything", UINT32, b"\1\2\3\0", 0.1),
    ("anything", STRING, text("ab")[1], 0.1),
    ("anything", ARRAY, array(UINT8, [])[1], 0.1),
    ("tokenizer.ggml.token_type", UINT8, b"\7", 1.1),
    ("tokenizer.ggml.token_type", UINT32, b"\1\2\3\0", 1.1),
    ("tokenizer.ggml.token_type", STRING, text("ab")[1], 0.1),
    ("tokenizer.ggml.tokens", UINT8, b"\7", 0.1),
])  # fmt: skip
def test_arrays_take_no_more_memory_than_in_the_file(
    tmp_path: Path, key: str, item: int, content: bytes, most: float
) -> None:
    """`most`: of memory, as a share of the file's size."""
    num_items = 500_000 // len(content)
    path = write_raw(tmp_path / "model.gguf", READ | {key: array(item, [content] * num_items)})
    tracemalloc.start()
    try:
        header = read_header(path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(header.metadata[key]) == num_items
    assert peak < most * path.stat().st_size


def test_nested_arrays_are_bounded(tmp_path: Path) -> None:
    path = write_raw(tmp_path / "nested.gguf", {"k": (ARRAY, struct.pack("<IQ", ARRAY, 1) * 2000)})
    with pytest.raises(ExportError, match="nests arrays too deeply"):
        read_header(path)


def test_slim_copy_keeps_all_but_the_lists(small: Path, tmp_path: Path) -> None:
    slim = tmp_path / "slim.gguf"
    write_slim_copy(small, slim)
    old, new = read_header(small), read_header(slim)
    assert {name: (t.type, t.shape) for name, t in new.tensors.items()} == {
        name: (t.type, t.shape) for name, t in old.tensors.items()
    }
    assert new.metadata == {k: v for k, v in old.metadata.items() if not is_array(v)} | {"llama.vocab_size": 3}
    assert set(old.metadata) - set(new.metadata) == {
        "tokenizer.ggml.tokens",
        "tokenizer.ggml.token_type",
        "numbers",
        "nested",
    }
    theirs = {tensor.name: tensor.data for tensor in gguf.GGUFReader(slim).tensors}
    for tensor in gguf.GGUFReader(small).tensors:
        np.testing.assert_array_equal(theirs[tensor.name], tensor.data)
