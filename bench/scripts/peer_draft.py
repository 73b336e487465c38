"""Writes a bundle's drafter, EAGLE-3 or DFlash, as openvino-genai reads one, so that both can be compared.

    python bench/scripts/peer_draft.py my-bundle eagle3 eagle3-genai
    outrider bench my-bundle --modes plain,eagle3:3,genai-eagle3:3 --peer-model genai-eagle3=eagle3-genai
    openvino_genai.LLMPipeline(main, "CPU", draft_model=openvino_genai.draft_model("eagle3-genai", "CPU"), …)

openvino-genai 2026.4 has EAGLE-3 and DFlash. The graphs are those of `outrider.models.backends.heads` on the same
weights, with keys and values in the model's state. It finds their parts by `rt_info` and by the names of inputs,
outputs and nodes (src/cpp/src/speculative_decoding/*_model_transforms.cpp there). The main model's embedding and, for
DFlash, its output matrix are not stored, as it takes them from the main model.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
from openvino import opset13 as ops

from outrider.bundle.folder import Bundle, read_bundle
from outrider.bundle.manifest import MODEL_NAMES, PROPOSED_NAME, DrafterEntry
from outrider.errors import ExportError, OptionError, nearest
from outrider.models.backends.heads.layers import Rotation, after_attention, after_feed_forward, heads_of, linear, norm
from outrider.models.backends.heads.recurrent import NORM_FIRST
from outrider.models.backends.heads.weights import HeadWeights
from outrider.models.backends.nodes import ints, parameter, result
from outrider.models.backends.taps import LAST, after_layers
from outrider.system.core import new_core
from outrider_export.target import Target

_INT, _FLOAT = ov.Type.i64, ov.Type.f32
_NUM_TAPS = 3  # of EAGLE-3 in openvino-genai
_MODEL = MODEL_NAMES["openvino"][0]


def write_for_genai(bundle: Bundle, name: str, folder: Path) -> None:
    """Write the drafter `name` of a bundle as a folder that `openvino_genai.draft_model` loads.

    Raises:
        OptionError: when the bundle has no drafter of that name, or the folder exists.
        ExportError: when openvino-genai has no drafters of its kind, or the folder cannot be written.
        BundleError: when the drafter's weights cannot be read.
    """
    entries = {entry.name: entry for entry in bundle.manifest.drafters}
    if name not in entries:
        raise OptionError(f"{bundle.folder} has no drafter '{name}'. {nearest(name, entries)}")
    entry, main = entries[name], bundle.manifest.main
    if entry.kind not in _MAKERS:
        raise ExportError(
            f"Drafter '{name}' is of kind {entry.kind}, and openvino-genai has only {' and '.join(_MAKERS)}. "
            "It reads draft models as they are."
        )
    if main.format != "openvino":
        raise ExportError(f"openvino-genai reads OpenVINO models, and the main model is in {main.format}.")
    main_path = bundle.folder / main.folder / _MODEL
    weights = HeadWeights.read(new_core(), bundle.folder / entry.model.folder / _MODEL, main_path)
    model = _MAKERS[entry.kind](weights, entry, bundle)
    if folder.exists():
        raise OptionError(f"{folder} exists. Choose another name.")
    try:
        with Target(folder, overwrite=False) as target:
            ov.save_model(model, target.new / _MODEL, compress_to_fp16=False)
            eos = {"eos_token_id": list(bundle.manifest.tokenizer.eos_token_ids)}
            (target.new / "generation_config.json").write_text(json.dumps(eos), encoding="utf-8")
            target.commit()
    except (OSError, RuntimeError) as error:
        raise ExportError(f"{folder} cannot be written: {error}.") from error


def _eagle3(weights: HeadWeights, entry: DrafterEntry, bundle: Bundle) -> ov.Model:
    """As `outrider.models.backends.heads.recurrent.eagle3`.

    openvino-genai moves `fc`, the MatMul at the input, into the main model; what it finds as the drafter's own hidden
    states takes its place for draft tokens.
    """
    layers = _layers_read(entry, bundle)
    if NORM_FIRST in weights:
        raise ExportError(f"Drafter '{entry.name}' has {NORM_FIRST}, which openvino-genai's EAGLE-3 does not know.")
    if len(layers) != _NUM_TAPS:
        raise ExportError(
            f"Drafter '{entry.name}' reads {len(layers)} hidden states, and openvino-genai's EAGLE-3 {_NUM_TAPS}."
        )
    token_ids, positions, mask = (
        parameter(each, _INT, (-1, -1)) for each in ("input_ids", "position_ids", "attention_mask")
    )
    hidden_states = parameter("hidden_states", _FLOAT, (-1, -1, -1))
    beams = parameter("beam_idx", ov.Type.i32, (-1,))
    main = bundle.manifest.main.geometry
    # Of the table, openvino-genai needs the shape and the name alone: it puts the main model's there.
    table = ops.broadcast(ops.constant(np.float32(0)), ints(main.logits_width, main.hidden_size))
    table.set_friendly_name("embed_tokens")
    embeddings = ops.gather(table, token_ids, ops.constant(0))
    states = _States(weights, _length(token_ids, 0), beams)
    causal = _causal(_length(token_ids, 1), _length(mask, 1))

    def attention(queries: ov.Node, keys: ov.Node, values: ov.Node) -> ov.Node:
        every = states.after_earlier(keys, "key"), states.after_earlier(values, "value")
        return _attend(queries, *every, weights, causal)

    layer = "midlayer"
    hidden = linear(hidden_states, weights, "fc")
    both = [norm(embeddings, weights, f"{layer}.input_layernorm"), norm(hidden, weights, f"{layer}.hidden_norm")]
    rotation = Rotation.of(positions, weights)
    out = after_attention(hidden, ops.concat(both, 2), weights, layer, attention, rotation)
    out.set_friendly_name(layer)  # by which it finds the drafter's own hidden states
    results = [result("logits", weights.logits(norm(out, weights, "norm")))]
    if entry.num_proposed_tokens is not None:
        proposed = np.load(bundle.folder / entry.model.folder / PROPOSED_NAME).astype(np.int64)
        offsets = ops.constant(proposed - np.arange(len(proposed)))
        offsets.set_friendly_name("d2t")
        results.append(result("d2t", offsets))
    model = ov.Model(results, states.assigned, [token_ids, hidden_states, mask, positions, beams], "eagle3")
    model.set_rt_info("True", ["eagle3_mode"])
    model.set_rt_info(" ".join(map(str, layers)), ["hidden_layers_list"])
    return model


def _dflash(weights: HeadWeights, entry: DrafterEntry, bundle: Bundle) -> ov.Model:
    """As `outrider.models.backends.heads.block.dflash`. Only the context's keys and values are kept.

    position_ids: of the context's new tokens, and then of the block. attention_mask is not used, as all tokens see each
    other. There are no hidden states for the block's first token, which is known.
    """
    hidden_size = bundle.manifest.main.geometry.hidden_size
    hidden = parameter("inputs_embeds", _FLOAT, (-1, -1, hidden_size))
    context = parameter("hidden_states", _FLOAT, (-1, -1, weights.width("fc.weight", 1)))
    positions, mask = (parameter(each, _INT, (-1, -1)) for each in ("position_ids", "attention_mask"))
    inputs = [hidden, context, positions, mask]
    lengths = ops.concat([_length(context, 1), ints(-1)], 0)

    def parted(values: ov.Node) -> list[ov.Output]:
        """What is of the context's new tokens, and what is of the block."""
        found: list[ov.Output] = ops.variadic_split(values, ops.constant(1), lengths).outputs()
        return found

    rotation, own = Rotation.of(positions, weights), Rotation.of(parted(positions)[1], weights)
    states = _States(weights, _length(context, 0))
    projected = norm(linear(context, weights, "fc"), weights, "hidden_norm")
    for i in range(int(weights.number("num_layers"))):
        layer = f"layers.{i}"
        rows = norm(hidden, weights, f"{layer}.input_layernorm")
        every = ops.concat([projected, rows], 1)
        queries = own(heads_of(rows, weights, f"{layer}.self_attn.q", "num_heads"))
        keys = parted(rotation(heads_of(every, weights, f"{layer}.self_attn.k", "num_kv_heads")))
        values = parted(heads_of(every, weights, f"{layer}.self_attn.v", "num_kv_heads"))
        seen = [
            ops.concat([states.after_earlier(new, f"{i}.{kind}"), _by_head(block)], 2)
            for kind, (new, block) in (("key", keys), ("value", values))
        ]
        read = _attend(queries, seen[0], seen[1], weights)
        hidden = ops.add(hidden, linear(read, weights, f"{layer}.self_attn.o_proj"))
        hidden = after_feed_forward(hidden, weights, layer)
    drafted = ops.slice(norm(hidden, weights, "norm"), ints(1), ints(np.iinfo(np.int64).max), ints(1), ints(1))
    model = ov.Model([result(LAST, drafted)], states.assigned, inputs, "dflash")
    model.set_rt_info("True", ["dflash_mode"])
    model.set_rt_info(str(entry.mask_token_id), ["dflash", "mask_token_id"])
    model.set_rt_info(",".join(map(str, _layers_read(entry, bundle))), ["dflash", "target_layer_ids"])
    return model


