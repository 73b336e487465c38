"""Random assistants of Gemma 4, in their published format, and what Transformers' layers draft with them."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

LAYERS = ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"]
NUM_CENTROIDS, NUM_ACTIVE = 56, 5
_OWNERS = ["sliding_attention", "full_attention"]  # layers that only stand for the main model's


def config_of(main: Any, *, ordered: bool) -> dict[str, Any]:
    """The content of config.json, for a main model of Transformers. ordered: whether tokens are in clusters."""
    text = main.config.to_dict()
    shared = (
        "num_attention_heads", "num_key_value_heads", "num_global_key_value_heads", "attention_k_eq_v", "head_dim",
        "global_head_dim", "sliding_window", "vocab_size", "max_position_embeddings", "rms_norm_eps", "rope_parameters",
    )  # fmt: skip
    own = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_kv_shared_layers": 4}
    return {
        "architectures": ["Gemma4AssistantForCausalLM"],
        "model_type": "gemma4_assistant",
        "backbone_hidden_size": text["hidden_size"],
        "use_ordered_embeddings": ordered,
        "num_centroids": NUM_CENTROIDS,
        "centroid_intermediate_top_k": NUM_ACTIVE,
        "text_config": {
            **{name: text[name] for name in shared},
            **own,
            "model_type": "gemma4_text",
            "layer_types": LAYERS,
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 0,
            "hidden_activation": "gelu_pytorch_tanh",
        },
    }


class Assistant:
    """An assistant made of Transformers' decoder layers, all of which read the keys and values of others.

    Source: Transformers 5.6, `Gemma4AssistantForCausalLM` and `SinglePositionMultiTokenCandidateGenerator`, whose
    classes 5.5 does not have.
    """

    def __init__(self, config: dict[str, Any], seed: int = 0) -> None:
        import torch
        from transformers import Gemma4TextConfig
        from transformers.models.gemma4.modeling_gemma4 import Gemma4TextModel

        self.config = config
        text = config["text_config"]
        count = len(_OWNERS) + len(LAYERS)
        own = text | {"layer_types": _OWNERS + LAYERS, "num_hidden_layers": count, "num_kv_shared_layers": len(LAYERS)}
        made = Gemma4TextConfig(**own, attn_implementation="eager")
        torch.manual_seed(seed)
        self.model = Gemma4TextModel(made).float().eval()
        hidden, backbone = text["hidden_size"], config["backbone_hidden_size"]
        self.pre, self.post = torch.randn(hidden, 2 * backbone) / backbone**0.5, torch.randn(backbone, hidden) / 4
        self.centroids = torch.randn(NUM_CENTROIDS, hidden)
        self.order = torch.randperm(text["vocab_size"])
        for name, parameter in self.model.named_parameters():
            parameter.data = torch.randn_like(parameter) * (0.15 if parameter.ndim > 1 else 0.2)
            parameter.data += "norm" in name
        for layer in self.model.layers:
            layer.layer_scalar += 0.3 * torch.randn(1)

    @property
    def tensors(self) -> dict[str, Any]:
        """By their published names."""
        made = {"pre_projection.weight": self.pre, "post_projection.weight": self.post}
        if self.config["use_ordered_embeddings"]:
            made |= {"masked_embedding.centroids.weight": self.centroids, "masked_embedding.token_ordering": self.order}
        for name, values in self.model.state_dict().items():
            parts = name.split(".")
            if parts[0] == "layers":
                parts[1] = str(int(parts[1]) - len(_OWNERS))
            if parts[0] in ("norm", "embed_tokens") or (parts[0] == "layers" and int(parts[1]) >= 0):
                made["model." + ".".join(parts)] = values
        return {name: values.detach().contiguous().numpy() for name, values in made.items()}

    def draft(self, main: Any, token_ids: Sequence[int], count: int, num_tokens: int) -> tuple[list[int], list[float]]:
        """Draft tokens for the text `token_ids`, and their probabilities, among the first `num_tokens`."""
        import torch

        seen: dict[str, Any] = {}

        def keep(_: Any, __: Any, options: dict[str, Any]) -> None:
            seen.update(options["shared_kv_states"])

        shared: dict[Any, Any] = {}
        hook = main.model.layers[-1].register_forward_hook(
            lambda _, __, options, ___: shared.update(options["shared_kv_states"]), with_kwargs=True
        )
        with torch.no_grad():
            states = main(torch.tensor([[*token_ids[:-1]]]), output_hidden_states=True).hidden_states[-1][:, -1:]
            hook.remove()
            caches = {main.config.layer_types[i]: both for i, both in shared.items()}
            cached = {i: caches[kind] for i, kind in enumerate(_OWNERS)}
            place, newest, made, chances = len(token_ids) - 1, token_ids[-1], [], []
            ages = place - torch.arange(place)
            sees = {
                "full_attention": ages > 0,
                "sliding_attention": ages < self.config["text_config"]["sliding_window"],
            }
            for _ in range(count):
                row = torch.cat([main.model.embed_tokens(torch.tensor([[newest]])), states], -1) @ self.pre.T
                for kind, layer in zip(LAYERS, self.model.layers[len(_OWNERS) :], strict=True):
                    angles = self.model.rotary_emb(row, torch.tensor([[place]]), kind)
                    mask = torch.where(sees[kind], 0.0, -torch.inf)[None, None, None]
                    row = layer(
                        row, None, shared_kv_states=cached, position_embeddings=angles, attention_mask=mask,
                    )  # fmt: skip
                row = self.model.norm(row)
                logits = self._logits(row[0, 0])[:num_tokens]
                newest, states = int(logits.argmax()), row @ self.post.T
                made.append(newest)
                chances.append(float(logits.softmax(-1)[newest]))
        return made, chances

    def _logits(self, row: Any) -> Any:
        import torch

        logits = self.model.embed_tokens.weight @ row
        if not self.config["use_ordered_embeddings"]:
            return logits
        clusters = self.order.view(NUM_CENTROIDS, -1)[(self.centroids @ row).topk(NUM_ACTIVE).indices].flatten()
        made = torch.full_like(logits, -torch.inf)
        made[clusters] = logits[clusters]
        return made


def write_assistant(folder: Path, assistant: Assistant, tensors: dict[str, Any] | None = None, **changes: Any) -> Path:
    """Write a checkpoint folder. changes: of config.json, or of its part for text."""
    from safetensors.numpy import save_file

    folder.mkdir(parents=True, exist_ok=True)
    save_file(assistant.tensors if tensors is None else tensors, folder / "model.safetensors")
    config = assistant.config
    text = config["text_config"]
    config = config | {
        "text_config": text | {name: value for name, value in changes.items() if name not in config},
        **{name: value for name, value in changes.items() if name in config},
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder
