"""From ONNX folders to bundles: onnxruntime-genai's own, built here by its model builder, and others made of it."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import onnx
import pytest
from huggingface_hub.utils._paths import filter_repo_objects
from onnx import TensorProto, helper, numpy_helper
from onnx.external_data_helper import convert_model_to_external_data

import outrider
from onnx_runs import run_onnx
from outrider.bundle import Geometry
from outrider.cli import run
from outrider.errors import BundleError, ExportError, OptionError
from outrider.models.backends.onnxruntime import OnnxRuntime
from outrider_export import import_bundle
from outrider_export.onnx.check import check_onnx
from outrider_export.onnx.files import MODEL, OnnxWeights, data_files, load, save
from outrider_export.onnx.graph import weights_of
from outrider_export.onnx.inputs import add_rows

IDS = [*range(20, 52)]


@pytest.fixture(scope="session")
def genai(build_genai: Callable[..., Path], make_checkpoint: Any) -> Path:
    return build_genai(make_checkpoint("for-onnx", seed=3), "int8")


@pytest.fixture
def folder(genai: Path, tmp_path: Path) -> Path:
    """A copy of it, for changes."""
    copy = tmp_path / "model"
    shutil.copytree(genai, copy)
    return copy


@pytest.fixture
def community(genai: Path, make_checkpoint: Any, tmp_path: Path) -> Path:
    """The same model in the layout of onnx-community, in three files, one of them alone with its data in two more."""
    top = tmp_path / "community"
    (top / "onnx").mkdir(parents=True)
    checkpoint = make_checkpoint("for-onnx", seed=3)
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(checkpoint / name, top / name)
    shutil.copyfile(genai / "chat_template.jinja", top / "chat_template.jinja")
    whole = onnx.load(genai / "model.onnx")
    onnx.save(whole, top / "onnx" / "model_quantized.onnx")
    split = onnx.load(genai / "model.onnx")
    convert_model_to_external_data(split, location="model.onnx_data", size_threshold=0)
    for tensor in list(split.graph.initializer)[::2]:
        onnx.external_data_helper.set_external_data(tensor, "model.onnx_data_1")
    onnx.save(split, top / "onnx" / "model.onnx")
    takes_number_of_logits(whole)
    onnx.save(whole, top / "onnx" / "model_q8.onnx")
    return top


def takes_number_of_logits(model: Any) -> None:
    """Give a model the input of newer exports: of how many of the last rows to make logits, 0 for all."""
    graph = model.graph
    head = next(node for node in graph.node if "logits" in node.output)
    constants = {"axis_": ([1], [1]), "end_": ([1], [2**63 - 1]), "one_": ([1], [1])}
    for name, (dims, values) in constants.items():
        graph.initializer.append(helper.make_tensor(name, TensorProto.INT64, dims, values))
    graph.input.append(helper.make_tensor_value_info("num_logits_to_keep", TensorProto.INT64, []))
    nodes = [
        helper.make_node("Neg", ["num_logits_to_keep"], ["negative_"]),
        helper.make_node("Reshape", ["negative_", "one_"], ["begin_"]),
        helper.make_node("Slice", [head.input[0], "begin_", "end_", "axis_"], ["kept_"]),
    ]
    head.input[0] = "kept_"
    for node in nodes:
        graph.node.insert(list(graph.node).index(head), node)


def logits_of(path: Path, **more: Any) -> Any:
    """float32 [rows, logits width] of IDS after an empty cache."""
    return run_onnx(path, IDS, **more)[0]


def change(path: Path, how: Callable[[Any], object]) -> None:
    """Change the graph at `path`."""
    model = onnx.load(path, load_external_data=False)
    how(model)
    onnx.save(model, path)


def change_json(path: Path, how: Callable[[Any], object]) -> None:
    content = json.loads(path.read_text(encoding="utf-8"))
    how(content)
    path.write_text(json.dumps(content), encoding="utf-8")


def test_a_genai_folder_becomes_a_bundle(genai: Path, tmp_path: Path) -> None:
    bundle = import_bundle(genai, output=tmp_path / "bundle")
    model = bundle.manifest.main
    assert (model.format, model.weights, model.vocab_size) == ("onnx", "int8", 404)
    assert model.geometry == Geometry("qwen2", 2, 4, 2, 16, 64, 512, 448, sliding_windows=(0, 0))
    assert (model.source.id, model.source.kind) == (genai.name, "onnx")
    assert model.source.recipe["route"] == "import"
    assert model.source.recipe["file"] == "model.onnx"
    assert bundle.manifest.tokenizer.eos_token_ids == (400, 402)
    assert bundle.manifest.tokenizer.chat_template
    files = {entry.path for entry in bundle.manifest.files}
    assert {"main/model.onnx", "main/model.onnx.data", "tokenizer/openvino_tokenizer.xml"} <= files
    bundle.check_hashes()
    check_onnx(bundle.model_path(model), model.geometry)


def test_the_logits_are_the_sources_for_all_rows_and_for_some(genai: Path, tmp_path: Path) -> None:
    bundle = import_bundle(genai, output=tmp_path / "bundle")
    path = bundle.model_path(bundle.manifest.main)
    expected = logits_of(genai / "model.onnx")
    assert expected.std() > 0.05
    np.testing.assert_array_equal(logits_of(path), expected)
    some = logits_of(path, rows_begin=np.array([5]), rows_end=np.array([9]))
    np.testing.assert_array_equal(some, expected[5:9])
    last = logits_of(path, rows_begin=np.array([-1]))
    np.testing.assert_array_equal(last, expected[-1:])


@pytest.mark.parametrize("name", ["onnx/model_quantized.onnx", "onnx/model.onnx", "onnx/model_q8.onnx"])
def test_a_community_folder_becomes_a_bundle(community: Path, genai: Path, name: str, tmp_path: Path) -> None:
    bundle = import_bundle(community, output=tmp_path / "bundle", file=name)
    assert bundle.manifest.main.weights == "int8"
    assert bundle.manifest.main.source.recipe["file"] == name
    assert bundle.manifest.tokenizer.eos_token_ids == (400, 402)
    data = sorted(path.name for path in (bundle.folder / "main").glob("*.data*"))
    assert data == (["model.onnx.data", "model.onnx.data_1"] if name == "onnx/model.onnx" else [])
    path = bundle.model_path(bundle.manifest.main)
    np.testing.assert_array_equal(logits_of(path), logits_of(genai / "model.onnx"))


def test_of_several_files_one_is_chosen(community: Path, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"has 3 models.*--file: onnx/model.onnx, onnx/model_q8.onnx, onnx/model_qu"):
        import_bundle(community, output=tmp_path / "bundle")
    with pytest.raises(ExportError, match=r"has no onnx/model_q4.onnx. It has onnx/model.onnx, "):
        import_bundle(community, output=tmp_path / "bundle", file="onnx/model_q4.onnx")
    for name in ("model.onnx", "model_q8.onnx"):
        (community / "onnx" / name).unlink()
    bundle = import_bundle(community, output=tmp_path / "bundle")
    assert bundle.manifest.main.source.recipe["file"] == "onnx/model_quantized.onnx"


def test_from_the_hub_comes_what_is_needed(community: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [path.relative_to(community).as_posix() for path in community.rglob("*") if path.is_file()]
    (community / "README.md").write_text("not needed")
    snapshot = tmp_path / "hub" / ("0123456789" * 4)

    def download(_: str, *, dry_run: bool = False, tqdm_class: Any, **options: Any) -> Any:
        patterns = {"allow_patterns": options["allow_patterns"], "ignore_patterns": options["ignore_patterns"]}
        for name in filter_repo_objects(names, **patterns) if not dry_run else ():
            (snapshot / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(community / name, snapshot / name)
        return [] if dry_run else str(snapshot)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    bundle = import_bundle("org/tiny", output=tmp_path / "bundle", file="onnx/model.onnx")
    source = bundle.manifest.main.source
    assert (source.id, source.kind, source.revision) == ("org/tiny", "onnx", snapshot.name)
    models = sorted(path.name for path in (snapshot / "onnx").iterdir())
    assert models == ["model.onnx", "model.onnx_data", "model.onnx_data_1"]
    assert not (snapshot / "README.md").exists()
    assert bundle.manifest.tokenizer.chat_template


def test_a_pair_with_one_vocabulary(genai: Path, build_genai: Any, make_checkpoint: Any, tmp_path: Path) -> None:
    draft = build_genai(make_checkpoint("onnx-draft", seed=4, num_hidden_layers=1), "int4")
    bundle = import_bundle(genai, draft, output=tmp_path / "pair")
    drafter = bundle.manifest.drafters[0]
    assert (drafter.model.weights, drafter.model.geometry.num_layers, drafter.vocabulary) == ("int4", 1, "same")
    assert not (bundle.folder / "draft-tokenizer").exists()
    assert logits_of(bundle.folder / "draft" / "model.onnx").shape == (32, 448)

    engine = outrider.load(bundle.folder)
    alone, drafted = (
        engine.generate(list(range(20, 30)), max_new_tokens=12, min_new_tokens=12, drafter=drafter)
        for drafter in (None, "draft")
    )
    assert len(alone.token_ids) == 12
    assert drafted.token_ids == alone.token_ids


def leave_open(model: Any) -> None:
    for value in (*model.graph.input, *model.graph.output):
        for dim in value.type.tensor_type.shape.dim:
            dim.dim_param = "some"


def name_otherwise(model: Any) -> None:
    """As genai_config.json may name it."""
    next(value for value in model.graph.input if value.name == "input_ids").name = "tokens"


def set_half(model: Any) -> None:
    for value in (*model.graph.input, *model.graph.output):
        if "key" in value.name or "value" in value.name:
            value.type.tensor_type.elem_type = TensorProto.FLOAT16


def add_input(model: Any) -> None:
    model.graph.input.append(helper.make_tensor_value_info("use_cache_branch", TensorProto.BOOL, [1]))


def keep_last_only(model: Any) -> None:
    logits = next(value for value in model.graph.output if value.name == "logits")
    logits.type.tensor_type.shape.dim[1].dim_value = 1


def cross_layers(model: Any) -> None:
    nodes = [node for node in model.graph.node if node.op_type == "GroupQueryAttention"]
    nodes[0].output[1], nodes[1].output[1] = nodes[1].output[1], nodes[0].output[1]


def forget_the_cache(model: Any) -> None:
    """As older exports write attention: the cache grows by Concat."""
    node = next(node for node in model.graph.node if "past_key_values.0.key" in node.input)
    node.op_type = "Concat"


def soften(model: Any) -> None:
    head = next(node for node in model.graph.node if "logits" in node.output)
    head.output[0] = "raw_"
    model.graph.node.append(helper.make_node("Softmax", ["raw_"], ["logits"], axis=-1))


@pytest.mark.parametrize(("how", "message"), [
    (set_half, r"past_key_values.0.key in float16; Outrider runs models whose cache and logits are in float32"),
    (add_input, r"wants an input use_cache_branch, which Outrider does not know"),
    (keep_last_only, r"gives the logits of its last token only"),
    (leave_open, r"16 head size, any logits, where its configuration promises .*export MODEL --format onnx"),
    (name_otherwise, r"has no input_ids. A model takes input_ids, .*outrider export MODEL --format onnx"),
    (forget_the_cache, r"is not GroupQueryAttention: past_key_values.0.key goes to Concat.*export MODEL --format onnx"),
    (soften, r"logits are made by Softmax; Outrider looks for a product"),
    (cross_layers, r"does not take a layer's cache from"),
    (lambda model: model.graph.node.append(helper.make_node("DynamicQuantizeLinear", ["any"], ["a", "b", "c"])),
     r"rounds the numbers of all rows by one scale \(DynamicQuantizeLinear\)"),
])  # fmt: skip
def test_graphs_that_do_not_fit_are_refused(folder: Path, tmp_path: Path, how: Any, message: str) -> None:
    change(folder / "model.onnx", how)
    with pytest.raises(ExportError, match=message):
        import_bundle(folder, output=tmp_path / "bundle")
    assert not list(tmp_path.glob("*bundle*"))


def remove(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def decoder(how: Callable[[Any], object]) -> Callable[[Path], None]:
    return lambda folder: change_json(folder / "genai_config.json", lambda config: how(config["model"]["decoder"]))


@pytest.mark.parametrize(("how", "message"), [
    (remove("model.onnx.data"), r"model.onnx.data is missing, which holds the model's weights"),
    (remove("tokenizer.json"), r"has no tokenizer.json"),
    (remove("genai_config.json"), r"has no config.json and no genai_config.json"),
    (remove("model.onnx"), r"has no model in ONNX"),
    (lambda folder: (folder / "model.onnx").write_bytes(b"not a model"), r"is not an ONNX model that can be read"),
    (decoder(lambda each: each.update(num_hidden_layers=3)), r"has 2 layers, 4 heads, .* promises 3 layers, 4 heads"),
    (decoder(lambda each: each.pop("head_size")), r"genai_config.json has no 'head_size'"),
])  # fmt: skip
def test_folders_that_are_not_whole_are_refused(folder: Path, tmp_path: Path, how: Any, message: str) -> None:
    how(folder)
    with pytest.raises(ExportError, match=message):
        import_bundle(folder, output=tmp_path / "bundle")
    assert not list(tmp_path.glob("*bundle*"))


def test_elementwise_operations_may_follow_the_output_matrix(folder: Path, tmp_path: Path) -> None:
    """As in models that divide and cap their logits, and those that make them in another precision."""

    def cap(model: Any) -> None:
        head = next(node for node in model.graph.node if "logits" in node.output)
        head.output[0] = "raw_"
        model.graph.initializer.append(helper.make_tensor("cap_", TensorProto.FLOAT, [], [5.0]))
        model.graph.node.extend([
            helper.make_node("Div", ["raw_", "cap_"], ["small_"]),
            helper.make_node("Tanh", ["small_"], ["capped_"]),
            helper.make_node("Constant", [], ["factor_"], value_float=5.0),
            helper.make_node("Mul", ["factor_", "capped_"], ["wide_"]),
            helper.make_node("Cast", ["wide_"], ["logits"], to=TensorProto.FLOAT),
        ])  # fmt: skip

    change(folder / "model.onnx", cap)
    bundle = import_bundle(folder, output=tmp_path / "bundle")
    path, expected = bundle.model_path(bundle.manifest.main), logits_of(folder / "model.onnx")
    assert np.abs(expected).max() <= 5
    np.testing.assert_array_equal(logits_of(path), expected)
    slices = [node for node in load(path).graph.node if node.name == "/rows"]
    assert len(slices) == 1
    np.testing.assert_array_equal(logits_of(path, rows_begin=np.array([30])), expected[30:])


def test_adding_rows_twice_changes_nothing(genai: Path) -> None:
    model = load(genai / "model.onnx")
    add_rows(model)
    once = model.SerializeToString()
    add_rows(model)
    assert model.SerializeToString() == once
    assert weights_of(model) == "int8"
    assert data_files(model, genai) == ["model.onnx.data"]


@pytest.mark.parametrize(("arguments", "code", "message"), [
    (["nowhere/at/all"], 1, "There is no nowhere/at/all"),
    (["CHECKPOINT"], 1, "has no model in ONNX (*.onnx). To make one of a checkpoint: outrider export"),
    (["GGUF"], 1, "is a GGUF file, not a folder with a model in ONNX. Use: outrider export"),
    (["org/name"], 2, "org/name may have its model in several files. Name one, such as --file onnx/model_q4.onnx"),
    (["GENAI", "--draft-file", "onnx/model.onnx"], 2, "are for a draft model. Name one with --draft"),
    (["GENAI", "--file", "../model.onnx"], 1, "has no ../model.onnx. It has model.onnx."),
    (["GENAI", "--revision", "main"], 2, "is for hub ids"),
])  # fmt: skip
def test_bad_input_takes_one_line(
    genai: Path,
    make_checkpoint: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    code: int,
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    places = {"GENAI": genai, "CHECKPOINT": make_checkpoint("for-onnx", seed=3), "GGUF": "x.gguf"}
    assert run(["import", *(str(places.get(word, word)) for word in arguments)]) == code
    printed = capsys.readouterr()
    assert printed.out == ""
    assert message in printed.err
    assert printed.err.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["x.gguf"]


# Weights beside a model in ONNX: only those in its folder are read, and as many as there are.


FLOAT = TensorProto.FLOAT


@pytest.fixture
def model(tmp_path: Path) -> Any:
    """A model in a folder, of one matrix with its 4096 bytes in a file beside it, as it was read."""
    folder = tmp_path / "model"
    folder.mkdir()
    matrix = numpy_helper.from_array(np.ones((32, 32), np.float32), "matrix")
    ports = [helper.make_tensor_value_info(name, FLOAT, [1, 32]) for name in ("hidden", "logits")]
    node = helper.make_node("MatMul", ["hidden", "matrix"], ["logits"])
    graph = helper.make_graph([node], "head", ports[:1], ports[1:], [matrix])
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    onnx.save(made, folder / MODEL, save_as_external_data=True, location="weights", size_threshold=0)
    (tmp_path / "secret").write_bytes(bytes(8192))
    return load(folder / MODEL)


def entry(key: str, value: str | None) -> Callable[[Any], None]:
    """Set or remove what the model says of where the matrix is."""

    def change(tensor: Any) -> None:
        known = {each.key: each.value for each in tensor.external_data}
        del tensor.external_data[:]
        for name, text in (known | {key: value}).items():
            if text is not None:
                tensor.external_data.add(key=name, value=text)

    return change


def shape(*dims: int) -> Callable[[Any], None]:
    def change(tensor: Any) -> None:
        del tensor.dims[:]
        tensor.dims.extend(dims)

    return change


def kind(tensor: Any) -> None:
    tensor.data_type = 99


NUMBERS = "these have to be numbers from 0 on"
OUTSIDE = "is not inside it. They are not read from there"


@pytest.mark.parametrize(("change", "of_files", "of_values"), [
    (entry("location", "../secret"), OUTSIDE, OUTSIDE),
    (entry("location", "/etc/passwd"), OUTSIDE, OUTSIDE),
    (entry("location", None), "weights in '', which", "weights in '', which"),
    (entry("location", "x" * 5000), "cannot be read: .*|is missing", "cannot be read: "),
    (entry("location", "x\0"), r"x\\x00 (is missing|cannot be read)", "cannot be read: "),
    (entry("location", "."), "is missing", "cannot be read: "),
    (entry("offset", "-1"), NUMBERS, NUMBERS),
    (entry("offset", "all"), NUMBERS, NUMBERS),
    (entry("length", "-1"), NUMBERS, NUMBERS),
    (entry("offset", str(2**62)), r"has 4,096 bytes of 4,611,686,018,427,392,000", "too short for their shape"),
    (shape(2**32, 2**32), None, "too short for their shape"),
    (shape(-1, 32), None, "cannot be read: "),
    (kind, None, "cannot be read: 99"),
])  # fmt: skip
def test_weights_that_are_not_there_are_refused(
    model: Any, tmp_path: Path, change: Callable[[Any], None], of_files: str | None, of_values: str
) -> None:
    folder = tmp_path / "model"
    change(model.graph.initializer[0])
    if of_files is not None:
        with pytest.raises(ExportError, match=of_files):
            data_files(model, folder)
        with pytest.raises(ExportError, match=of_files):
            save(model, folder, tmp_path / "copy", lambda _: None)
    with pytest.raises(ExportError, match=of_values):
        OnnxWeights(model, folder).read("matrix")


@pytest.mark.parametrize("location", ["../secret", "/etc/passwd", "link"])
def test_onnx_runtime_reads_nothing_elsewhere(model: Any, tmp_path: Path, location: str) -> None:
    folder = tmp_path / "model"
    if location == "link":
        try:
            (folder / "link").symlink_to(tmp_path / "secret")
        except OSError:
            pytest.skip("Windows allows links only to some users")
    entry("location", location)(model.graph.initializer[0])
    (folder / MODEL).write_bytes(model.SerializeToString())
    with pytest.raises(BundleError, match=r"External data path|Absolute path not allowed"):
        OnnxRuntime(folder / MODEL, vocab_size=32)
