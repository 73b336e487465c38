"""Repositories of OpenVINO Model Server: the graph has its calculator's fields, and its library loads the models."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from outrider.bundle.folder import read_bundle
from outrider.cli import run
from outrider_export import Serving, export_bundle, write_for_ovms
from tiny import write_checkpoint, write_gguf

if TYPE_CHECKING:
    from pathlib import Path

    from outrider.bundle.folder import Bundle

pytest.importorskip("google.protobuf", reason="parses the graph")
from google.protobuf import any_pb2, descriptor_pb2, descriptor_pool, message_factory, text_format

# LLMCalculatorOptions of src/llm/llm_calculator.proto, without its messages and enumerations: type, name, number.
PUBLISHED = """
string models_path 1            uint64 max_num_batched_tokens 2         uint64 cache_size 3
uint64 max_num_seqs 4           bool dynamic_split_fuse 5               string device 6
string plugin_config 7          uint32 best_of_limit 8                  uint32 max_tokens_limit 9
bool enable_prefix_caching 10   string draft_models_path 11             string draft_device 12
uint64 draft_cache_size 14      uint64 draft_max_num_batched_tokens 13  uint64 draft_block_size 15
uint64 draft_max_num_seqs 16    bool draft_dynamic_split_fuse 17        bool draft_eagle3_mode 18
string tool_parser 21           string reasoning_parser 22              bool enable_tool_guided_generation 23
"""
EXT = 113473750
Field = descriptor_pb2.FieldDescriptorProto
PROMPT = "The quick brown fox jumps over the lazy dog. The quick brown"
EXACT = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0}


def add_message(where: Any, name: str, *fields: str) -> Any:
    """Declare a message. fields: "type name number", with * behind the type if there may be several."""
    message = where.message_type.add(name=name)
    for field in fields:
        kind, called, number = field.split()
        label = Field.LABEL_REPEATED if kind.endswith("*") else Field.LABEL_OPTIONAL
        made = message.field.add(name=called, number=int(number), label=label)
        known = getattr(Field, f"TYPE_{kind.rstrip('*').upper()}", None)
        made.type = known or Field.TYPE_MESSAGE
        if known is None:
            made.type_name = "." + kind.rstrip("*")
    return message


@pytest.fixture(scope="module")
def pool() -> Any:
    """The published messages that a graph is made of."""
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(any_pb2.DESCRIPTOR.serialized_pb)
    file = descriptor_pb2.FileDescriptorProto(name="graph.proto", package="mediapipe", syntax="proto2")
    file.dependency.append(any_pb2.DESCRIPTOR.name)
    words = PUBLISHED.split()
    fields = [" ".join(words[i : i + 3]) for i in range(0, len(words), 3)]
    add_message(file, "LLMCalculatorOptions", *fields)
    add_message(file, "SyncSet", "string* tag_index 1")
    handler = add_message(file, "SyncSetInputStreamHandlerOptions", "mediapipe.SyncSet* sync_set 1")
    add_message(file, "MediaPipeOptions").extension_range.add(start=20000, end=536870912)
    extension = handler.extension.add(name="ext", number=EXT, extendee=".mediapipe.MediaPipeOptions")
    extension.label, extension.type = Field.LABEL_OPTIONAL, Field.TYPE_MESSAGE
    extension.type_name = ".mediapipe.SyncSetInputStreamHandlerOptions"
    options = "mediapipe.MediaPipeOptions options 3"
    add_message(file, "InputStreamHandlerConfig", "string input_stream_handler 1", options)
    add_message(file, "InputStreamInfo", "string tag_index 1", "bool back_edge 2")
    add_message(
        file, "Node", "string name 1", "string calculator 2", "string* input_stream 3", "string* output_stream 4",
        "string* input_side_packet 5", "google.protobuf.Any* node_options 8",
        "mediapipe.InputStreamHandlerConfig input_stream_handler 11", "mediapipe.InputStreamInfo* input_stream_info 13",
    )  # fmt: skip
    add_message(
        file, "CalculatorGraphConfig", "mediapipe.Node* node 1", "string* input_stream 10", "string* output_stream 15"
    )
    pool.Add(file)
    return pool


def read_graph(pool: Any, folder: Path) -> dict[str, Any]:
    """The fields of the calculator that a graph sets. Fails for an unknown name and a value of another type."""
    made = {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"mediapipe.{name}"))
        for name in ("CalculatorGraphConfig", "LLMCalculatorOptions", "SyncSetInputStreamHandlerOptions")
    }
    graph = made["CalculatorGraphConfig"]()
    text_format.Parse((folder / "graph.pbtxt").read_text(encoding="utf-8"), graph, descriptor_pool=pool)
    (node,) = graph.node
    assert node.calculator == "HttpLLMCalculator"
    assert list(node.input_side_packet) == ["LLM_NODE_RESOURCES:llm"]  # the server insists on it
    assert graph.input_stream[0] in node.input_stream
    assert graph.output_stream[0] in node.output_stream
    back = {f"{each.tag_index.removesuffix(':0')}:loopback" for each in node.input_stream_info if each.back_edge}
    assert back == set(node.input_stream) & set(node.output_stream)
    options = made["LLMCalculatorOptions"]()
    assert node.node_options[0].Unpack(options)
    return {field.name: value for field, value in options.ListFields()}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """Two random models with one tokenizer."""
    root = tmp_path_factory.mktemp("ovms")
    for name, seed in (("main", 0), ("draft", 1)):
        write_checkpoint(root / name, seed)
        write_gguf(root / f"{name}.gguf", root / name, "Q4_1", "qwen2", {})
    options = {"weights": "keep", "draft_weights": "keep", "draft_vocab": "all"}
    return export_bundle(root / "main.gguf", root / "draft.gguf", output=root / "my-pair", **options)  # type: ignore[arg-type]


def load_as_server(folder: Path, graph: dict[str, Any]) -> Any:
    """The pipeline that Model Server makes of these fields, in a precision in which drafts leave the text as it is."""
    import openvino_genai as genai

    scheduler, extra = genai.SchedulerConfig(), dict(EXACT)
    for name in ("cache_size", "enable_prefix_caching", "dynamic_split_fuse", "max_num_batched_tokens"):
        if name in graph:
            setattr(scheduler, name, graph[name])
    if "draft_models_path" in graph:
        drafting = genai.SchedulerConfig()
        drafting.cache_size = graph["draft_cache_size"]
        path = folder / graph["draft_models_path"]
        extra["draft_model"] = genai.draft_model(path, graph["draft_device"], scheduler_config=drafting, **EXACT)
    extra |= json.loads(graph.get("plugin_config", "{}"))
    return genai.ContinuousBatchingPipeline(folder / graph["models_path"], scheduler, graph["device"], extra)


def answer(pipeline: Any, **options: Any) -> list[int]:
    """Greedy."""
    import openvino_genai as genai

    config = genai.GenerationConfig(max_new_tokens=24, ignore_eos=True, **options)
    (result,) = pipeline.generate([pipeline.get_tokenizer().encode(PROMPT).input_ids], [config])
    token_ids: list[int] = list(result.m_generation_ids[0])
    return token_ids


def test_the_library_loads_what_the_graph_names(pair: Bundle, pool: Any, tmp_path: Path) -> None:
    """The same text plainly, with the draft model, and by prompt lookup."""
    base = {"models_path": "./", "device": "CPU", "enable_prefix_caching": True}
    command = ["export", str(pair.folder), "--for", "ovms", "--cache-size", "1", "-o"]
    draft = {"draft_models_path": "draft", "draft_device": "CPU", "draft_cache_size": 2}
    whole = {"dynamic_split_fuse": False, "max_num_batched_tokens": 8192, "plugin_config": '{"prompt_lookup": true}'}
    texts = []
    for name, options, more, drafts in (
        ("plain", ["--drafter", "none"], {}, {}),
        ("pair", ["--draft-cache-size", "2"], draft, {"num_assistant_tokens": 3}),
        ("lookup", ["--drafter", "ngram"], whole, {"num_assistant_tokens": 3, "max_ngram_size": 2}),
    ):
        assert run([*command, str(tmp_path / name), *options]) == 0
        config = json.loads((tmp_path / name / "config.json").read_text(encoding="utf-8"))
        (model,) = config["model_config_list"]
        assert model == {"config": {"name": "my-pair", "base_path": "my-pair"}}
        served = tmp_path / name / model["config"]["base_path"]
        graph = read_graph(pool, served)
        assert graph == base | {"cache_size": 1} | more
        assert (served / "draft").exists() == ("draft_models_path" in graph)
        texts.append(answer(load_as_server(served, graph), **drafts))
    assert texts[0] == texts[1] == texts[2]
    assert len(texts[0]) == 24


def test_what_the_server_reads_beside_the_models(pair: Bundle, pool: Any, tmp_path: Path) -> None:
    write_for_ovms(pair, tmp_path / "models", "m", Serving(main_device="GPU.1", draft_device="CPU", cache_size=4))
    served = tmp_path / "models" / "m"
    graph = read_graph(pool, served)
    assert (graph["device"], graph["draft_device"]) == ("GPU.1", "CPU")
    assert (graph["cache_size"], graph["draft_cache_size"]) == (4, 4)
    config, generation = (
        json.loads((served / name).read_text(encoding="utf-8")) for name in ("config.json", "generation_config.json")
    )
    assert config["max_position_embeddings"] == 8192
    assert set(generation["eos_token_id"]) == set(pair.manifest.tokenizer.eos_token_ids)
    assert "chat_template" in json.loads((served / "tokenizer_config.json").read_text(encoding="utf-8"))


def test_a_checkpoint_is_converted_for_it(pair: Bundle, pool: Any, tmp_path: Path) -> None:
    source = str(pair.folder.parent / "main.gguf")
    options = ["--weights", "keep", "--draft-weights", "keep", "--draft", str(pair.folder.parent / "draft.gguf")]
    assert run(["export", source, *options, "--for", "ovms", "-o", str(tmp_path / "models")]) == 0
    assert read_graph(pool, tmp_path / "models" / "main-pair")["draft_models_path"] == "draft"
    assert list(tmp_path.iterdir()) == [tmp_path / "models"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--for", "tgi"], "--for tgi is not a server"),
        (["--cache-size", "1"], "--cache-size is an option of a model repository"),
        (["--for", "ovms", "--weights", "int4"], "--weights is not for"),
        (["--for", "ovms", "--drafter", "drft"], "has no drafter 'drft'. Did you mean 'draft'?"),
        (["--for", "ovms", "--drafter", "none", "--draft-device", "GPU"], "and none is served"),
        (["--for", "ovms", "--main-device", 'a"b'], "is not a device's name"),
        (["--for", "ovms", "--cache-size", "-1"], "cache_size=-1 is less than 0"),
        (["--for", "ovms", "--overwrite"], "makes a new folder"),
    ],
)
def test_errors(
    options: list[str], message: str, pair: Bundle, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["export", str(pair.folder), "-o", str(tmp_path / "models"), *options])
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_drafters_that_it_cannot_run(openvino_bundle: Bundle, tmp_path: Path) -> None:
    from dataclasses import replace

    from msgspec.structs import replace as changed

    from outrider.errors import ExportError

    bundle = read_bundle(openvino_bundle.folder)
    entry = bundle.manifest.drafters[0]
    for change, reason in (
        ({"kind": "medusa"}, "it is of kind medusa"),
        ({"vocabulary": "text"}, "its vocabulary is not the main model's"),
        ({"num_proposed_tokens": 30}, "its output matrix was cut"),
    ):
        other = replace(bundle, manifest=changed(bundle.manifest, drafters=(changed(entry, **change),)))
        with pytest.raises(ExportError, match=reason):
            write_for_ovms(other, tmp_path / "models", "m", Serving(drafter=entry.name))
    assert not (tmp_path / "models").exists()
