"""Writes the pages that repeat what the code says: options.md from `outrider.config`, commands.md from the commands,
models.md from the architectures that are tried, api.md from public docstrings, index.md from the README.

    python docs/generate.py             # after a change to an option or to a command's help
    python docs/generate.py --check     # exit code 1 if a page is not what this script would write
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import re
import sys
from pathlib import Path
from typing import Any

import click

from outrider import cli
from outrider.bundle.architectures import PEERS, REFUSED
from outrider.cli.options import generation_options, load_options
from outrider.config import DeviceConfig, GenerationConfig, SchedulerConfig
from outrider.config.files import find_presets
from outrider.config.option import options_of
from outrider_export.describe.architectures import ARCHITECTURES
from outrider_export.direct.archs import ARCHS

DOCS = Path(__file__).parent
WIDTH = 100  # of help text

SECTIONS = {
    "generation": (
        GenerationConfig,
        "How one request is decoded. These are keywords of `generate` and `stream`. Given to `outrider.load`, they are "
        "the engine's defaults.",
    ),
    "scheduler": (SchedulerConfig, "How memory and calls are shared. These are keywords of `outrider.load`."),
    "device": (DeviceConfig, "Where the models run and how they are compiled. These are keywords of `outrider.load`."),
}

OPTIONS_HEAD = """\
# Options

<!-- Made by docs/generate.py from runtime/outrider/config. Change the descriptions there, and run the script. -->

All options have the same name in Python, in TOML files and on the command line, where `_` becomes `-`:

```python
import outrider

engine = outrider.load("my-pair", config="cpu", cache_size=1.5, temperature=0.7)
engine.generate("Why is the sky blue?", max_new_tokens=200, seed=1)
```

```bash
outrider generate my-pair "Why is the sky blue?" --config gpu --cache-size 1.5 --temperature 0.7 --seed 1
```

```toml
[generation]
temperature = 0.7
drafter = "none"   # TOML has no null

[scheduler]
cache_size = 1.5

[device]
main_device = "GPU"
```

A preset or a TOML file comes first (`config=`, `--config`); keywords win over it. Values are checked when they are
set. An unknown name fails with the nearest known one.
"""

COMMANDS_HEAD = """\
# Commands

<!-- Made by docs/generate.py from the commands' own help. Change it there, and run the script. -->

Every command has `--help`, and all but `chat` have `--json` for one machine-readable object.
Errors are one line. The exit code is 0 for success, 1 for a failure, 2 for wrong usage and 130 for Ctrl-C.
"""


MODELS_HEAD = """\
# Models

<!-- Made by docs/generate.py from describe/architectures.py. Change it there, and run the script. -->

A main model or a draft model has to be a decoder that keeps keys and values of a text, of which rejected draft tokens
can be dropped, or states that OpenVINO pages (short convolutions, gated delta nets, Mamba-2). `config.json` names the
architecture as `model_type`. [T5, MarianMT and Whisper](encoder-decoder.md) have a page of their own.

The slow tests export and run a small model with random weights of each architecture in this table
(`tests/export/test_architectures.py`, Transformers 5.5, optimum-intel 2.2, OpenVINO 2026.4). Its logits are those of
Transformers in float32 (cosine of every row above 0.9999, with texts six times as long as the sliding window), and
so is its greedy text. With drafts from copies and from a draft model of the same architecture, greedy and sampled
texts are those of plain decoding, also after rejected drafts beyond the sliding window and with cached prefixes.

