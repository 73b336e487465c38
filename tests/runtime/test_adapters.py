"""LoRA adapters at run time: the merged model's logits, and each row's bits whatever else is loaded or runs with it."""

import json
import shutil
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import outrider
from adapters import changes_of, write_adapter
from calls import rows_of_call
from heads import write_head
from layered import make_layered, with_layers
from outrider.bundle import Bundle
from outrider.config import DeviceConfig
from outrider.drafters.controller import Records
from outrider.models.backends.adapters import Adapter, Adapters
from outrider.models.backends.openvino_paged import OpenVINOPaged
from outrider.models.backends.registry import compile_model
from outrider.models.tuning.model_spec import ModelSpec, adapters_of
from outrider.tokens.verifiers import Greedy
from outrider.types import Chunk, Exactness, Prompt, Rounding, RowRule
from shapes import cosines
from tiny import SHAPE, write_checkpoint, write_gguf
from toys import in_threads

pytest.importorskip("gguf", reason="writes the file that the bundle is made of")


PROMPT = "def quicksort(items):\n    if len(items) <= 1:\n        return items\n" * 2
ANSWER: dict[str, Any] = {"max_new_tokens": 20, "ignore_eos": True}
SAMPLED: dict[str, Any] = {"temperature": 1.0, "seed": 5}
TOKENS = [*np.random.default_rng(0).integers(20, 400, 48).tolist()]
NAMES = ("pirate", "poet", "late")


def write_three(root: Path) -> list[Path]:
    """Of all products and of two, of another rank and of one layer: what engines are to load at once."""
    return [
        write_adapter(root / "pirate", SHAPE, seed=1),
        write_adapter(root / "poet", SHAPE, seed=2, rank=20, targets=("q_proj", "v_proj"), use_rslora=True),
        write_adapter(root / "late", SHAPE, seed=3, rank=3, layers=(1,), ranks={"down_proj": 5}),
    ]


