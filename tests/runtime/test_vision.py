"""Images in prompts, with a toy encoder: what is read, cached, drafted and refused."""

import base64
import functools
import io
import json
import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import outrider
from adapters import write_adapter
from calls import rows_of_call
from heads import write_head
from outrider.bundle import Bundle, read_bundle
from outrider.cli import run
from outrider.errors import BundleError
from outrider.inputs.vision import Vision, cut_into_tiles, image_text, read_image
from outrider.models.backends.adapters import Adapters
from outrider.models.backends.openvino_paged import OpenVINOPaged
from outrider.models.backends.paged_graph import read_decoder
from outrider.models.tuning.model_spec import adapters_of
from outrider.types import Chunk, Exactness, Prompt, Span
from tiny import SHAPE
from tiny_vision import ROWS, SIDE, TOY_PLACE, asking, picture

Image: Any = pytest.importorskip("PIL.Image", reason="the extra [vision]")
STATES = "hidden_states.0"


@pytest.fixture(scope="module")
def engine(seeing: Path, tiny: Path) -> outrider.Engine:
    """With copies, and a draft model that reads text only."""
    return outrider.load(seeing, precision="f32", cache_size=0.05, keep_records=False, draft_bundle=str(tiny))


def vision_of(engine: outrider.Engine) -> Vision:
    found = engine.vision
    assert found is not None
    return found


def laid_out(engine: outrider.Engine, messages: Any) -> Prompt:
    """The prompt of messages with images."""
    tokenizer: Any = engine.tokenizer
    return vision_of(engine).prompt(messages, tokenizer)


def answer(engine: outrider.Engine, prompt: Any, **options: Any) -> outrider.Result:
    return engine.generate(prompt, max_new_tokens=24, ignore_eos=True, **options)


# The backend


@pytest.fixture(scope="module")
def backend(seeing: Path) -> OpenVINOPaged:
    return backend_of(read_bundle(seeing))


def backend_of(
    bundle: Bundle, adapters: Adapters | None = None, features: tuple[str, ...] = (STATES,), **options: Any
) -> OpenVINOPaged:
    """The main model, which gives its embeddings as features. options: of `read_decoder`."""
    main = bundle.manifest.main
    attended = main.geometry.num_heads * main.geometry.head_size
    given: dict[str, Any] = {"embeds": True, "adapters": adapters, "attended": attended, **options}
    made = OpenVINOPaged(
        bundle.model_path(main),
        vocab_size=main.vocab_size,
        precision="f32",
        features=features,
        build=functools.partial(read_decoder, features=features, **given),
        adapters=adapters,
    )
    made.allocate(4_096)
    made.use(Exactness(rule=made.separate_rules[0]))
    return made


def read(
    backend: OpenVINOPaged,
    token_ids: Sequence[int],
    spans: tuple[Span, ...] = (),
    pieces: Sequence[int] = (),
    adapter: str | None = None,
) -> NDArray[np.float32]:
    """The logits of the last two tokens, read in pieces of these lengths, and then the rest."""
    slot = backend.open(len(token_ids) + 8, Prompt((), embeds=spans, adapter=adapter))
    assert slot is not None
    for length in (*pieces, len(token_ids) - sum(pieces)):
        done = slot.length
        rows = rows_of_call(backend, Chunk(slot, token_ids[done : done + length], num_rows=2))
    slot.close()
    return rows


def embedded(backend: OpenVINOPaged, token_ids: Sequence[int]) -> NDArray[np.float32]:
    """The model's own embeddings of tokens, float32 [n, hidden]."""
    slot = backend.open(len(token_ids) + 8)
    assert slot is not None
    chunk = Chunk(slot, token_ids, num_rows=1, features=(STATES,))
    rows = backend.submit([chunk]).wait().features(chunk).copy()
    slot.close()
    return rows


def ids_of(seed: int, count: int) -> list[int]:
    return [*map(int, np.random.default_rng(seed).integers(0, 256, count))]