- *Without PyTorch*: what the plain installation converts to OpenVINO ([export](export.md#without-pytorch)). GGUF
  files of Mistral name the architecture `llama`.
- *Bit-exact*: in f32 on a CPU, each row has the same bits however the text is divided into calls. This is measured
  again on each machine ([exactness](exactness.md)).
- *Copies* are the drafters `suffix` and `ngram`. *Heads* are the [drafters that read hidden states](drafters.md):
  they need a graph in which Outrider finds these states.

Models with sliding windows are not supported in ONNX: ONNX Runtime's attention needs a cache as long as the window,
and the bits of its rows depend on the number of rows. Sliding windows and mixtures of experts were not tried on GPU
and NPU.

"""

MODELS_TAIL = """\

A published checkpoint may still differ from what was tested. `outrider verify my-pair --against CHECKPOINT` compares
a bundle with its own checkpoint.

What a row lacks, and what has it (llama.cpp's `src/llama-arch.cpp`, vLLM's model registry):

| lacks | architectures | why | what has it |
|---|---|---|---|
| conversion without PyTorch | {with_torch} | position biases, learned positions, attention beside the feed-forward part, or another activation, which the conversion's table of parts does not have; with `.[export]` they are converted | llama.cpp from GGUF files, but `gptj`, `opt` and `persimmon`, which vLLM runs |
| GGUF files | {without_gguf} | nobody wrote down how their GGUF files name and order tensors | llama.cpp has `afmoe`, `hy_v3`, `olmo` and `stablelm`, and converts Solar Open |
| heads | {without_heads} | hidden states are not found in their graphs: other norms, several residual streams, or parts that are numbered on their own | none of these has published heads that we know of |
| ONNX | all whose formats are OpenVINO alone | sliding windows, states, experts or gates, as above | onnxruntime-genai has some with windows and experts |

## File layouts

Published files differ more than architectures do. The tests write small checkpoints in the layouts of {num_layouts}
models (`tests/helpers/layouts.py`): the keys of `config.json`, the tokenizer's files, templates, shards and number types
follow the publishers', rewritten by hand; vocabularies are small, weights are random. Each tokenizer is compared with
the `tokenizers` library, encoding and decoding, and each exported model with Transformers, which reads the same files.

| year | layouts | without PyTorch |
|---|---|---|
{layouts}

Tokenizers are read in old and new spellings: merges as texts, no `byte_fallback` or `fuse_unk`, `add_prefix_space`
for `prepend_scheme`, `legacy=false`, `AddedToken` objects. They are converted and checked before weights are read. Of
Whisper's, only the decoding has to agree. A chat template may be a text, a list with names ("default" is taken), or
`chat_template.jinja`, which wins over the others.

## Architectures that are not in the table

If optimum-intel can export an architecture that is not in the table, Outrider compares the converted model with the
checkpoint on a random text, and refuses it if they differ. This is necessary because OpenVINO finds attention by the
pattern of the graph, and silently drops masks that it does not recognise. A bundle records the sliding window of
each layer; a graph with other windows is refused at load.

These architectures are refused before weights are downloaded or packages asked for, and again at load:

| architectures | why | what runs them |
|---|---|---|
{refused}

These have no entry. `outrider inspect CONFIG.json` says what one would need; [a new architecture](new-architecture.md)
is how to write it:

| architectures | models | what an entry would need | what runs them |
|---|---|---|---|
| `apertus` (in the table through PyTorch), `apertus1p5` | Apertus without PyTorch, 1.5 | xIELU, whose two numbers each layer has of its own | llama.cpp |
| `bailing_moe`, `mimo` | Ling and Ring 1.x, MiMo 7B | code in Transformers by which it could be judged | llama.cpp, vLLM |
| `falcon`, `gpt_neox`, `gpt2` without PyTorch | Falcon 7B, Pythia, GPT-2 | a norm for each of attention and feed-forward part beside each other; learned positions | llama.cpp |
| `flint`, `kolibri1`, `lara_mini` | Flint, Kolibri 1, Lara 4 Mini | a bias of experts before the sigmoid; weights that are divided by their sum alone | Transformers |
| `jais2`, `nanochat` | Jais 2, nanochat | a bias of norms with squared ReLU; norms without weights | llama.cpp, Transformers |
| `laguna` | Laguna XS.2 | numbers of heads by layer, and a gate that is a softplus | llama.cpp |
| `mimo_v2_flash`, `step3p7`, `muse_spark_text` | MiMo V2 Flash, Step 3.7 Flash, Muse Spark | values of another size than keys, limits of gates, experts of another width than the layer | llama.cpp, Transformers |
| `minicpm`, `minicpm3` | MiniCPM 1, 3 | factors by depth (`scale_depth`), beside latent attention | llama.cpp |
| `axk1`, `mistral4`, `sarvam_mla` | A.X K1, Mistral Small 4, Sarvam 105B | entries with latent attention that nobody has tried; growing queries beside it | llama.cpp, Transformers |

Their publishers' code is exported with `.[export]` and `--trust-remote-code` if optimum-intel knows it, and is compared as
above.

## Layers with a state

A layer with a state (short convolution, gated delta net, Mamba-2) has no keys and values of which a rejected draft
could be dropped. OpenVINO 2026.4 stores such a state after each token of a call (`PagedCausalConv1D`,
`PagedGatedDeltaNet`, `PagedSelectiveSSM`). It recognises these layers by the form of the graph, so they are converted
without PyTorch only. A graph is refused if a state is not paged, if something else is stored in one than OpenVINO's
operators store, or if its layers have other states than the manifest says. ONNX Runtime has no such stores.

OpenVINO gives a model a paged cache only if it has attention in at least one layer ("No ScaledDotProductAttention
operation observed in the graph"), so models of Mamba-2 alone (`mamba2`) are refused.

What was compared with Transformers in float32, with random weights (`tests/export/test_direct.py`):

| architectures | states | compared |
|---|---|---|
| `lfm2`, `lfm2_moe`, `lfm3` | short convolution | logits of a text in two calls, from checkpoints and (not LFM3) from GGUF files: within 5e-6 of the largest; 200 greedy tokens, one a call, from a checkpoint or from a GGUF file |
| `qwen3_5_text`, `qwen3_5_moe_text`, `qwen3_next` | gated delta net, convolution | the same (Qwen3.5 within 1e-5); each draft of Qwen3.5's MTP module |
| `granitemoehybrid`, `nemotron_h` | Mamba-2, convolution | the same as for `lfm2` |

Each graph has as many paged operators of each kind as the model has layers of it. `outrider verify` compares states that
are read in pieces, and drafts that are rejected at every place, on your machine.

What calls cost, in int8 and f32, with random weights in published shapes, after 200 tokens, on two idle cores of an AMD EPYC
with AVX-512 VNNI (`python bench/scripts/hybrid_costs.py FOLDER TOKENIZER`, OpenVINO 2026.4.1): as multiples of a call of one
row, with the states after each row stored, and in brackets as multiples of the same rows of which only the last state is
stored. The last column is the memory that three sequences add to the process, and what the cache counts of it.

| shape | one row | 2 | 3 | 4 | 8 | 16 | bytes of a row of states | memory / counted |
|---|---|---|---|---|---|---|---|---|
| LFM2.5-1.2B | 30.7 ms (1.00) | 1.01 (1.00) | 1.03 (1.00) | 1.07 (1.01) | 1.17 (1.00) | 1.49 (1.02) | 245,760 | 23 / 24 MB |
| Qwen3.5-0.8B | 28.9 ms (1.00) | 1.23 (1.02) | 1.47 (1.04) | 1.68 (1.08) | 2.48 (1.11) | 4.34 (1.18) | 20,643,840 | 635 / 636 MB |
| Qwen3.5-2B | 41.8 ms (1.00) | 1.18 (1.01) | 1.55 (1.03) | 1.72 (1.04) | 2.32 (1.07) | 3.71 (1.09) | 20,643,840 | 635 / 636 MB |
| Granite-4.0-H-1B | 50.9 ms (1.00) | 1.00 (1.03) | 1.10 (1.05) | 1.21 (1.08) | 1.61 (1.13) | 2.52 (1.17) | 58,540,032 | 1416 / 1416 MB |

Activations were quantised in groups of 128. At 8 rows, storing costs 13 % at most; what several rows cost is what a gated
delta net or Mamba-2 takes for each. [Benchmarks](benchmarks.md#models-with-states) compares plain decoding with
openvino-genai's.

Kimi-Linear's layers forget each number of a key at a rate of its own; `PagedGatedDeltaNet` has one rate for each head.

Nemotron-H numbers what mixes tokens and feed-forward parts each on their own. Here, a layer is one of the former with
the feed-forward part after it, so `outrider inspect` shows fewer layers than `config.json` has. The experts of Nemotron 3
Nano (`E` in `hybrid_override_pattern`, `nemotron_h_moe` in GGUF files) have no gate, down(ReLU(up)²), and OpenVINO computes
the chosen experts alone only where there is one. So up is multiplied with SiLU(4096 · up) / 4096, which is ReLU(up)² but
for 3e-8; a call reads the matrix up of an expert twice, and slices do not choose the form of its weights. Nemotron 3
Super's experts, which read a shorter row (`moe_latent_size`), are refused. Nemotron-H's text was compared with Transformers'
with the limits of time steps of `time_step_limit`, as in NVIDIA's kernels; Transformers without these kernels takes
`time_step_min` as the least, and differs from its own text token by token beyond `chunk_size` tokens.

GGUF files of Granite 4.0 that have attention in all layers name the architecture `granite`.

## Models that read images, as text models

Checkpoints of EXAONE 4.5, Gemma 3n, Llama 4 and Muse Glimmer read images: their text part is converted, and the bundle
reads text only. [Images](vision.md#the-export) lists the models whose images are read, and what stands in the way of
others. Checkpoints in FP8, such as Ministral 3's, are read with their scales.

## Gemma 4

E2B, E4B, 12B, 31B and 26B-A4B, from checkpoints and GGUF files (`gemma4`). Checkpoints read [images](vision.md), too,
and GGUF files text only; nothing reads their sounds. The 12B's classes have names of their own (`gemma4_unified`); its
text part is read as the 31B's, and its images need no encoder: a square of 48 pixels becomes a token by itself.

- **Layers differ.** Layers with full attention have heads of 512 numbers and fewer of them, those with a sliding window
  have 256. Each layer has a cache of its own size, and of the last 20 layers of E2B and 18 of E4B none has any: they
  read the cache of the last layer of their kind before them. A token takes 9,216 numbers in E2B and 28,672 in E4B
  (37 and 115 kB in f32), where 21,504 and 50,176 would be needed if each layer had its own. Layers with a window keep
  the keys of the whole text: the window limits what they read.
- **Embeddings by layer.** Half of E2B's 4.6 billion weights, and 2.8 of E4B's 7.5, are embeddings that each layer has
  of its own. They are stored in 8 bits, with a scale for each token and layer, and are looked up there: of this part
  of the mapped file, only rows of tokens that occur are in memory.
- Logits are within float error of Transformers' in float32, with and without shared keys, embeddings by layer and
  experts. Queries are not scaled down before the softmax, so errors of any rounding are larger than elsewhere.
- A LoRA adapter can be merged into such a model, and cannot be attached to it. ONNX Runtime does not run it.
- Google's [assistants](drafters.md#gemma-4s-assistants) draft for it, and DSpark drafters.

## Gemma 3n

E2B and E4B, from checkpoints and GGUF files (`gemma3n`): the text part, as of Gemma 4. Each token has four residual
streams (AltUp), of which a layer computes one, and small matrices that are not rounded predict and correct the others.
The first ten layers let pass the largest 5 % of their gates' numbers. Of the last 15 layers of E4B and 10 of E2B none
has keys and values. Tokens of images and sounds, which have no embeddings by layer, have those of token 0, as in
Transformers. Heads do not read such a model, and a LoRA adapter can be merged into it but not attached.

## Llama 4

Scout and Maverick, from checkpoints and GGUF files (`llama4`): the text part. Three of four layers attend within chunks
of 8,192 tokens, and a paged cache supports only sliding windows. Within the first chunk both are full attention, so
**the context ends there**: the export says so, and `outrider inspect` shows the length. The other layers do not rotate,
and their queries grow with the position. One expert of a token is computed beside the shared one, and what it reads is
scaled. Models without chunks (MobileLLM-R1) have their whole context, from checkpoints.

## Latent attention

DeepSeek V2, V3 and those that are built like them (Moonlight), GLM-4.7-Flash and Youtu-LLM make keys and values of a
short row of each token (MLA). They are converted from checkpoints and from GGUF files (`deepseek2`), old and new ones.

- **The cache holds whole keys and values**, because OpenVINO's paged attention has no other form; they have different
  sizes. A token takes 138,240 numbers in DeepSeek V2-Lite and in Moonlight (553 kB in f32), where the short rows would
  be 15,552; 163,840 in Youtu-LLM 2B (655 kB); 481,280 in GLM-4.7-Flash (1.9 MB).
- DeepSeek V2's products of queries and keys are scaled for YaRN as in its publishers' code and in llama.cpp.
  Transformers does so after 5.5 only, so `outrider verify --against` may differ from an older one.
- Experts that are chosen in groups (V2's by the best expert of a group, V3's by the two best) are computed so. A layer
  of prediction (MTP) after the last one is left out. So it is of GLM-4.5 to 4.7 and dots.llm1, whose experts are the
  same beside an attention with keys and values of its own.
- A LoRA adapter can be merged into such a model, and cannot be attached to it. ONNX Runtime does not run it, and
  the form of its weights is not chosen by slices.

## LongRoPE

Phi 3.5, Phi 4 mini and others use one set of rotary frequencies up to a length, such as 4,096 tokens, and another
set if any position of a call is beyond that length. A draft beyond that length would change the rows before it, and so
would another request in the same call. Outrider therefore takes the set by a text's final length, which is known when
it begins: the prompt's tokens and `max_new_tokens`. A text that may become longer than the first length is read with
the second set from its first token on. Each row of a call says which set it has, so texts of both share calls.

- Texts are those of plain decoding with the same set, on both sides, with drafts and without. Their logits are those of
  Transformers for a text of that length. Transformers' own `generate` changes the set in the middle of an answer that
  passes the length, and keeps the keys of the first one.
- Keys of the two sets differ, so they are kept apart in the prefix cache and the prefix store. A conversation that
  passes the length is read once again, which `num_cached_tokens` of its answer shows.
- A smaller `max_new_tokens` keeps a text on the first set. `outrider inspect` shows the length.
- GGUF files need both sets of factors for this. Without the second, with PyTorch, in ONNX and on an NPU, the context
  ends at the first length.

## Sizes

Calculated by `python bench/scripts/family_sizes.py FOLDER TOKENIZER` for published shapes: the bytes of matrices as the
conversion lays them out; of the keys and values of a token in f32 (half of that in bf16); of the states of a text in f32,
where layers keep one. Measured bundles are 0.1 to 0.8 % larger. Of each architecture the smallest model, and one of some 8
billion weights if there is one:

| architecture | model | weights, billion | int8, GB | int4, GB | a token, kB | a text's states, MB |
|---|---|---|---|---|---|---|
{calculated}

## Mixtures of experts

A call of a mixture of experts reads the weights of all experts that any of its tokens activates. So verifying
several tokens costs more than in a dense model, until the tokens activate nearly all experts. Outrider measures
calls with different tokens, so the [controller](controller.md) knows these costs.

The table shows the processor time of a call by its number of tokens, as a multiple of a call of one token: six
layers of 16 experts, two of them active per token, hidden size 512 (Qwen3 MoE, random weights, one thread, f32,
OpenVINO 2026.4, median of 40, busy machine). Rows "equal" and "different" are calls with an empty cache and equal or
different random tokens; "after a text" is a call after a text of 256 tokens.

| weights | tokens | 1 | 2 | 3 | 4 | 6 | 8 |
|---|---|---|---|---|---|---|---|
| fp32 | equal | 1 | 1.49 | 1.87 | 2.09 | 2.46 | 2.83 |
| fp32 | **different, as measured** | 1 | 1.61 | 2.03 | 2.56 | 3.40 | 4.13 |
| fp32 | after a text | 1 | 1.65 | 2.20 | 2.64 | 3.52 | 4.22 |
| int8 | equal | 1 | 1.46 | 1.92 | 2.38 | 3.26 | 4.13 |
| int8 | **different, as measured** | 1 | 1.52 | 2.03 | 2.55 | 3.52 | 4.51 |
| int8 | after a text | 1 | 1.54 | 2.04 | 2.50 | 3.43 | 4.35 |

Random tokens activate more experts than the tokens of a text, so the measured costs are rather too high than too
low. """  # noqa: E501  (rows of tables)


API_HEAD = """\
# What apps may import

<!-- Made by docs/generate.py from docstrings. Change them there, and run the script. -->

These names are public: they change only with an entry in CHANGELOG.md. All other modules and names are internal, and
may change with any version. Options have [a page of their own](options.md).

Importing `outrider` loads neither NumPy nor OpenVINO; a name is fetched when it is first used.
"""

# Modules that apps may import, what they are for, and their public names where these are not the module's `__all__`.
API: dict[str, tuple[str, tuple[str, ...]]] = {
    "outrider": ("Load a bundle, generate, chat.", ()),
    "outrider.types": (
        "What [drafters of your own](own-drafter.md), tokenizers and prompts of token ids are made of.",
        (
            "ChatTokenizer",
            "Committed",
            "Distribution",
            "Draft",
            "DraftRequest",
            "DraftRule",
            "Drafter",
            "EncoderSource",
            "Guess",
            "Noise",
            "Prompt",
            "Requirements",
            "Span",
            "TextTokenizer",
            "TokenSequence",
            "Verifier",
        ),
    ),
    "outrider.tools": ("[Function calls](structured-output.md) in an answer's text.", ()),
    "outrider.rag": ("[Answers from documents](rag.md). Needs `.[rag]`.", ()),
    "outrider.server": ("The [server](server.md) as an ASGI app. Needs `.[server]`.", ()),
    "outrider.testing": ("Toy models for [tests of your app](testing.md).", ()),
    "outrider_export": ("[Export](export.md): bundles from checkpoints.", ()),
    "outrider_distill": ("[Training a drafter](distill.md).", ()),
}


def options_page() -> str:
    """The page with every option: name, type, default, allowed values, meaning."""
    presets = [f"- `{name}`: {_first_comment(path)}" for name, path in find_presets().items()]
    parts = [OPTIONS_HEAD, "Presets:\n", "\n".join(presets) + "\n"]
    flags = {parameter.name: parameter.opts[0] for parameter in _shared_parameters()}
    for title, (config, intro) in SECTIONS.items():
        described = options_of(config)
        rows = ["| option | type | default | allowed | meaning |", "|---|---|---|---|---|"]
        missing = []
        for option in dataclasses.fields(config):
            kind = str(option.type).replace(" | ", "` or `")  # a bar would end the cell
            each = described[option.name]
            default = f"{each.default:g}" if isinstance(each.default, float) else repr(each.default)
            meaning = each.describe(f"`{each.default}`" if each.default == "auto" else default)
            rows.append(f"| `{option.name}` | `{kind}` | `{default}` | {each.says} | {meaning} |")
            if option.name not in flags:
                missing.append(f"`{option.name}`")
        parts += [f"## {title.capitalize()}: `{config.__name__}`\n", f"{intro}\n", "\n".join(rows) + "\n"]
        if missing:
            parts.append(f"Not on the command line under this name: {', '.join(missing)}.\n")
        notes = inspect.cleandoc(config.__doc__ or "").split("\n\n", 1)[1:]
        parts += [f"{note}\n" for note in notes]
    return "\n".join(parts)


def commands_page() -> str:
    """The page with every command's help; options that many commands share are named once."""
    shared = {parameter.name for parameter in _shared_parameters()}
    parts = [COMMANDS_HEAD, f"```text\n{_help(cli.root, 'outrider')}\n```\n"]
    for name in cli.root.list_commands(click.Context(cli.root)):
        command = cli.root.get_command(click.Context(cli.root), name)
        if command is None:
            raise RuntimeError(f"there is no command {name}")
        takes_config = any(parameter.name == "config" for parameter in command.params)  # others have own of these names
        own = [each for each in command.params if not (takes_config and each.name in shared)]
        all_of_them, left_out = command.params, len(command.params) - len(own)
        command.params = own
        try:
            text = _help(command, f"outrider {name}")
        finally:
            command.params = all_of_them
        if isinstance(command, click.Group):
            texts = [_help(each, f"outrider {name} {each.name}") for each in command.commands.values()]
            text = "\n\n".join([text, *texts])
        parts.append(f"## outrider {name}\n\n```text\n{text}\n```\n")
        if left_out:
            sections = [
                section
                for section, (config, _) in SECTIONS.items()
                if {p.name for p in all_of_them} & {option.name for option in dataclasses.fields(config)}
            ]
            links = ", ".join(f"[{section}](options.md#{section}-{_class(section)})" for section in sections)
            parts.append(f"Also `--config`, and the options of\n{links}.\n")
    return "\n".join(parts)


def models_page() -> str:
    """The page with every architecture that is tried, and every one that is refused."""
    layouts = _layouts()
    rows = [
        "| architecture | models | attention | formats | without PyTorch | bit-exact | drafters | tried with |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for each in ARCHITECTURES.values():
        attention = {"full": "full", "sliding": "full or sliding window", "mixed": "full and sliding window"}[
            each.attention
        ]
        cells = (
            f"`{each.name}`",
            each.models,
            attention
            + (f" and {each.states}" if each.states else "")
            + (", mixture of experts" if each.experts else ""),
            "OpenVINO, ONNX" if each.onnx else "OpenVINO",
            "no" if each.name not in ARCHS else "checkpoints, GGUF" if ARCHS[each.name].gguf else "checkpoints",
            "yes",
            "copies, draft model" + (", heads" if each.features else ""),
            ", ".join(filter(None, ("random weights", _layouts_of(each.name, layouts), each.real))),
        )
        rows.append(f"| {' | '.join(cells)} |")
    of_rule: dict[tuple[str, str], list[str]] = {}
    for name, rule in REFUSED.items():
        of_rule.setdefault((rule, PEERS[name]), []).append(f"`{name}`")
    refused = "\n".join(f"| {', '.join(names)} | {rule} | {peer} |" for (rule, peer), names in of_rule.items())
    converted = [each for each in ARCHITECTURES.values() if each.name in ARCHS]
    as_llama = ("ministral", "mistral", "mixtral")  # whose GGUF files name the architecture so
    lists = {
        "with_torch": [name for name in ARCHITECTURES if name not in ARCHS],
        "without_gguf": [each.name for each in converted if not ARCHS[each.name].gguf and each.name not in as_llama],
        "without_heads": [each.name for each in ARCHITECTURES.values() if not each.features],
    }
    named = {what: ", ".join(f"`{name}`" for name in names) for what, names in lists.items()}
    by_year: dict[tuple[str, int], list[str]] = {}
    for layout in layouts.LAYOUTS.values():
        by_year.setdefault((_outcome_of(layout), layout.year), []).append(layout.name)
    of_layouts = "\n".join(
        f"| {year} | {', '.join(names)} | {outcome} |"
        for (outcome, year), names in sorted(by_year.items(), key=lambda each: each[0])
    )
    return (
        MODELS_HEAD
        + "\n".join(rows)
        + "\n"
        + MODELS_TAIL.format(
            refused=refused, layouts=of_layouts, num_layouts=len(layouts.LAYOUTS), calculated=_sizes(), **named
        )
    )


def _sizes() -> str:
    """The rows of sizes, of what `bench/scripts/family_sizes.py` wrote."""
    path = DOCS.parent / "bench" / "scripts" / "family_figures.json"
    figures: dict[str, dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
    rows = (
        (
            f"`{each['kind']}`", name, *map(_gigabytes, (each["weights"], each["int8"], each["int4"])),
            f"{each['token']:,.0f}", f"{each['states']:.1f}" if each["states"] else "–",
        )
        for name, each in sorted(figures.items(), key=lambda item: str(item[1]["kind"]))
    )  # fmt: skip
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _gigabytes(value: float) -> str:
    return f"{value:.2f}" if value < 100 else f"{value:.0f}"


def _layouts() -> Any:
    """The layouts of published files that the tests write: `tests/helpers/layouts.py`."""
    helpers = str(DOCS.parent / "tests" / "helpers")
    if helpers not in sys.path:
        sys.path.append(helpers)
    return importlib.import_module("layouts")


def _layouts_of(architecture: str, layouts: Any) -> str:
    """How many layouts of an architecture are tried, in words."""
    found = [each for each in layouts.LAYOUTS.values() if layouts.architecture_of(each) == architecture]
    whole = sum(not each.refused for each in found)
    said = f"{whole} published layout{'s' * (whole > 1)}" if whole else ""
    files = len(found) - whole
    return ", ".join(filter(None, (said, f"the files of {files} without weights" if files else "")))


def _outcome_of(layout: Any) -> str:
    """What the plain installation makes of a layout."""
    if not layout.refused:
        return "exported"
    if "cannot be exported" in layout.refused:
        return "refused by name: its attention"
    if layout.files != "json":
        return "refused by name: its tokenizer has to be saved as `tokenizer.json` first"
    is_foreign = "auto_map" in layout.changes and layout.config not in ARCHITECTURES
    code = " and `--trust-remote-code`" if is_foreign else ""
    return f"tokenizer converted; weights need `.[export]`{code}"


def api_page() -> str:
    """The page with every public name, and the first sentence of its docstring."""
    parts = [API_HEAD]
    for module, (intro, names) in API.items():
        package = importlib.import_module(module)
        rows = ["| name | meaning |", "|---|---|"]
        for name in sorted(names or package.__all__, key=str.lower):
            value = getattr(package, name)
            meaning = _first_sentence(inspect.getdoc(value) or "") if callable(value) else f"`{value!r}`"
            rows.append(f"| `{name}` | {meaning} |")
        parts.append(f"## {module}\n\n{intro}\n\n" + "\n".join(rows) + "\n")
    return "\n".join(parts)


def index_page() -> str:
    """The site's home: the README without what only a repository has."""
    text = (DOCS.parent / "README.md").read_text(encoding="utf-8").split("\n## Development")[0]
    text = text.replace("](docs/", "](")
    text = re.sub(r"\[([^]]+)\]\((?:samples|configs)\)", r"`\1`", text)
    return "<!-- Made by docs/generate.py from README.md. Change it there, and run the script. -->\n\n" + text


def pages() -> dict[Path, str]:
    """What the generated pages have to be."""
    made = {"options.md": options_page(), "commands.md": commands_page(), "models.md": models_page()}
    made |= {"api.md": api_page(), "index.md": index_page()}
    return {DOCS / name: text for name, text in made.items()}


def _class(section: str) -> str:
    return SECTIONS[section][0].__name__.lower()


def _shared_parameters() -> list[click.Parameter]:
    @click.command()
    @load_options
    @generation_options
    def command(**_: Any) -> None:
        """Nothing."""

    return command.params


def _help(command: click.Command, name: str) -> str:
    context = click.Context(command, info_name=name, terminal_width=WIDTH, help_option_names=["-h", "--help"])
    command._help_option = None  # click keeps that of the first context, which may have had other names
    return command.get_help(context).rstrip()


def _first_sentence(docstring: str) -> str:
    """The first sentence of a docstring, for a cell of a table."""
    first = " ".join(docstring.split("\n\n")[0].split())
    return re.split(r"(?<=\.) (?=[A-Z]|\w+(?:, \w+)*: )", first)[0].rstrip(":").replace("|", "\\|")


def _first_comment(path: Path) -> str:
    """The comment at the beginning of a file."""
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        lines.append(line.lstrip("# "))
    return " ".join(lines)


def main(arguments: list[str]) -> int:
    """Write the pages, or with --check say which are out of date."""
    check, code = "--check" in arguments, 0
    for path, text in pages().items():
        if path.exists() and path.read_text(encoding="utf-8") == text:
            continue
        if check:
            sys.stderr.write(f"{path} is out of date. Run: python docs/generate.py\n")
            code = 1
        else:
            path.write_text(text, encoding="utf-8", newline="\n")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