@pytest.fixture(scope="module")
def root(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle with three adapters, and their folders."""
    from outrider_export import add_adapter

    root = tmp_path_factory.mktemp("adapters")
    shutil.copytree(tiny, root / "bundle")
    for folder in write_three(root):
        add_adapter(root / "bundle", folder)
    return root


@pytest.fixture(scope="module")
def bundle(root: Path) -> Bundle:
    return outrider.read_bundle(root / "bundle")


@pytest.fixture(scope="module")
def engine(bundle: Bundle) -> outrider.Engine:
    return outrider.load(bundle.folder, cache_size=0.05)


def compiled(bundle: Bundle, *names: str, rule: RowRule | None = None, **options: Any) -> OpenVINOPaged:
    """The main model with these adapters, in f32."""
    part = ModelSpec("main", bundle, bundle.manifest.main, adapters=adapters_of(bundle, names))
    backend = compile_model(part.on("CPU", DeviceConfig(precision="f32", cache_precision="f32", **options)))
    assert isinstance(backend, OpenVINOPaged)
    # A single row of logits has other bits on some processors.
    backend.use(Exactness(rule=rule or replace(backend.separate_rules[-1], logits=Rounding(2))))
    backend.allocate(2048)
    return backend


@pytest.fixture(scope="module")
def every(bundle: Bundle) -> OpenVINOPaged:
    """The main model with all adapters."""
    return compiled(bundle, *NAMES)


def logits(
    backend: OpenVINOPaged, adapter: str | None, sizes: Sequence[int] = (len(TOKENS),), first: int = 0
) -> np.ndarray:
    """The rows float32 [n, vocab] of tokens that are read in pieces; all but the first as an answer."""
    slot = backend.open(len(TOKENS) + 8, Prompt((), adapter=adapter))
    assert slot is not None
    rows = []
    for size in sizes:
        begin = slot.length
        piece = Chunk(slot, TOKENS[begin : begin + size], size, generated=begin > 0)
        rows += [*rows_of_call(backend, piece)]
    slot.close()
    return np.array(rows)[first:]


@pytest.fixture(scope="module")
def f16(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """`f16("pirate")`: the bundle of a tiny model in half precision with this adapter added to its weights by hand.

    Without an argument: without any in its weights, and with all as adapters.
    """
    from safetensors.numpy import load_file, save_file

    from outrider_export import add_adapter, export_bundle

    root = tmp_path_factory.mktemp("f16")
    folders = {folder.name: folder for folder in write_three(root)}

    def make(name: str | None = None) -> Bundle:
        place = root / f"of-{name}"
        write_checkpoint(place)
        if name is not None:
            weights = load_file(place / "model.safetensors")
            for weight, change in changes_of(folders[name]).items():
                weights[weight] = weights[weight] + change.astype(np.float32)
            save_file(weights, place / "model.safetensors")
        write_gguf(place / "model.gguf", place, "F16", "qwen2", {})
        made = export_bundle(place / "model.gguf", output=place / "bundle", weights="fp16")
        for folder in () if name else folders.values():
            made = add_adapter(made.folder, folder)
        return made

    return make


def test_logits_are_those_of_weights_with_the_adapter_added_by_hand(f16: Any) -> None:
    plain = compiled(f16(), *NAMES)
    without = logits(plain, None)
    found, expected = logits(plain, "pirate"), logits(compiled(f16("pirate")), None)
    assert cosines(found, expected).min() > 0.9999
    assert cosines(found, without).min() < 0.99


@pytest.mark.slow
def test_a_row_has_the_same_bits_whatever_adapters_are_loaded(bundle: Bundle, every: OpenVINOPaged) -> None:
    without, two = compiled(bundle), compiled(bundle, "poet", "late")
    for sizes in ((48,), (20, 1, 1, 5, 21), (3, *[1] * 45)):
        np.testing.assert_array_equal(logits(every, None, sizes), logits(without, None, sizes))
        np.testing.assert_array_equal(logits(two, None, sizes), logits(without, None, sizes))
    for name in NAMES:
        alone = compiled(bundle, name)
        for sizes in ((48,), (20, 1, 1, 5, 21), (3, *[1] * 45)):
            expected = logits(alone, name, sizes)
            np.testing.assert_array_equal(logits(every, name, sizes), expected)
            if name in ("poet", "late"):
                np.testing.assert_array_equal(logits(two, name, sizes), expected)


def test_rows_with_different_adapters_share_calls_bit_for_bit(every: OpenVINOPaged) -> None:
    backend = every
    who = (None, *NAMES, "pirate")
    alone = {name: logits(backend, name, (20, *[1] * 28), first=20) for name in who}
    slots = [backend.open(64, Prompt((), adapter=name)) for name in who]
    for slot in slots:
        backend.submit([Chunk(slot, TOKENS[:20], 0)]).wait()
    for i in range(20, 48):
        rows = rows_of_call(backend, *(Chunk(slot, TOKENS[i : i + 1], 1, generated=True) for slot in slots))
        np.testing.assert_array_equal(rows, [alone[name][i - 20] for name in who])
    for slot in slots:
        if slot is not None:
            slot.close()


def test_branches_of_a_tree_have_their_sequence_s_adapter(every: OpenVINOPaged) -> None:
    backend = every
    expected = logits(backend, "pirate", (20, *[1] * 28))
    slot = backend.open(64, Prompt((), adapter="pirate"))
    assert slot is not None
    backend.submit([Chunk(slot, TOKENS[:20], 0)]).wait()
    assert slot.fork(1, 4) == 1
    tree = Chunk(slot, [TOKENS[20], 7, TOKENS[21]], 3, parents=[-1, -1], generated=True)
    np.testing.assert_array_equal(rows_of_call(backend, tree)[[0, 2]], expected[20:22])
    slot.close()


def test_the_mask_has_each_row_s_own_columns_alone(tmp_path: Path) -> None:
    made = Adapters((Adapter("a", tmp_path, 4), Adapter("b", tmp_path, 17)))
    assert (made.width, made.columns) == (48, {"a": slice(0, 16), "b": slice(16, 48)})
    mask = made.mask(["b", None, "a"])
    assert mask.dtype == np.float32
    np.testing.assert_array_equal(mask, [[0] * 16 + [1] * 32, [0] * 48, [1] * 16 + [0] * 32])


@pytest.mark.parametrize("options", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_drafted_text_is_plain_decoding_s_with_each_adapter(engine: outrider.Engine, options: dict[str, Any]) -> None:
    texts = set()
    for name in (None, *NAMES):
        plain = engine.generate(PROMPT, adapter=name, drafter=None, **ANSWER, **options)
        texts.add(tuple(plain.token_ids))
        for drafter in ("auto", "suffix", "ngram"):
            drafted = engine.generate(PROMPT, adapter=name, drafter=drafter, **ANSWER, **options)
            assert drafted.token_ids == plain.token_ids
            assert drafted.exact
    assert len(texts) == 1 + len(NAMES)


def test_answers_at_the_same_time_are_those_alone(engine: outrider.Engine) -> None:
    who = (None, *NAMES, "pirate")
    expected = [engine.generate(PROMPT, adapter=name, **ANSWER, **SAMPLED).token_ids for name in who]
    found: dict[int, list[int]] = {}

    def answer(i: int) -> None:
        found[i] = engine.generate(PROMPT, adapter=who[i], **ANSWER, **SAMPLED).token_ids

    in_threads(answer, range(len(who)))
    assert [found[i] for i in range(len(who))] == expected


@pytest.mark.slow
def test_drafters_of_the_main_model_s_layers_and_states_draft_for_the_adapter(tmp_path: Path) -> None:
    """The adapter is in each segment of a model that is cut, and in the hidden states that drafters read."""
    from outrider_export import add_adapter, add_drafter

    made = make_layered(tmp_path / "layered")
    add_drafter(made.folder, write_head(tmp_path / "eagle3", "eagle3"))
    added = add_adapter(made.folder, write_adapter(tmp_path / "pirate", SHAPE | {"num_hidden_layers": 5}))
    added = add_adapter(made.folder, write_adapter(tmp_path / "end", SHAPE | {"num_hidden_layers": 5}, layers=(4,)))
    own = with_layers(added, self=(0, 1, 3, 4)).manifest.drafters
    drafters = (*added.manifest.drafters, *own)
    engine = outrider.Engine(
        Bundle(added.folder, msgspec.structs.replace(added.manifest, drafters=drafters)),
        outrider.Config().replace(cache_size=0.05, keep_records=False),
    )
    for name in (None, "pirate", "end"):
        plain = engine.generate(PROMPT, adapter=name, drafter=None, **ANSWER)
        for drafter in ("self", "eagle3"):
            drafted = engine.generate(PROMPT, adapter=name, drafter=drafter, num_assistant_tokens=3, **ANSWER)
            assert drafted.token_ids == plain.token_ids
            assert drafted.exact
            assert drafted.stats.num_draft_tokens


def test_cached_prefixes_are_not_shared_between_adapters(bundle: Bundle) -> None:
    engine = outrider.load(bundle.folder, cache_size=0.05, adapters=("pirate", "poet"))
    assert engine.adapters == ("pirate", "poet")
    asked = (None, "pirate", "poet") * 2
    seen = [engine.generate(PROMPT, adapter=name, **ANSWER).stats.num_cached_tokens for name in asked]
    assert seen[:3] == [0, 0, 0]
    assert all(count > 30 for count in seen[3:])
    with pytest.raises(outrider.OptionError, match="no adapter 'late' here: loaded are 'pirate', 'poet'"):
        engine.generate(PROMPT, adapter="late")


@pytest.mark.slow
def test_an_answer_that_is_read_again_has_its_adapter(engine: outrider.Engine, bundle: Bundle) -> None:
    uncached = outrider.load(bundle.folder, cache_size=0.05, enable_prefix_caching=False)
    text = engine.tokenizer.encode("What is a quick brown fox? " * 3)
    for name in ("pirate", None):
        before = engine.cache["main"].num_published_tokens
        answer = engine.generate(text, adapter=name, drafter=None, max_new_tokens=100, ignore_eos=True)
        begun, whole = time.monotonic(), [*text, *answer.token_ids]
        # The answer is published as it was generated, and once more as a part of a prompt.
        while engine.cache["main"].num_published_tokens < before + 1.5 * len(whole):
            assert time.monotonic() < begun + 300, "it is not read again"
            time.sleep(0.01)
            if not engine.main.capabilities.marks_answers:
                break
        found = engine.generate([*whole, 9], adapter=name, **ANSWER)
        assert found.stats.num_cached_tokens >= len(whole) - 1
        assert uncached.generate([*whole, 9], adapter=name, **ANSWER).token_ids == found.token_ids


def test_an_unknown_adapter_is_named_with_the_nearest(engine: outrider.Engine, tiny: Path) -> None:
    with pytest.raises(outrider.OptionError, match="Did you mean 'pirate'?"):
        engine.generate(PROMPT, adapter="pirat")
    with pytest.raises(outrider.OptionError, match="loaded are none. Add one: outrider add"):
        outrider.load(tiny, cache_size=0.01).generate(PROMPT, adapter="pirate")
    with pytest.raises(outrider.OptionError, match="has no adapter 'poets'. Did you mean 'poet'?"):
        outrider.load(engine.bundle.folder, adapters=("poets",))
    with pytest.raises(outrider.OptionError, match="adapter=3 is not an adapter's name"):
        engine.generate(PROMPT, adapter=3)  # type: ignore[arg-type]


def test_a_prompt_can_name_its_adapter(engine: outrider.Engine) -> None:
    token_ids = engine.tokenizer.encode(PROMPT)
    expected = engine.generate(token_ids, adapter="poet", **ANSWER)
    assert engine.generate(Prompt(token_ids, adapter="poet"), **ANSWER).token_ids == expected.token_ids
    with pytest.raises(outrider.OptionError, match="prompt is for the adapter 'poet', and adapter='pirate'"):
        engine.generate(Prompt(token_ids, adapter="poet"), adapter="pirate")
    with pytest.raises(outrider.RequestError, match="for the adapter 'nobody', and OpenVINOPaged has 'pirate'"):
        engine.main.open(64, Prompt((), adapter="nobody"))


def test_a_chat_keeps_its_adapter_on_disk(engine: outrider.Engine, tiny: Path, tmp_path: Path) -> None:
    chat = engine.chat(adapter="pirate", **ANSWER)
    chat.send("Hello")
    chat.save(tmp_path / "chat.json")
    again = engine.load_chat(tmp_path / "chat.json", **ANSWER)
    assert again.options["adapter"] == "pirate"
    assert again.send("And now?").token_ids == chat.send("And now?").token_ids
    assert engine.load_chat(tmp_path / "chat.json", adapter=None).options["adapter"] is None
    saved = json.loads((tmp_path / "chat.json").read_text(encoding="utf-8"))
    del saved["checksum"]
    (tmp_path / "chat.json").write_text(json.dumps(saved | {"adapter_sha256": "0" * 64}), encoding="utf-8")
    with pytest.raises(outrider.OptionError, match="another adapter of the name 'pirate'"):
        engine.load_chat(tmp_path / "chat.json")
    with pytest.raises(outrider.OptionError, match="saved with the adapter 'pirate', which this bundle does not have"):
        outrider.load(tiny, cache_size=0.01).load_chat(tmp_path / "chat.json")


def test_records_are_kept_for_each_adapter() -> None:
    records = Records(adapters={"pirate": "a" * 64})
    for _ in range(40):
        records.of_model(Greedy(), "draft").share.add(0.0)
    begun = records.of_model(Greedy(), "draft", "pirate").share
    assert begun.mean == pytest.approx(records.of_model(Greedy(), "draft").share.mean)
    begun.add(1.0)
    assert begun.mean > records.of_model(Greedy(), "draft").share.mean
    assert records.of(Greedy(), "pirate") is not records.of(Greedy())
    other = Records(adapters={"pirate": "b" * 64})
    other.found = records.found
    assert other.of(Greedy(), "pirate") is not records.of(Greedy(), "pirate")


def test_models_in_other_formats_refuse_adapters(bundle: Bundle, tmp_path: Path) -> None:
    own = adapters_of(bundle)
    main = bundle.manifest.main
    with pytest.raises(outrider.DeviceError, match="and this one is on an NPU. Load it with adapters=()"):
        compile_model(ModelSpec("main", bundle, main, adapters=own, device="NPU"))
