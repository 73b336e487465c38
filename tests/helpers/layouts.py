"""Files of checkpoints as they were published from 2019 to 2026, without weights: `layouts.jsonl` has one a line.

    layout = LAYOUTS["llama-2-7b-chat"]
    write_configs(layout, folder)

The keys of config.json, tokenizer.json and its companions, how special tokens and templates are given, and
generation_config.json follow the publishers' files, rewritten by hand. Sizes do not.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from layout_tokenizers import text_of

CONTEXT = 512
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}[{{ message['role'] }}] {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
_SLOTS = "bos", "eos", "pad", "unk"


@dataclass(frozen=True)
class Layout:
    """A published model.

    family: of `layout_tokenizers.FAMILIES`. config: its config.json without what follows from the tokenizer. bos, eos,
    pad, unk: special tokens; "" for none. form: how tokenizer_config.json gives them: "texts", "objects"
    (`AddedToken`), or "none". decoder: whether it lists `added_tokens_decoder`. template: "", "text", "list" (named
    ones), "file" (chat_template.jinja), or "both". files: "json" (tokenizer.json), "vocab" (vocab.json and merges.txt),
    or "model" (tokenizer.model). generation: generation_config.json is "absent", or it and config.json have "one" eos
    id or a "list" with more_eos. whole: the class of a model that reads images, of which this is the text part.
    needs_torch: the architecture that is named where PyTorch is not there. refused: what is said otherwise.
    """

    name: str
    family: str
    config: dict[str, Any]
    bos: str = ""
    eos: str = ""
    pad: str = ""
    unk: str = ""
    form: str = "texts"
    decoder: bool = True
    map: bool = True
    template: str = ""
    files: str = "json"
    generation: str = "one"
    more_eos: tuple[str, ...] = ()
    whole: str = ""
    needs_torch: str = ""
    refused: str = ""


_LINES = Path(__file__).with_suffix(".jsonl").read_text(encoding="utf-8").splitlines()
LAYOUTS = {each.name: each for each in (Layout(**json.loads(line)) for line in _LINES)}
DIRECT = [name for name, each in LAYOUTS.items() if not (each.refused or each.needs_torch)]


def config_of(layout: Layout) -> dict[str, Any]:
    """Its config.json."""
    tokenizer = json.loads(text_of(layout.family))
    ids = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    pieces = tokenizer["model"]["vocab"]
    size = 1 + max([*ids.values(), *(pieces.values() if isinstance(pieces, dict) else range(len(pieces)))])
    config = layout.config | {"vocab_size": -(-size // 64) * 64}
    if "vocab_size_per_layer_input" in config:  # published files have fewer; Transformers' text classes read no others
        config["vocab_size_per_layer_input"] = config["vocab_size"]
    eos = [ids[token] for token in (layout.eos, *layout.more_eos) if token]
    config |= {f"{slot}_token_id": ids[getattr(layout, slot)] for slot in ("bos", "pad") if getattr(layout, slot)}
    if eos:
        config["eos_token_id"] = eos if layout.generation == "list" else eos[0]
    return config


def write_configs(layout: Layout, folder: Path) -> Path:
    """All files but the weights."""
    folder.mkdir(parents=True, exist_ok=True)
    config = config_of(layout)
    _save(folder / "config.json", _around(layout, config) if layout.whole else config)
    if layout.generation != "absent":
        eos = {"eos_token_id": config["eos_token_id"]} if "eos_token_id" in config else {}
        _save(folder / "generation_config.json", {"_from_model_config": True, **eos})
    _write_tokenizer(layout, folder)
    return folder


def _around(layout: Layout, config: dict[str, Any]) -> dict[str, Any]:
    """The config.json of a model that reads images, with that of its text part."""
    vision = {"hidden_size": 32, "model_type": "vision", "num_hidden_layers": 1}
    return {"architectures": [layout.whole], "text_config": config, "vision_config": vision}


def _write_tokenizer(layout: Layout, folder: Path) -> None:
    text = text_of(layout.family)
    content = json.loads(text)
    if layout.files == "json":
        (folder / "tokenizer.json").write_text(text, encoding="utf-8")
    elif layout.files == "vocab":
        added = {token["content"]: token["id"] for token in content["added_tokens"]}
        merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in content["model"]["merges"]]
        _save(folder / "vocab.json", content["model"]["vocab"] | added)
        (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]) + "\n", encoding="utf-8")
    else:
        (folder / "tokenizer.model").write_bytes(b"\n\x0c\n\x05<unk>")
    plain = {"lstrip": False, "normalized": layout.form == "objects", "rstrip": False, "single_word": False}
    named = {f"{slot}_token": getattr(layout, slot) for slot in _SLOTS if getattr(layout, slot)}
    objects = {key: {"__type": "AddedToken", "content": token, **plain} for key, token in named.items()}
    config: dict[str, Any] = {"model_max_length": CONTEXT, "tokenizer_class": _CLASSES.get(layout.family, _FAST)}
    config |= {"texts": named, "objects": objects, "none": {}}[layout.form]
    if layout.decoder:
        config["added_tokens_decoder"] = {
            str(token["id"]): {key: value for key, value in token.items() if key != "id"}
            for token in content["added_tokens"]
        }
    other = TEMPLATE.replace("assistant", "stale")
    if layout.template in ("text", "both"):
        config["chat_template"] = TEMPLATE if layout.template == "text" else other
    elif layout.template == "list":
        config["chat_template"] = [
            {"name": "default", "template": TEMPLATE}, {"name": "tool_use", "template": other},
        ]  # fmt: skip
    if layout.template in ("file", "both"):
        (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    _save(folder / "tokenizer_config.json", config)
    if layout.map:
        plainer = {
            key: {name: each for name, each in value.items() if name != "__type"} for key, value in objects.items()
        }
        _save(folder / "special_tokens_map.json", plainer if layout.form == "objects" else named)


_FAST = "PreTrainedTokenizerFast"
_CLASSES = {"llama2": "LlamaTokenizer", "gpt2-old": "GPT2Tokenizer", "opt": "GPT2Tokenizer", "qwen": "Qwen2Tokenizer"}


def _save(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