_MAKERS: dict[str, Callable[[HeadWeights, DrafterEntry, Bundle], ov.Model]] = {"eagle3": _eagle3, "dflash": _dflash}


def _layers_read(entry: DrafterEntry, bundle: Bundle) -> list[int]:
    """The main model's layers, from 0, whose outputs a drafter reads."""
    layers = {after_layers(i + 1): i for i in range(bundle.manifest.main.geometry.num_layers)}
    if other := [each for each in entry.features if each not in layers]:
        raise ExportError(
            f"Drafter '{entry.name}' reads {other[0]!r}, and openvino-genai gives outputs of layers only."
        )
    return [layers[each] for each in entry.features]


class _States:
    """Keys and values of earlier tokens, in the model's state. beams: int32 [sequences], which of them go on."""

    def __init__(self, weights: HeadWeights, num_sequences: ov.Node, beams: ov.Node | None = None) -> None:
        self.assigned: list[Any] = []
        self._num_kv_heads, self._size = int(weights.number("num_kv_heads")), int(weights.number("head_size"))
        self._num_sequences, self._beams = num_sequences, beams

    def after_earlier(self, new: ov.Node, name: str) -> ov.Node:
        """All tokens' keys or values, float32 [sequences, heads, tokens, size]. new: [sequences, new, heads, size]."""
        info = ov.op.util.VariableInfo()
        info.data_shape = ov.PartialShape([-1, self._num_kv_heads, -1, self._size])
        info.data_type, info.variable_id = _FLOAT, f"past_key_values.{name}"
        variable = ov.op.util.Variable(info)
        shape = ops.concat([self._num_sequences, ints(self._num_kv_heads, 0, self._size)], 0)
        earlier = ov.op.read_value(ops.broadcast(ops.constant(np.float32(0)), shape), variable)
        if self._beams is not None:
            earlier = ops.gather(earlier, self._beams, ops.constant(0))
        every = ops.concat([earlier, _by_head(new)], 2)
        self.assigned.append(ov.op.assign(every, variable))
        return every


