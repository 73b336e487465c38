"""Tiny random models of many architectures, and what each has to be: see `outrider_export.describe.architectures`."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from outrider.bundle import Bundle, DrafterEntry, list_files, read_bundle, write_manifest
from recorded import NAMES, Recorded
from tiny import NUM_TOKENS, TEMPLATE, train_tokenizer

WINDOW = 16  # tokens of all sliding windows here; the texts are longer
NUM_EXPERTS, NUM_ACTIVE = 4, 2


def _read() -> dict[str, dict[str, Any]]:
    """The entries of `shapes.json` by name, with all of their sizes.

    like: the entries that it begins with, without some of their keys. of: the architecture that it changes. onnx, gguf:
    changes for ONNX, which has no windows, and for what a GGUF file cannot say: llama.cpp takes windows and rotations
    by the number of the layer.
    """
    rows: dict[str, dict[str, Any]] = {}
    for row in json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8")):
        begun = {key: each for name in row.get("like", ()) for key, each in rows[name]["sizes"].items()}
        row["sizes"] = {key: each for key, each in begun.items() if key not in row.get("without", ())} | row["sizes"]
        rows[row["name"]] = row
    return rows


_ROWS = _read()
# What Transformers' configuration of each architecture is made with; names with an underscore are parts of others.
CONFIGS: dict[str, dict[str, Any]] = {
    name: row["sizes"] for name, row in _ROWS.items() if "of" not in row and name[0] != "_"
}
# Other configurations: the architecture, and what is changed.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    name: (row["of"], row["sizes"]) for name, row in _ROWS.items() if "of" in row
}
IN_ONNX, IN_GGUF = ({name: row[form] for name, row in _ROWS.items() if form in row} for form in ("onnx", "gguf"))
# Gemma 4's larger models: keys and values of one product where attention is full, none shared, no inputs by layer.
GEMMA4_DENSE, GEMMA4_EXPERTS, NEMOTRON_EXPERTS = (
    _ROWS[name]["sizes"] for name in ("_gemma4_dense", "_gemma4_experts", "_nemotron_experts")
)


def make_model(architecture: str, seed: int = 0, **changes: Any) -> Any:
    """A random torch model in float32 of an architecture's small configuration, or what is recorded of one."""
    from transformers import AutoConfig

    if architecture in NAMES:
        return Recorded.of(architecture, changes)
    given = CONFIGS.get(architecture, CONFIGS["llama"]) | changes
    return random_model(AutoConfig.for_model(architecture, **given), seed, experts="n_routed_experts" in changes)


def random_model(config: Any, seed: int, *, experts: bool = False) -> Any:
    """A random torch model in float32, with weights large enough for its logits to differ.

    experts: whether a Nemotron-H has them instead of dense feed-forward parts.
    """
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).float().eval()
    if config.model_type == "nemotron_h" and not experts:
        _with_dense_parts(model)
    if config.model_type == "deepseek_v2":
        mend_deepseek_v2(model)
    for name, parameter in model.named_parameters():
        if name.endswith(
            "A_log"
        ):  # a token forgets from 0.2 to 40 % of a state: at once, faults of states would not show
            parameter.data = torch.linspace(-6, -1, len(parameter))
        elif parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.15)
        else:
            parameter.data += 0.1 * torch.randn_like(parameter)
    for name, buffer in model.named_buffers():
        if name.endswith(("expert_bias", "correction_bias", "layer_scalar")):
            buffer += 0.3 * torch.randn_like(buffer)
    return model


def _with_dense_parts(model: Any) -> None:
    """Give a Nemotron-H dense feed-forward parts, which its code in Transformers 5.5 has, but its configuration not."""
    from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHMLP

    for layer in model.model.layers:
        if layer.block_type == "moe":
            layer.mixer = NemotronHMLP(model.config)
    pattern = "".join({"mamba": "M", "moe": "-", "attention": "*"}[layer.block_type] for layer in model.model.layers)
    save = model.save_pretrained

    def save_as_published(folder: Path, **options: Any) -> None:
        save(folder, **options)
        path = Path(folder) / "config.json"
        config = json.loads(path.read_text(encoding="utf-8"))
        del config["layers_block_type"]
        config |= {"hybrid_override_pattern": pattern, "num_hidden_layers": len(pattern)}
        path.write_text(json.dumps(config), encoding="utf-8")

    model.save_pretrained = save_as_published


