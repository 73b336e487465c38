"""Drafters as openvino-genai reads them: it loads them, keeps the text, and accepts the tokens that we accept."""

import json
import runpy
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import outrider
from outrider.bundle.folder import Bundle, read_bundle
from outrider_export.bundles.drafters import add_drafter

SCRIPT = Path(__file__).parents[2] / "bench" / "scripts" / "peer_draft.py"
write_for_genai = runpy.run_path(str(SCRIPT))["write_for_genai"]
HIDDEN, WIDE, NUM_TOKENS, NUM_PLACES = 64, 96, 48, 5
SHAPE = {
    "hidden_size": HIDDEN, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 448, "rms_norm_eps": 1e-5,
    "num_hidden_layers": 1,
}  # fmt: skip
CONFIGS = {
    "eagle3": {"architectures": ["LlamaForCausalLMEagle3"], "eagle_aux_hidden_state_layer_ids": [1, 3, 4]},
    "dflash": {
        "architectures": ["DFlashDraftModel"],
        "block_size": NUM_PLACES + 1,
        "dflash_config": {"mask_token_id": 17, "target_layer_ids": [0, 2, 3]},
    },
}
LITTLE = 0.3  # of what the layers of `make_checkpoint` add
EXACT = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0}


def repeating(tensors: dict[str, Any]) -> dict[str, Any]:
    """A main model whose layers change little, so that it likes to repeat a token, and drafts are right sometimes."""
    for name, values in tensors.items():
        if "norm" in name:
            values[:] = 1
        elif "o_proj" in name or "down_proj" in name:
            values *= LITTLE
    return tensors


def tensors_of(kind: str, proposed: Any, matrix: Any) -> dict[str, Any]:
    """Random weights, near a drafter that repeats the main model's last prediction (EAGLE-3), or what it has read."""
    rng = np.random.default_rng(0)
    layer, read = ("midlayer", 2 * HIDDEN) if kind == "eagle3" else ("layers.0", HIDDEN)
    shapes = {
        "self_attn.q_proj": (HIDDEN, read), "self_attn.k_proj": (HIDDEN // 2, read),
        "self_attn.v_proj": (HIDDEN // 2, read), "self_attn.o_proj": (HIDDEN, HIDDEN), "mlp.gate_proj": (WIDE, HIDDEN),
        "mlp.up_proj": (WIDE, HIDDEN), "mlp.down_proj": (HIDDEN, WIDE), "input_layernorm": (HIDDEN,),
        "post_attention_layernorm": (HIDDEN,),
    }  # fmt: skip
    if kind == "dflash":
        shapes |= {"self_attn.q_norm": (HIDDEN // 4,), "self_attn.k_norm": (HIDDEN // 4,)}
    made = {f"{layer}.{name}.weight": rng.normal(len(shape) == 1, 0.05, shape) for name, shape in shapes.items()}
    made |= {f"{name}.weight": np.ones(HIDDEN) for name in ("norm", "hidden_norm")}
    if kind == "dflash":
        half = HIDDEN // 2
        made["layers.0.self_attn.v_proj.weight"] = np.eye(half, HIDDEN)
        each = 10 * np.eye(HIDDEN).reshape(4, HIDDEN // 4, HIDDEN)  # of the numbers of four heads, which read two
        made["layers.0.self_attn.o_proj.weight"] = np.concatenate([each[0], each[2], 0 * each[0], 0 * each[0]])
    if kind == "eagle3":
        made["midlayer.hidden_norm.weight"] = made.pop("hidden_norm.weight")
        made |= {"lm_head.weight": matrix[proposed], "d2t": proposed - np.arange(len(proposed))}
    made["fc.weight"] = np.concatenate([np.zeros((HIDDEN, 2 * HIDDEN)), np.eye(HIDDEN)], 1)
    return {name: values if name == "d2t" else values.astype(np.float32) for name, values in made.items()}


@pytest.fixture(scope="module")
def bundle(convert: Any, make_checkpoint: Any, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """A main model of four layers with both drafters, in int8."""
    from safetensors.numpy import load_file, save_file

    root = tmp_path_factory.mktemp("genai")
    checkpoint = make_checkpoint("four-layers", num_hidden_layers=4, seed=3, max_position_embeddings=2048)
    weights = checkpoint / "model.safetensors"
    save_file(repeating(load_file(weights)), weights, metadata={"format": "pt"})
    made, _ = convert(checkpoint, weights="int8")
    shutil.copytree(made.folder, root / "bundle")
    matrix = load_file(weights)["model.embed_tokens.weight"]
    proposed = np.random.default_rng(1).permutation(404)[:300]
    for kind, config in CONFIGS.items():
        (root / kind).mkdir()
        save_file(tensors_of(kind, proposed, matrix), root / kind / "model.safetensors")
        (root / kind / "config.json").write_text(json.dumps(SHAPE | config), encoding="utf-8")
        add_drafter(root / "bundle", root / kind, draft_vocab="all" if kind == "dflash" else None)
    return read_bundle(root / "bundle")


@pytest.mark.parametrize("kind", CONFIGS)
def test_it_accepts_what_we_accept(bundle: Bundle, kind: str, tmp_path: Path) -> None:
    """Token by token the same text as its plain decoding, and as many tokens accepted in each round as here."""
    import openvino as ov
    import openvino_genai as genai

    write_for_genai(bundle, kind, tmp_path / "draft")
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size, scheduler.enable_prefix_caching = 1, False
    tokenizer, main = genai.Tokenizer(bundle.tokenizer_path), bundle.folder / bundle.manifest.main.folder
    draft = genai.draft_model(tmp_path / "draft", "CPU", **EXACT)
    drafting = genai.LLMPipeline(main, tokenizer, "CPU", scheduler_config=scheduler, draft_model=draft, **EXACT)
    plain = genai.LLMPipeline(main, tokenizer, "CPU", scheduler_config=scheduler, **EXACT)
    engine = outrider.load(
        bundle.folder, precision="f32", properties={"DYNAMIC_QUANTIZATION_GROUP_SIZE": 0}, enable_prefix_caching=False
    )
    accepted = 0
    for seed in range(4):
        prompt = np.random.default_rng(seed).integers(0, 400, (1, 20))
        inputs = genai.TokenizedInputs(ov.Tensor(prompt), ov.Tensor(np.ones_like(prompt)))
        options = genai.GenerationConfig(max_new_tokens=NUM_TOKENS, ignore_eos=True)
        expected = plain.generate(inputs, options).tokens[0]
        options.num_assistant_tokens = NUM_PLACES
        answer = drafting.generate(inputs, options)
        assert answer.tokens[0] == expected
        ours = engine.generate(
            prompt[0].tolist(),
            drafter=kind,
            num_assistant_tokens=NUM_PLACES,
            max_new_tokens=NUM_TOKENS,
            ignore_eos=True,
        )
        rounds = answer.extended_perf_metrics.main_model_metrics.raw_metrics.m_batch_sizes[1:]
        assert ours.token_ids == expected
        assert ours.stats.num_accepted_tokens_per_round == [size - 1 for size in rounds]
        accepted += ours.stats.num_accepted_tokens
    assert accepted