def test_given_embeddings_are_read_in_place_of_the_tokens(backend: OpenVINOPaged) -> None:
    """Those of other tokens give the other tokens' logits, bit for bit; a token's own are not read then."""
    wanted = ids_of(1, 40)
    own = embedded(backend, wanted)
    expected = read(backend, wanted)
    for parts in ([(5, 17)], [(0, 3), (3, 9), (30, 40)], [(0, 40)]):
        spans = tuple(Span(begin, own[begin:end], b"%d" % begin) for begin, end in parts)
        written = [7 if any(a <= i < b for a, b in parts) else token_id for i, token_id in enumerate(wanted)]
        assert (read(backend, written) != expected).any()
        assert (read(backend, written, spans) == expected).all()
        for pieces in ([2, 6, 4], [17], [20, 18]):
            assert (read(backend, written, spans, pieces) == expected).all()


def test_a_graph_of_another_form_is_refused(openvino_bundle: Bundle) -> None:
    """The toy adds positions to its embedding."""
    path = openvino_bundle.model_path(openvino_bundle.manifest.main)
    with pytest.raises(BundleError, match="place of the embedding .* is not found there. Export it again"):
        read_decoder(ov.Core(), path, embeds=True)


def test_a_call_of_several_sequences_reads_each_ones_embeddings(backend: OpenVINOPaged) -> None:
    texts = {seed: ids_of(seed, 30 + seed) for seed in range(3)}
    spans = {seed: (Span(seed + 2, embedded(backend, ids_of(seed + 9, 8)), b"%d" % seed),) for seed in (0, 2)}
    alone = {seed: read(backend, texts[seed], spans.get(seed, ())) for seed in texts}
    slots = {seed: backend.open(60, Prompt((), embeds=spans.get(seed, ()))) for seed in texts}
    rows = rows_of_call(backend, *(Chunk(slots[seed], texts[seed], num_rows=2) for seed in texts))
    for seed, together in zip(texts, rows.reshape(len(texts), 2, -1), strict=True):
        assert (together == alone[seed]).all()
    for slot in slots.values():
        assert slot is not None
        slot.close()


def test_branches_read_the_embeddings_of_their_positions(backend: OpenVINOPaged) -> None:
    text, own = ids_of(4, 12), embedded(backend, ids_of(5, 6))
    spans = (Span(8, own, b"a"),)
    slot = backend.open(40, Prompt((), embeds=spans))
    assert slot is not None
    backend.submit([Chunk(slot, text[:8], num_rows=1)]).wait()
    assert slot.fork(1, 4) == 1
    tree = [1, 2, 3, 4]
    rows = rows_of_call(backend, Chunk(slot, tree, num_rows=4, parents=[-1, 0, -1], generated=True))
    slot.keep([])
    slot.close()
    for path in ([0, 1, 2], [0, 3]):
        alone = backend.open(40, Prompt((), embeds=spans))
        assert alone is not None
        backend.submit([Chunk(alone, text[:8], num_rows=1)]).wait()
        chunk = Chunk(alone, [tree[i] for i in path], num_rows=len(path), generated=True)
        assert (rows_of_call(backend, chunk) == rows[path]).all()
        alone.close()


def test_spans_that_are_whole_attend_in_both_directions(seeing: Path) -> None:
    """A span's first hidden state depends on its last embedding; pieces and prefixes change no bit."""
    both_ways = backend_of(read_bundle(seeing), both_ways="all", features=("hidden_states.1",))
    text, own = ids_of(1, 60), np.random.default_rng(0).normal(0, 0.02, (24, 64)).astype(np.float32)
    other = own.copy()
    other[-1] += 1

    def rows(embeds: NDArray[np.float32], *pieces: int, is_cached: bool = False) -> NDArray[np.float32]:
        """The hidden states of all tokens that are read, float32 [n, hidden]."""
        spans = (Span(10, embeds, b"a" if embeds is own else b"b", whole=True),)
        slot = both_ways.open(70, Prompt(text if is_cached else (), embeds=spans))
        assert slot is not None
        found = []
        for end in (*pieces, 60):
            chunk = Chunk(slot, text[slot.length : end], num_rows=1, features=("hidden_states.1",))
            found.append(both_ways.submit([chunk]).wait().features(chunk).copy())
        slot.publish(text[:26])
        slot.close()
        return np.concatenate(found)

    whole = rows(own)
    changed = np.flatnonzero((rows(other) != whole).any(axis=1))
    assert changed[0] == 10
    assert (rows(own, 10) == whole).all()
    assert (rows(own, 34, 40) == whole).all()
    assert (rows(own, is_cached=True) == whole[10:]).all()  # of the image, 16 tokens are in the cache


