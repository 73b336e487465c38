"""Parts that drafter heads are made of: norms, rotary attention, gated MLPs; and what they take from the main model.

Shapes: B rows, T tokens, h hidden size, H heads, K key-value heads, d head size. Weights are float32.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.nn import functional

from outrider.errors import ExportError

NUM_LAYERS = 2  # of the main model's last layers, which heads start from

if TYPE_CHECKING:

    class Module:
        """torch.nn.Module, which has no types here."""

        def __init__(self) -> None: ...
        def __call__(self, *args: Any) -> Any:
            """As forward."""

        def __getattr__(self, name: str) -> Any: ...
        def __setattr__(self, name: str, value: object) -> None: ...

else:
    from torch.nn import Module


class Shape(NamedTuple):
    """Sizes of a main model, which its heads share."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    vocab_size: int
    num_layers: int
    context_length: int
    norm_epsilon: float
    rope_theta: float

    @staticmethod
    def of(config: dict[str, Any]) -> Shape:
        """The shape in a Hugging Face config.json, of a main model or of a head."""
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind != "default":
            raise ExportError(f"rope_type={kind!r} is not supported in drafter heads: only 'default' is.")
        try:
            num_heads = config["num_attention_heads"]
            return Shape(
                hidden_size=config["hidden_size"],
                intermediate_size=config["intermediate_size"],
                num_heads=num_heads,
                num_kv_heads=config.get("num_key_value_heads") or num_heads,
                head_size=config.get("head_dim") or config["hidden_size"] // num_heads,
                vocab_size=config["vocab_size"],
                num_layers=config["num_hidden_layers"],
                context_length=config["max_position_embeddings"],
                norm_epsilon=config["rms_norm_eps"],
                rope_theta=rope.get("rope_theta") or config.get("rope_theta") or 10000.0,
            )
        except KeyError as missing:
            raise ExportError(
                f"config.json lacks {missing}: heads are for models in the layout of Llama or Qwen."
            ) from missing

    def to_config(self) -> dict[str, Any]:
        """The same in the keys of config.json."""
        return {
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_size,
            "vocab_size": self.vocab_size,
            "max_position_embeddings": self.context_length,
            "rms_norm_eps": self.norm_epsilon,
            "rope_theta": self.rope_theta,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
        }


class RMSNorm(Module):
    """x / rms(x) * weight."""

    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(size))
        self.epsilon = epsilon

    def forward(self, x: Any) -> Any:
        """[..., size] to [..., size]."""
        return functional.rms_norm(x, (x.shape[-1],), self.weight.to(x.dtype), self.epsilon)


