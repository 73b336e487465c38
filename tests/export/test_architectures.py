"""Each architecture of docs/models.md: random weights, exported, compared with Transformers, drafted and certified."""

import functools
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import pytest

from outrider.bundle import Bundle
from outrider.bundle.architectures import REFUSED
from outrider.config import Config
from outrider.engine.engine import Engine
from outrider.errors import BundleError, ExportError
from outrider.models.backends.openvino_paged import OpenVINOPaged
from outrider.models.backends.paged_graph import read_decoder
from outrider.models.backends.taps import LAST, after_layers
from outrider.models.tuning.measure.readings import read
from outrider.types import Chunk
from outrider_bench.prompts import BenchPrompt
from outrider_bench.verify.certify import check_batching, check_coupled, check_greedy, our_subject
from outrider_export import export_bundle
from outrider_export.describe.architectures import ARCHITECTURES
from outrider_export.tokenizers.job import add_tokenizer
from recorded import Recorded
from shapes import (
    IN_ONNX,
    NEMOTRON_EXPERTS,
    NUM_ACTIVE,
    NUM_EXPERTS,
    WINDOW,
    continued,
    cosines,
    hidden_states,
    logits_of,
    make_model,
    same_but_for_ties,
    save_model,
    with_noisy_draft,
)

pytestmark = pytest.mark.slow

PROMPT = np.random.default_rng(3).integers(0, 400, size=40).tolist() * 2  # that copies find something in
NUM_TOKENS = 24
LEAST_COSINE = 0.9999
FAMILIES = {(each.attention, each.experts, each.features): name for name, each in reversed(ARCHITECTURES.items())}
IN_ONNX_FAMILIES = {each.experts: name for name, each in reversed(ARCHITECTURES.items()) if each.onnx}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the tokenizer's files are kept, which are the same for all."""
    return tmp_path_factory.mktemp("once") / "tokenizer"


@pytest.fixture(autouse=True)
def tokenizer_once(monkeypatch: pytest.MonkeyPatch, tokenizer: Path) -> None:
    def add_once(job: dict[str, Any], progress: Any = None) -> None:
        if not tokenizer.exists():
            add_tokenizer(job, progress)
            shutil.copytree(job["tokenizer"], tokenizer)
        shutil.copytree(tokenizer, job["tokenizer"], dirs_exist_ok=True)

    monkeypatch.setattr("outrider_export.tokenizers.job.add_tokenizer", add_once)


@pytest.fixture
def load(tmp_path: Path) -> Iterator[Any]:
    """Load a bundle; closed at the end."""
    made: list[Engine] = []

    def start(bundle: Bundle, **options: Any) -> Engine:
        options = {"cache_size": 0.02, "precision": "f32", **options}
        made.append(Engine(bundle, Config().replace(**options)))
        return made[-1]

    yield start
    for engine in made:
        engine.close()


def check_features(model: Any, path: Path, token_ids: list[int]) -> None:
    """Hidden states that heads read are Transformers' own: after the first layer, and after the last norm."""
    names = after_layers(1), LAST
    build = functools.partial(read_decoder, features=names)
    backend = OpenVINOPaged(path, vocab_size=404, precision="f32", cache_precision="f32", features=names, build=build)
    backend.allocate(256)
    chunk = Chunk(backend.open(len(token_ids)), token_ids, num_rows=1, features=names)
    found = np.split(backend.submit([chunk]).wait().features(chunk), 2, axis=1)
    for ours, theirs in zip(found, hidden_states(model, token_ids), strict=True):
        assert cosines(ours, theirs).min() > LEAST_COSINE


