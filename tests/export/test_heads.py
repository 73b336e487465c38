"""The graphs of drafters that read hidden states compute what their PyTorch references do, from published weights."""

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding

from calls import rows_of_call
from heads import (
    DECODER,
    KINDS,
    MASK,
    NUM_PLACES,
    TOKEN_MAP,
    TOKENS,
    config_of,
    name_of,
    tensors_of,
    write_head,
)
from outrider.bundle import Bundle, read_bundle
from outrider.drafters import Subset
from outrider.models.backends.heads import Head, load_head
from outrider.types import Chunk, Exactness, Prompt, Rounding, RowRule
from outrider_export.bundles.drafters import add_drafter
from qwen_module import qwen_module

MODULES = ("eagle3", "mtp", "mtp qwen", "mtp experts")
RULES = {
    "any": RowRule(),
    "eights": RowRule(sequence=Rounding(8, 8), call=Rounding(8, 8)),
    "separate": RowRule(separate=True, dummy_rows=2),
}


@pytest.fixture(scope="module")
def bundle(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """The tiny bundle with a drafter of each kind, in fp32."""
    root = tmp_path_factory.mktemp("heads")
    shutil.copytree(tiny, root / "bundle")
    for kind in KINDS:
        add_drafter(root / "bundle", write_head(root / kind, kind), name=name_of(kind), weights="fp32")
    return read_bundle(root / "bundle")


def load(bundle: Bundle, kind: str, rule: RowRule = RULES["any"]) -> Any:
    entry = next(each for each in bundle.manifest.drafters if each.name == name_of(kind))
    options: dict[str, Any] = {"properties": {"DYNAMIC_QUANTIZATION_GROUP_SIZE": "0"}, "device": "CPU"}
    width = min(entry.model.vocab_size, entry.model.geometry.logits_width)
    head = Head.of(entry, bundle.model_path(bundle.manifest.main))
    backend = load_head(bundle.model_path(entry.model), head, {**options, "precision": "f32", "vocab_size": width})
    backend.use(Exactness(rule=rule))
    backend.allocate(1024)
    return backend


def check(found: Sequence[Any] | Any, expected: Any, least: float = 0.9999) -> None:
    """Each row has the direction and the size of the expected one."""
    found, expected = np.array(found), expected.numpy() if isinstance(expected, torch.Tensor) else expected
    assert found.shape == expected.shape
    sizes = np.linalg.norm(found, axis=-1), np.linalg.norm(expected, axis=-1)
    assert ((found * expected).sum(-1) / sizes[0] / sizes[1]).min() >= least
    np.testing.assert_allclose(*sizes, rtol=1e-3)


def weights_of(kind: str) -> dict[str, Any]:
    return {name: torch.tensor(values) for name, values in tensors_of(kind).items()}


def llama_layer(kind: str, prefix: str) -> Callable[[Any], Any]:
    """A layer of Llama with a drafter's weights, over hidden states [n, hidden]."""
    config = LlamaConfig(**{**DECODER, "attention_bias": False})
    config._attn_implementation = "sdpa"
    layer, rotation = LlamaDecoderLayer(config, 0).eval(), LlamaRotaryEmbedding(config)
    weights = {name.removeprefix(prefix): values for name, values in weights_of(kind).items() if prefix in name}
    if "input_layernorm.weight" not in weights:
        layer.input_layernorm = torch.nn.Identity()
    layer.load_state_dict(weights)

    def run(hidden: Any) -> Any:
        positions = torch.arange(len(hidden))[None]
        with torch.no_grad():
            return layer(hidden[None], position_embeddings=rotation(hidden[None], positions), position_ids=positions)[0]

    return run


def norm(rows: Any, weight: Any) -> Any:
    module = LlamaRMSNorm(len(weight), DECODER["rms_norm_eps"])
    module.load_state_dict({"weight": weight})
    with torch.no_grad():
        return module(rows)


def mtp(token_ids: Any, hidden: Any, shared: tuple[Any, Any]) -> tuple[Any, Any]:
    weights, (embedding, matrix) = weights_of("mtp"), shared
    both = [
        norm(embedding[token_ids], weights["mtp.pre_fc_norm_embedding.weight"]),
        norm(hidden, weights["mtp.pre_fc_norm_hidden.weight"]),
    ]
    out = llama_layer("mtp", "mtp.layers.0.")(torch.cat(both, 1) @ weights["mtp.fc.weight"].T)
    out = norm(out, weights["mtp.norm.weight"])
    return (out @ matrix.T)[:, :TOKENS], out


def mtp_qwen(token_ids: Any, hidden: Any, shared: tuple[Any, Any], kind: str = "mtp qwen") -> tuple[Any, Any]:
    logits, out = qwen_module(token_ids, hidden, shared, kind)
    return logits[:, :TOKENS], out


def mtp_experts(token_ids: Any, hidden: Any, shared: tuple[Any, Any]) -> tuple[Any, Any]:
    return mtp_qwen(token_ids, hidden, shared, "mtp experts")


def eagle3(token_ids: Any, hidden: Any, shared: tuple[Any, Any], *, norm_first: bool = False) -> tuple[Any, Any]:
    """hidden: the three of the main model, or after their projection. norm_first: the residual is normed, too."""
    from optimum.exporters.openvino.model_patcher import LlamaEagle3ForCausalLM

    config = LlamaConfig(**{k: v for k, v in config_of("eagle3").items() if k != "architectures"})
    model = LlamaEagle3ForCausalLM(config).eval()
    weights = {f"model.{name}": values for name, values in weights_of("eagle3").items()}
    weights["model.embed_tokens.weight"] = shared[0]
    assert not model.load_state_dict(weights, strict=False).missing_keys
    outs: list[Any] = []
    if norm_first:
        layer, hidden_norm = model.model.midlayer, model.model.midlayer.hidden_norm
        layer.hidden_norm = torch.nn.Identity()
        layer.register_forward_pre_hook(
            lambda module, _, named: ((), {**named, "hidden_states": hidden_norm(named["hidden_states"])}),
            with_kwargs=True,
        )
    model.model.midlayer.register_forward_hook(lambda module, inputs, out: outs.append(out))
    with torch.no_grad():
        positions = torch.arange(len(token_ids))[None]
        given: dict[str, Any] = {"hidden_states": hidden[None], "position_ids": positions, "use_cache": False}
        logits = model(input_ids=token_ids[None], **given).logits[0]
    order = np.argsort(TOKEN_MAP)  # a bundle's logits are in the order of the main model's ids
    return logits[:, torch.tensor(order)], outs[0][0]


REFERENCES = {"eagle3": eagle3, "mtp": mtp, "mtp qwen": mtp_qwen, "mtp experts": mtp_experts}


def module_case(kind: str, num_tokens: int = 45) -> tuple[Any, Any, Any]:
    """Tokens, the main model's hidden states, and these as the drafter's backend reads them."""
    rng = np.random.default_rng(3)
    token_ids = rng.integers(0, TOKENS, num_tokens)
    hidden = rng.standard_normal((num_tokens, 192 if kind == "eagle3" else 64)).astype(np.float32)
    return token_ids, hidden, np.pad(hidden, ((0, 0), (0, 64 if kind == "eagle3" else 0)))


@pytest.mark.fast_cases(3)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("kind", MODULES)
def test_modules(kind: str, rule: str, bundle: Bundle, shared: Any) -> None:
    """Whole, in pieces beside other sequences, and from a cached prefix."""
    backend, (token_ids, hidden, read) = load(bundle, kind, RULES[rule]), module_case(kind)
    logits, following = REFERENCES[kind](torch.tensor(token_ids), torch.tensor(hidden), shared)
    n, ids = len(token_ids), token_ids.tolist()

    def chunk(slot: Any, begin: int, end: int, rows: int, generated: bool = False) -> Chunk:
        states = read[begin:end]
        return Chunk(slot, ids[begin:end], rows, ("next_hidden",), generated=generated, hidden_states=states)

    whole = chunk(backend.open(100), 0, n, n)
    step = backend.submit([whole]).wait()
    check([row.full() for row in step.rows(whole)], logits)
    check(step.features(whole), following)

    first, second, third = (backend.open(100, Prompt(ids)) for _ in range(3))
    for parts in (
        [(first, 0, 12, 3), (second, 0, 31, 1)],
        [(second, 31, 34, 2), (first, 12, 40, 28), (third, 0, 1, 1)],
        [(first, 40, 45, 5), (third, 1, 33, 0), (second, 34, 35, 1)],
    ):
        chunks = [chunk(*part, generated=part[2] - part[1] < 6) for part in parts]
        step = backend.submit(chunks).wait()
        for each, (_, begin, end, count) in zip(chunks, parts, strict=True):
            if count:
                check([row.full() for row in step.rows(each)], logits[end - count : end])
            check(step.features(each), following[begin:end])
    first.publish(ids)
    again = backend.open(100, Prompt([*ids[:40], 1]))
    assert again.length == 32
    check(rows_of_call(backend, chunk(again, 32, 45, 5)), logits[40:])


def test_a_residual_after_the_norm(tiny: Path, shared: Any, tmp_path: Path) -> None:
    """As vLLM's speculators may have it."""
    shutil.copytree(tiny, tmp_path / "bundle")
    variant = write_head(tmp_path / "variant", "eagle3", norm_before_residual=True)
    bundle = add_drafter(tmp_path / "bundle", variant, weights="fp32")
    backend, (token_ids, hidden, read) = load(bundle, "eagle3"), module_case("eagle3")
    logits, _ = eagle3(torch.tensor(token_ids), torch.tensor(hidden), shared, norm_first=True)
    chunk = Chunk(backend.open(100), token_ids.tolist(), len(token_ids), hidden_states=read)
    check(rows_of_call(backend, chunk), logits)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("kind", MODULES)
def test_modules_read_their_own_hidden_states(kind: str, bundle: Bundle, shared: Any) -> None:
    backend, (token_ids, hidden, read) = load(bundle, kind), module_case(kind)
    states = torch.tensor(hidden[:20])
    if kind == "eagle3":
        states = states @ weights_of(kind)["fc.weight"].T
    slot, rows = backend.open(100), read[:20]
    for i in range(20, 24):
        first = 0 if i == 20 else i - 1
        chunk = Chunk(slot, token_ids[first:i].tolist(), 1, ("next_hidden",), hidden_states=rows)
        step = backend.submit([chunk]).wait()
        logits, following = REFERENCES[kind](torch.tensor(token_ids[:i]), states, shared)
        check([row.full() for row in step.rows(chunk)], logits[-1:])
        own = step.features(chunk)[-1:].copy()
        check(own, following[-1:])
        rows = np.pad(own, ((0, 0), (192 if kind == "eagle3" else 0, 0)))
        states = torch.cat([states, following[-1:]])


@pytest.fixture(scope="module")
def dflash(shared: tuple[Any, Any]) -> Callable[[Any, Sequence[int]], Any]:
    """float32 [masks, vocabulary] of the reference, for a context's hidden states and a block."""
    from optimum.exporters.openvino.model_patcher import Qwen3DFlashDraftModel

    config = Qwen3Config(**{k: v for k, v in config_of("dflash").items() if k != "architectures"})
    model, (embedding, matrix) = Qwen3DFlashDraftModel(config).eval(), shared
    model.load_state_dict(weights_of("dflash"))

    def run(hidden: Any, block: Sequence[int]) -> Any:
        with torch.no_grad():
            out = model(
                position_ids=torch.arange(len(hidden) + len(block))[None],
                noise_embedding=embedding[torch.tensor(block)][None],
                hidden_states=torch.tensor(hidden)[None],
                use_cache=False,
            ).last_hidden_state[0, 1:]
        return (out @ matrix.T)[:, :TOKENS]

    return run


def test_dflash(bundle: Bundle, dflash: Any) -> None:
    """Whole, in pieces beside other sequences, with no new context, and from a cached prefix."""
    backend, rng = load(bundle, "dflash"), np.random.default_rng(4)
    hidden = rng.standard_normal((45, 128)).astype(np.float32)
    context, blocks = rng.integers(0, TOKENS, 45).tolist(), [[i, *[MASK] * NUM_PLACES] for i in (100, 101, 102)]
    first, second, third = (backend.open(60) for _ in range(3))

    def chunk(slot: Any, begin: int, end: int, block: Sequence[int], rows: int = NUM_PLACES) -> Chunk:
        states = hidden[begin:end] if end > begin else None
        return Chunk(slot, [*context[begin:end], *block], rows, hidden_states=states)

    check(rows_of_call(backend, chunk(first, 0, 45, blocks[0])), dflash(hidden, blocks[0]))
    assert first.length == 45
    backend.submit([chunk(second, 0, 30, [MASK], 0), chunk(third, 0, 10, blocks[1], 0)]).wait()
    rows = rows_of_call(backend, chunk(third, 10, 20, blocks[1]), chunk(second, 30, 45, blocks[2]))
    check(rows[:3], dflash(hidden[:20], blocks[1]))
    check(rows[3:], dflash(hidden, blocks[2]))
    chunks = [chunk(second, 45, 45, blocks[0]), chunk(third, 20, 33, blocks[0]), chunk(first, 9, 9, blocks[1])]
    rows = rows_of_call(backend, *chunks)
    for i, (states, block) in enumerate([(hidden, blocks[0]), (hidden[:33], blocks[0]), (hidden, blocks[1])]):
        check(rows[3 * i : 3 * i + 3], dflash(states, block))
    second.trim(38)
    check(rows_of_call(backend, chunk(second, 38, 41, blocks[1])), dflash(hidden[:41], blocks[1]))
    first.publish(context)
    again = backend.open(60, Prompt([*context[:40], 0]))
    assert again.length == 32
    check(rows_of_call(backend, chunk(again, 32, 45, blocks[2])), dflash(hidden, blocks[2]))


def test_proposed_tokens_are_in_order(bundle: Bundle) -> None:
    """Those of `d2t`, which has differences, in whatever order they are published."""
    entry = next(each for each in bundle.manifest.drafters if each.name == "eagle3")
    proposed = bundle.read_proposed(entry)
    assert proposed.tolist() == sorted(TOKEN_MAP.tolist())
    row = Subset(proposed, TOKENS).widen(np.arange(len(TOKEN_MAP), dtype=np.float32))
    assert np.isfinite(row).sum() == len(TOKEN_MAP)