class MLP(Module):
    """down(silu(gate(x)) * up(x)), no biases."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = linear(shape.hidden_size, shape.intermediate_size)
        self.up_proj = linear(shape.hidden_size, shape.intermediate_size)
        self.down_proj = linear(shape.intermediate_size, shape.hidden_size)

    def forward(self, x: Any) -> Any:
        """[..., h] to [..., h]."""
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Attention(Module):
    """Grouped-query attention with rotary positions: the projections, and what happens between them."""

    def __init__(self, shape: Shape, input_size: int) -> None:
        super().__init__()
        self.shape = shape
        self.q_proj = linear(input_size, shape.num_heads * shape.head_size)
        self.k_proj = linear(input_size, shape.num_kv_heads * shape.head_size)
        self.v_proj = linear(input_size, shape.num_kv_heads * shape.head_size)
        self.o_proj = linear(shape.num_heads * shape.head_size, shape.hidden_size)

    def queries(self, x: Any, positions: Any) -> Any:
        """x [B, T, input], positions int64 [T] or [B, T]. Returns [B, H, T, d]."""
        q = self.q_proj(x).unflatten(-1, (-1, self.shape.head_size))
        return rotate(q.transpose(1, 2), positions, self.shape.rope_theta)

    def keys_values(self, x: Any, positions: Any) -> tuple[Any, Any]:
        """As `queries`: keys and values, [B, K, T, d] each."""
        k = self.k_proj(x).unflatten(-1, (-1, self.shape.head_size))
        v = self.v_proj(x).unflatten(-1, (-1, self.shape.head_size)).transpose(1, 2)
        return rotate(k.transpose(1, 2), positions, self.shape.rope_theta), v

    def attend(self, q: Any, k: Any, v: Any, mask: Any) -> Any:
        """q [B, H, T, d], k and v [B, K, S, d], mask bool [.., T, S] where True is seen. Returns [B, T, h]."""
        repeats = self.shape.num_heads // self.shape.num_kv_heads
        k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
        found = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.o_proj(found.transpose(1, 2).flatten(2))


def rotate(x: Any, positions: Any, theta: float) -> Any:
    """x [B, heads, T, d] turned by its positions, int64 [T] or [B, T]; halves of d belong together, as in Llama."""
    return turn(x, *turns(positions, x.shape[-1], theta))


def turns(positions: Any, head_size: int, theta: float) -> tuple[Any, Any]:
    """Cosines and sines by which `turn` turns: float32 [T, d / 2], or [B, 1, T, d / 2] for positions [B, T]."""
    half = head_size // 2
    frequencies = theta ** (-torch.arange(half, dtype=torch.float32, device=positions.device) / half)
    angles = positions.unsqueeze(-1).float() * frequencies
    if angles.dim() == 3:
        angles = angles.unsqueeze(1)
    return angles.cos(), angles.sin()


def turn(x: Any, cos: Any, sin: Any) -> Any:
    """See `rotate`."""
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def linear(size_in: int, size_out: int, *, bias: bool = False) -> Any:
    """A linear layer with small normal weights, as Llama's own."""
    layer = torch.nn.Linear(size_in, size_out, bias=bias)
    torch.nn.init.normal_(layer.weight, std=0.02)
    if bias:
        torch.nn.init.zeros_(layer.bias)
    return layer


class Teacher(NamedTuple):
    """The frozen main model, as far as training needs it."""

    shape: Shape
    embedding: Any  # [vocab, h]
    lm_head: Any  # [vocab, h]
    norm: Any  # [h]: the final norm's weights
    layers: list[dict[str, Any]]  # weights by name of the last decoder layers, the very last at the end
    num_tokens: int  # of the vocabulary; the matrices may have more rows, for tokens that there are not

    @staticmethod
    def of(model: Any) -> Teacher:
        """Of a transformers model of the layout of Llama."""
        return Teacher(
            Shape.of(model.config.to_dict()),
            model.get_input_embeddings().weight.detach(),
            model.get_output_embeddings().weight.detach(),
            model.model.norm.weight.detach(),
            [dict(layer.named_parameters()) for layer in model.model.layers[-NUM_LAYERS:]],
            model.config.vocab_size,
        )


def copy_layer(target: Any, weights: dict[str, Any]) -> None:
    """Start a head's layer from one of the main model's, where tensors have the same names.

    With little data that is worth much: the layer already lives in the space of the embedding and the output matrix. An
    input twice as wide (embedding beside hidden) gets the weights in its second half.
    """
    with torch.no_grad():
        for name, parameter in target.named_parameters():
            weight = weights.get(name)
            if weight is None:
                continue
            if parameter.shape == weight.shape:
                parameter.copy_(weight)
            elif parameter.dim() == 2 and parameter.shape == (weight.shape[0], 2 * weight.shape[1]):
                parameter[:, weight.shape[1] :] = weight


def as_causal_mask(num_queries: int, num_keys: int, device: Any = None) -> Any:
    """bool [num_queries, num_keys]: the last query sees all keys, each before it one less."""
    return torch.ones(num_queries, num_keys, dtype=torch.bool, device=device).tril(num_keys - num_queries)