def check_text(engine: Engine, model: Any, found: list[int]) -> None:
    """An answer to PROMPT is Transformers' own, but for ties; so are the logits of both, read in two calls."""
    expected = continued(model, PROMPT, NUM_TOKENS)
    token_ids = [*PROMPT, *expected]
    half, logits = len(token_ids) // 2, logits_of(model, token_ids)
    rows = read(engine.main, token_ids, [half, len(token_ids) - half], len(token_ids))
    assert cosines(rows, logits[:, : rows.shape[1]]).min() > LEAST_COSINE
    assert same_but_for_ties(found, expected, logits[len(PROMPT) - 1 :])


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_architecture(name: str, convert: Any, load: Any, tmp_path: Path) -> None:
    """Logits and greedy text are Transformers' own, also after the sliding window; drafts change nothing.

    One of each family is certified.
    """
    architecture = ARCHITECTURES[name]
    model = make_model(name, **(NEMOTRON_EXPERTS if name == "nemotron_h" else {}))
    bundle, _ = convert(save_model(model, tmp_path / name), weights="fp32")
    shutil.copytree(bundle.folder, tmp_path / "bundle")
    engine = load(with_noisy_draft(type(bundle)(tmp_path / "bundle", bundle.manifest)))
    geometry = bundle.manifest.main.geometry
    windows = set(geometry.sliding_windows or ())
    kind = "full" if windows == {0} else "sliding" if windows == {WINDOW} else "mixed" if WINDOW in windows else windows
    assert kind == architecture.attention
    num_active = 1 if name == "llama4_text" else NUM_ACTIVE
    experts = (NUM_EXPERTS, num_active) if architecture.experts else (0, 0)
    assert (geometry.num_experts, geometry.num_active_experts) == experts

    if geometry.value_size:
        assert engine.main.bytes_per_token == 4 * geometry.numbers_per_token

    options = {"max_new_tokens": NUM_TOKENS, "ignore_eos": True}
    plain = engine.generate(PROMPT, drafter=None, **options)
    is_judged = not isinstance(model, Recorded)  # whose logits `test_direct` has beside recorded ones
    if is_judged:
        check_text(engine, model, plain.token_ids)
    drafted = engine.generate(PROMPT, drafter="draft", num_assistant_tokens=3, **options)
    assert drafted.token_ids == plain.token_ids
    assert drafted.stats.num_cached_tokens > WINDOW  # the prompt came from the prefix cache
    assert drafted.stats.num_draft_tokens > 0

    path = bundle.model_path(bundle.manifest.main)
    if architecture.features:
        if is_judged:
            check_features(model, path, [*PROMPT, *plain.token_ids])
    else:
        with pytest.raises(BundleError, match="not found in its graph"):
            read_decoder(ov.Core(), path, (LAST,))

    assert engine.main.exactness.holds
    if name not in FAMILIES.values():
        return
    prompts = [BenchPrompt("one", "test", engine.tokenizer.decode(PROMPT[:30]))]
    subject = our_subject(engine, ["draft:1", "draft:8", "suffix:3", "shuffled:3", "auto"])
    checks = [
        check_batching(engine.main, 100),
        check_greedy(subject, engine, prompts, NUM_TOKENS, lambda: None),
        check_coupled(subject, engine, prompts, NUM_TOKENS, lambda: None),
    ]
    assert [check.detail for check in checks if check.passed is not True] == []


@pytest.mark.parametrize("name", [name for name, each in ARCHITECTURES.items() if each.onnx])
def test_architecture_in_onnx(name: str, convert: Any, load: Any, tmp_path: Path) -> None:
    """The same for ONNX Runtime, which runs one sequence at a time."""
    model = make_model(name, **IN_ONNX.get(name, {}))
    bundle, _ = convert(save_model(model, tmp_path / name), weights="fp32", format="onnx")
    engine = load(bundle, precision="auto")
    plain = engine.generate(PROMPT, drafter=None, max_new_tokens=NUM_TOKENS, ignore_eos=True)
    if not isinstance(model, Recorded):
        check_text(engine, model, plain.token_ids)
    assert engine.main.exactness.holds
    if name not in IN_ONNX_FAMILIES.values():
        return
    prompts = [BenchPrompt("one", "test", engine.tokenizer.decode(PROMPT[:30]))]
    subject = our_subject(engine, ["ngram:3", "suffix:3", "suffix:8"])
    checks = [check_batching(engine.main, 100), check_greedy(subject, engine, prompts, NUM_TOKENS, lambda: None)]
    assert [check.detail for check in checks if check.passed is not True] == []


@pytest.mark.parametrize(("name", "changes", "options", "says"), [
    ("mpt", {"d_model": 64, "n_layers": 2, "n_heads": 4}, {},
     "'mpt' was not tried, and OpenVINO's paged attention does not run"),
    ("apertus", {}, {"format": "onnx"}, "has the architecture 'apertus', which is not converted to ONNX"),
    ("arcee", {}, {"format": "onnx"}, "has feed-forward parts without a gate, which is not converted to ONNX"),
    ("mistral", {}, {"format": "onnx"}, r"sliding windows of 16 tokens \(2 of 2 layers\), for which ONNX"),
    ("gemma2", {}, {"format": "onnx"}, r"sliding windows of 16 tokens \(1 of 2 layers\), for which ONNX"),
    ("diffllama", {"head_dim": 16}, {}, "does not export the architecture 'diffllama' with Transformers"),
    ("granitemoehybrid", {}, {"format": "onnx"}, "has layers with a state .*, which is not converted to ONNX"),
])  # fmt: skip
def test_what_would_run_wrongly_is_refused(
    name: str, changes: Any, options: Any, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the list, too: most of these would run, and write another text."""
    monkeypatch.delitem(REFUSED, name, raising=False)
    save_model(make_model(name, **changes), tmp_path / name)
    if name == "mpt":  # its configuration has names of its own
        add = {"num_attention_heads": 4, "num_hidden_layers": 2, "hidden_size": 64, "max_position_embeddings": 512}
        path = tmp_path / name / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | add), encoding="utf-8")
    with pytest.raises(ExportError, match=says):
        export_bundle(tmp_path / name, output=tmp_path / "bundle", weights="fp32", **options)
    assert not (tmp_path / "bundle").exists()


def test_an_architecture_that_nobody_has_tried_is_compared(convert: Any, tmp_path: Path) -> None:
    model = make_model("codegen", num_key_value_heads=4, n_embd=64, n_layer=2, n_head=4, n_positions=512, rotary_dim=8)
    assert "codegen" not in ARCHITECTURES
    bundle, told = convert(save_model(model, tmp_path / "codegen"), weights="fp32")
    assert "compare main" in told.phases
    assert bundle.manifest.main.geometry.sliding_windows == (0, 0)