def test_embeddings_that_do_not_fit_are_refused(backend: OpenVINOPaged) -> None:
    width = backend.capabilities.embeds_width
    assert width == 64
    good = np.zeros((2, width), np.float32)
    wide: Any = np.zeros((2, width))
    for spans, message in (
        ((Span(3, np.zeros((2, 5), np.float32), b"a"),), r"from token 3 on are float32 \[2, 5\], and the model reads"),
        ((Span(3, wide, b"a"),), r"are float64 \[2, 64\]"),
        ((Span(8, good, b"a"),), r"spans \[\(8, 10\)\] are not parts of a prompt of 9 tokens"),
        ((Span(3, good, b"a"), Span(4, good, b"b")), "Give each once, in the order"),
        ((Span(-1, good, b"a"),), "are not parts"),
    ):
        with pytest.raises(outrider.RequestError, match=message):
            backend.open(20, Prompt([1] * 9, embeds=spans))


# Images


@settings(max_examples=60)
@given(st.integers(1, 200), st.integers(1, 200), st.booleans())
def test_tiles_and_tokens_agree(seeing: Path, width: int, height: int, splits: bool) -> None:
    import msgspec

    entry = read_bundle(seeing).manifest.main.vision
    assert entry is not None
    entry = msgspec.structs.replace(entry, splits=splits)
    tiles = cut_into_tiles(read_image(picture(1, height, width)), entry)
    count = tiles.rows * tiles.columns + 1
    assert tiles.pixels.shape == (count, 3, SIDE, SIDE)
    assert tiles.pixels.dtype == np.float32
    assert max(tiles.rows, tiles.columns) == (ROWS if splits else 0)
    text = image_text(tiles, entry)
    assert text.count(TOY_PLACE) == entry.tokens_per_tile * count
    assert text.count("<row_") == count - 1


@pytest.mark.slow
def test_an_image_can_be_given_in_many_ways(engine: outrider.Engine, tmp_path: Path) -> None:
    array = picture(2)
    image, file = Image.fromarray(array), io.BytesIO()
    image.save(file, "PNG")
    path = tmp_path / "cat.png"
    path.write_bytes(file.getvalue())
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    expected = laid_out(engine, asking(array))
    assert len(expected.embeds) == ROWS * ROWS + 1
    for given_as in (image, file.getvalue(), path, str(path), url, image.convert("RGBA")):
        prompt = laid_out(engine, asking(given_as))
        assert prompt == expected
    part = {"type": "image_url", "image_url": {"url": url}}
    other = [{"role": "user", "content": [part, asking(array)[0]["content"][1]]}]
    assert laid_out(engine, other) == expected


WRONG: dict[str, tuple[Any, str]] = {
    "no pixels": (asking(np.zeros((0, 5, 3), np.uint8)), "^The image has 5 × 0 pixels, and needs at least one"),
    "no image": (asking(b"This is no image."), "^The image cannot be read by Pillow. Give the path or bytes"),
    "half an image": (asking(b"\x89PNG\r\n\x1a\n"), "^The image cannot be read by Pillow"),
    "nowhere": (asking("nowhere.png"), "^The image nowhere.png cannot be read"),
    "remote": (asking("https://example.org/cat.png"), "^The image https://example.org/cat.png is on the network, and"),
    "a number": (asking(3), "^The image is a int"),
    "floats": (asking(np.zeros((4, 4, 3))), r"^The image is an array float64 \[4, 4, 3\]"),
    "no base64": (asking("data:image/png;base64,???"), "^The image's data: URL is no base64"),
    "no data": (asking("data:image/png,abc"), "^The image's URL begins 'data:image/png', and has to be"),
    "more places": (asking(picture(1), text=f"{TOY_PLACE}?"), "^The prompt has 2 places for images .* and 1 images"),
    "remote URL": (
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "https://example.org/cat.png"}}]}],
        "^Message 0 has the image_url 'https://example.org/cat.png', and images are never fetched",
    ),
    "file URL": (
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]}],
        "^Message 0 has the image_url 'file:///etc/passwd', and images are never fetched",
    ),
    "a video": (
        [{"role": "user", "content": [{"type": "video"}]}],
        "^Message 0 of the prompt has a part of type 'vide",
    ),
    "no content": ([{"role": "user", "content": []}], "^Message 0 of the prompt has no content"),
    "empty": ("  ", "^The prompt is empty"),
}