def mend_deepseek_v2(model: Any) -> None:
    """Have a DeepSeek V2 with YaRN scale products of queries and keys as its publishers do, and find its groups.

    Transformers 5.5 does neither: see its pull request 47435 for the first. Later ones do.
    """
    rope = model.config.rope_parameters
    weight, is_yarn = rope.get("mscale_all_dim"), rope["rope_type"] == "yarn"
    for layer in model.model.layers:
        if weight and is_yarn:
            layer.self_attn.scaling *= (0.1 * weight * math.log(rope["factor"]) + 1) ** 2
        layer.mlp.num_experts = model.config.n_routed_experts


def do_not_scale_windows(model: Any) -> None:
    """Have an OLMo 3's layers with a sliding window rotate without scaling, as in training.

    Transformers 5.0 to 5.5 scales all of them: see its issue 45945. Later ones do not.
    """
    config = type(model.config)(**{**model.config.to_dict(), "rope_parameters": None})
    config.rope_parameters = {"rope_type": "default", "rope_theta": model.config.rope_parameters["rope_theta"]}
    plain = type(model.model.rotary_emb)(config)

    def rotate(_: Any, inputs: Any, options: dict[str, Any]) -> Any:
        return inputs, options | {"position_embeddings": plain(inputs[0], options["position_ids"])}

    for layer, kind in zip(model.model.layers, config.layer_types, strict=True):
        if kind == "sliding_attention":
            layer.register_forward_pre_hook(rotate, with_kwargs=True)


def save_model(model: Any, folder: Path) -> Path:
    """Write a checkpoint with a tokenizer."""
    from transformers import PreTrainedTokenizerFast

    model.save_pretrained(folder)
    special = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    wrapped = PreTrainedTokenizerFast(tokenizer_object=train_tokenizer(), chat_template=TEMPLATE, **special)
    wrapped.save_pretrained(folder)
    return folder


def with_noisy_draft(bundle: Bundle, noise: float = 0.1) -> Bundle:
    """The bundle with a draft model of the same architecture: the main model, with other weights. Written in place."""
    import openvino as ov

    main = bundle.manifest.main
    model = ov.Core().read_model(bundle.model_path(main))
    rng = np.random.default_rng(1)
    for node in model.get_ops():
        if node.get_type_name() != "Constant" or node.get_element_type() != ov.Type.f32 or node.data.ndim != 2:
            continue
        if min(node.data.shape) > 1:
            drawn = node.data * rng.normal(1, noise, node.data.shape).astype(np.float32)
            made = ov.opset13.constant(drawn)
            for target in node.output(0).get_target_inputs():
                target.replace_source_output(made.output(0))
    (bundle.folder / "draft").mkdir()
    ov.save_model(model, bundle.folder / "draft" / "openvino_model.xml", compress_to_fp16=False)
    entry = DrafterEntry("draft", "draft_model", msgspec.structs.replace(main, folder="draft"))
    (bundle.folder / "outrider.json").unlink()
    manifest = msgspec.structs.replace(bundle.manifest, drafters=(entry,), files=list_files(bundle.folder))
    write_manifest(bundle.folder, manifest)
    return read_bundle(bundle.folder)


def logits_of(model: Any, token_ids: Sequence[int]) -> Any:
    """A torch model's logits, float32 [n, vocab]."""
    import torch

    with torch.no_grad():
        return model(torch.tensor([[*token_ids]])).logits[0].float().numpy()


def hidden_states(model: Any, token_ids: Sequence[int]) -> tuple[Any, Any]:
    """Hidden states float32 [n, hidden] after a torch model's first layer, and after its last norm."""
    import torch

    with torch.no_grad():
        found = model(torch.tensor([[*token_ids]]), output_hidden_states=True).hidden_states
    return found[1][0].numpy(), found[-1][0].numpy()


def continued(model: Any, prompt: Sequence[int], count: int) -> list[int]:
    """Transformers' own greedy answer of `count` tokens of the vocabulary, which is smaller than the output matrix."""
    import torch

    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    padding = [*range(NUM_TOKENS, CONFIGS["llama"]["vocab_size"])]
    with torch.no_grad():
        made = model.generate(torch.tensor([[*prompt]]), max_new_tokens=count, suppress_tokens=padding, **options)
    answer: list[int] = made[0, len(prompt) :].tolist()
    return answer


def cosines(found: Any, expected: Any) -> Any:
    """The cosine of each row with the same row of another array."""
    return (found * expected).sum(axis=1) / np.linalg.norm(found, axis=1) / np.linalg.norm(expected, axis=1)


def same_but_for_ties(found: Sequence[int], expected: Sequence[int], logits: Any, margin: float = 1e-3) -> bool:
    """Whether two greedy answers are the same up to where two tokens are as likely, after which they may go apart.

    logits: of the expected answer, float32 [n, vocab]: row i is that which token i was chosen from.
    """
    for i, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        if ours != theirs:
            return bool(logits[i, theirs] - logits[i, ours] < margin)
    return True