def _attend(
    queries: ov.Node, keys: ov.Node, values: ov.Node, weights: HeadWeights, mask: ov.Node | None = None
) -> ov.Node:
    """Attention, float32 [sequences, queries, heads · head_size].

    queries: [sequences, queries, heads, head_size]; keys, values: [sequences, kv heads, tokens, head_size].
    """
    num_heads, num_kv_heads = int(weights.number("num_heads")), int(weights.number("num_kv_heads"))
    size = int(weights.number("head_size"))

    def for_all_heads(each: ov.Node) -> ov.Node:
        shape = ops.concat(
            [_length(each, 0), ints(num_kv_heads, num_heads // num_kv_heads), _length(each, 2), ints(size)], 0
        )
        repeated = ops.broadcast(ops.unsqueeze(each, ints(2)), shape, "BIDIRECTIONAL")
        return ops.reshape(repeated, ints(0, num_heads, -1, size), special_zero=True)

    scale = ops.constant(np.float32(size**-0.5))
    if mask is None:
        mask = ops.constant(np.zeros((1, 1, 1, 1), dtype=np.float32))
    read = ops.scaled_dot_product_attention(_by_head(queries), for_all_heads(keys), for_all_heads(values), mask, scale)
    return ops.reshape(_by_head(read), ints(0, 0, num_heads * size), special_zero=True)


def _causal(num_new: ov.Node, num_tokens: ov.Node) -> ov.Node:
    """0 where one of the newest tokens sees a token and -65504 elsewhere, float32 [1, 1, new, tokens]."""
    new, every = (ops.squeeze(each, ints(0)) for each in (num_new, num_tokens))
    zero, one = ops.constant(np.int64(0)), ops.constant(np.int64(1))
    seeing = ops.unsqueeze(ops.range(ops.subtract(every, new), every, one, "i64"), ints(1))
    seen = ops.unsqueeze(ops.range(zero, every, one, "i64"), ints(0))
    hidden = ops.constant(np.float32(np.finfo(np.float16).min))
    mask = ops.select(ops.less_equal(seen, seeing), ops.constant(np.float32(0)), hidden)
    return ops.unsqueeze(mask, ints(0, 1))


def _by_head(values: ov.Node) -> ov.Node:
    """[sequences, tokens, heads, size] as [sequences, heads, tokens, size], or back."""
    return ops.transpose(values, ints(0, 2, 1, 3))


def _length(values: ov.Node, axis: int) -> ov.Node:
    """The length of an axis, int64 [1]."""
    return ops.gather(ops.shape_of(values, "i64"), ints(axis), ops.constant(0))


if __name__ == "__main__":
    if len(sys.argv) != 4:
        raise SystemExit(__doc__)
    write_for_genai(read_bundle(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