@pytest.mark.parametrize(("prompt", "message"), WRONG.values(), ids=WRONG)
def test_what_is_no_image_gets_one_line(engine: outrider.Engine, prompt: Any, message: str) -> None:
    with pytest.raises((outrider.RequestError, outrider.OptionError), match=message) as caught:
        engine.generate(prompt)
    assert "\n" not in str(caught.value)


def test_images_are_for_models_that_see_them(tiny: Path, engine: outrider.Engine) -> None:
    with outrider.load(tiny, cache_size=0.02, keep_records=False) as text_only:
        with pytest.raises(outrider.RequestError, match="^The prompt has an image, and the main model reads text only"):
            text_only.generate(asking(picture(1)))
        with pytest.raises(outrider.OptionError, match="^Message 0 of the prompt has its content in parts"):
            text_only.generate(asking())
        assert answer(text_only, "Why?").token_ids == answer(engine, "Why?").token_ids
    with pytest.raises(outrider.RequestError, match="which the chat template has to place"):
        engine.generate(asking(picture(1)), chat_template=False)


# Answers


@pytest.mark.parametrize("drafter", ["suffix", "draft", "auto"])
def test_drafted_answers_are_those_of_plain_decoding(engine: outrider.Engine, drafter: str) -> None:
    prompt = asking(picture(3), picture(4, 20, 50))
    count: Any = "auto" if drafter == "auto" else 4
    for options in ({}, {"temperature": 0.9, "seed": 11}, {"temperature": 0.9, "seed": 12, "top_p": 0.9}):
        plain = answer(engine, prompt, drafter=None, **options)
        drafted = answer(engine, prompt, drafter=drafter, num_assistant_tokens=count, **options)
        assert drafted.token_ids == plain.token_ids
        assert drafted.exact
        if drafter != "auto":
            assert drafted.stats.num_draft_tokens > 0


def test_requests_at_the_same_time_see_their_own_images(engine: outrider.Engine) -> None:
    prompts = [asking(picture(5)), asking(picture(6)), "What is a fox?", asking(picture(7, 16, 48))]
    for options in ({}, {"temperature": 0.8, "seed": 3}):
        alone = [answer(engine, prompt, **options).token_ids for prompt in prompts]
        with ThreadPoolExecutor(len(prompts)) as pool:
            together = pool.map(lambda prompt, options=options: answer(engine, prompt, **options).token_ids, prompts)
        assert [*together] == alone


def test_the_prefix_cache_tells_images_apart(seeing: Path) -> None:
    with outrider.load(seeing, precision="f32", cache_size=0.05, keep_records=False, drafter="suffix") as engine:
        cat, dog = asking(picture(8)), asking(picture(9))
        prompts = [laid_out(engine, each) for each in (cat, dog)]
        assert prompts[0].token_ids == prompts[1].token_ids
        fresh = {"cat": answer(engine, cat), "dog": answer(engine, dog)}
        assert [each.stats.num_cached_tokens for each in fresh.values()] == [0, prompts[1].embeds[0].begin]
        for name, prompt in (("cat", cat), ("dog", dog)):
            again = answer(engine, prompt)
            assert again.stats.num_cached_tokens > again.stats.num_prompt_tokens / 2
            assert again.token_ids == fresh[name].token_ids
        with outrider.load(seeing, precision="f32", cache_size=0.05, enable_prefix_caching=False) as uncached:
            for seed in range(4):  # their answers are not all alike
                prompt = asking(picture(seed))
                assert answer(uncached, prompt).token_ids == answer(engine, prompt).token_ids


# Adapters and drafters


@pytest.mark.slow
def test_an_adapter_sees_images(seeing: Path, tmp_path: Path) -> None:
    from outrider_export import add_adapter

    shutil.copytree(seeing, tmp_path / "bundle")
    add_adapter(tmp_path / "bundle", write_adapter(tmp_path / "pirate", SHAPE, seed=1))
    prompt = asking(picture(3), picture(4, 20, 50))
    with outrider.load(tmp_path / "bundle", precision="f32", cache_size=0.05, keep_records=False) as engine:
        plain = {name: answer(engine, prompt, adapter=name, drafter=None).token_ids for name in ("pirate", None)}
        assert plain["pirate"] != plain[None]
        with ThreadPoolExecutor(4) as pool:
            names = ["pirate", None, "pirate", None]
            drafted = pool.map(lambda name: answer(engine, prompt, adapter=name, drafter="suffix").token_ids, names)
        assert [*drafted] == [plain[name] for name in names]
        chat = engine.chat(adapter="pirate", max_new_tokens=24, ignore_eos=True)
        chat.send(prompt)
        chat.save(tmp_path / "chat.json")
        assert engine.load_chat(tmp_path / "chat.json", max_new_tokens=9).send("Why?").stats.num_cached_tokens > 100
    # An adapter does not ask where a row's embedding is from.
    bundle = read_bundle(tmp_path / "bundle")
    backend = backend_of(bundle, adapters_of(bundle, ("pirate",)))
    wanted = ids_of(1, 40)
    own, expected = embedded(backend, wanted), read(backend, wanted, adapter="pirate")
    assert (expected != read(backend, wanted)).any()
    written = [7 if 5 <= i < 17 else token_id for i, token_id in enumerate(wanted)]
    assert (read(backend, written, (Span(5, own[5:17], b"own"),), adapter="pirate") == expected).all()


def test_drafters_that_read_hidden_states_go_on_after_images(seeing: Path, tmp_path: Path) -> None:
    from outrider_export import add_drafter

    kind = "mtp"
    shutil.copytree(seeing, tmp_path / "bundle")
    add_drafter(tmp_path / "bundle", write_head(tmp_path / kind, kind), weights="fp32")
    options: dict[str, Any] = {"max_new_tokens": 24, "ignore_eos": True, "num_assistant_tokens": 3}
    with outrider.load(tmp_path / "bundle", precision="f32", cache_size=0.05, keep_records=False) as engine:
        chats = {name: engine.chat(drafter=name, **options) for name in (kind, None)}
        for message in (asking(picture(1, 16, 48)), "Why?", asking(picture(2, 16, 48)), "So?"):
            results = {name: chat.send(message) for name, chat in chats.items()}
            assert results[kind].token_ids == results[None].token_ids
            assert results[kind].stats.num_draft_tokens > 0
        use = engine.cache[kind]  # which has the earlier turns, too: none was read twice
        assert use.num_hits == 3
        assert use.num_cached_tokens > 0.8 * (use.num_prompt_tokens - len(chats[kind].token_ids))
        # Another image with the same tokens has an entry of its own.
        engine.chat(drafter=kind, **options).send(asking(picture(3, 16, 48)), max_new_tokens=1)
        assert engine.cache[kind].num_published_tokens >= use.num_published_tokens + 64


@pytest.mark.slow
def test_an_image_on_the_command_line(seeing: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "cat.png"
    Image.fromarray(picture(2)).save(path)
    arguments = ["generate", str(seeing), "What is this?", "--max-new-tokens", "6", "--json", "--image", str(path)]
    assert run(arguments) == 0
    assert json.loads(capsys.readouterr().out)["stats"]["num_prompt_tokens"] > 40
    assert run([*arguments, "--no-chat-template"]) == 2
    assert "--image needs the chat template" in capsys.readouterr().err
    assert run([*arguments[:-1], "nowhere.png"]) != 0
    assert "The image nowhere.png cannot be read" in capsys.readouterr().err
