"""Writes the pages that repeat what the code says: options.md from `outrider.config`, commands.md from the commands,
models.md from the architectures that are tried, api.md from public docstrings, index.md from the README, and the
README's table from the first one in benchmarks.md.

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
from outrider.bundle.architectures import PEERS, REFUSED, STATES
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

Every command has `-h, --help`, and all but `chat` have `--json` for one machine-readable object. MODEL is a bundle, a
`.gguf` file, a checkpoint folder or a hub id. With a MODEL that is not a bundle, `--draft` names a draft model: a file,
folder or hub id; `auto` finds one. What is said here is left out below; `--help` says more of each command.
Errors are one line. The exit code is 0 for success, 1 for a failure, 2 for wrong usage and 130 for Ctrl-C.
"""


# What the head of the page says once.
_SAID_ABOVE = re.compile(
    r"^  (?:--json +Print one JSON object|-h, --help +Show this message|--draft DRAFT +Draft model for a MODEL).*\n?"
    r"(?:^ {10,}.*\n?)*|^  MODEL is a bundle, a \.gguf file, a checkpoint folder or a hub id\.\n\n",
    re.MULTILINE,
)

MODELS_HEAD = """\
# Models

<!-- Made by docs/generate.py from direct/archs.toml. Change it there, and run the script. -->

Look up `model_type` of a model's `config.json` in the table (GGUF files of Mistral name it `llama`), or ask `outrider
inspect CONFIG.json`. [T5, MarianMT and Whisper](encoder-decoder.md) have a page of their own.

The [plain installation](export.md#without-pytorch) converts each row to OpenVINO, from checkpoints and GGUF files, and
copies, draft models and [heads](drafters.md) draft for it, but for what [is listed below](#what-a-row-lacks).

For each row, a slow test exports and runs a small model with random weights (`tests/export/test_architectures.py`).
Logits and greedy text are those of Transformers 5.5 in float32, drafted text is that of plain decoding, and in f32 on a
CPU rows are [bit-exact](exactness.md). Sliding windows and experts were not tried on GPU and NPU.

"""

MODELS_TAIL = """\

Published weights were run for {real}. Other checkpoints may differ from what was tested: `outrider verify my-pair
--against CHECKPOINT` compares a bundle with its own checkpoint.

## What a row lacks

| lacks | architectures | why | what has it |
|---|---|---|---|
| conversion without PyTorch | {with_torch} | position biases, learned positions, parallel attention or another activation; with `.[export]` they are converted | llama.cpp, but for `gptj`, `opt` and `persimmon`, which vLLM runs |
| GGUF files | {without_gguf} | the order of tensors in their GGUF files is not known here | llama.cpp: `afmoe`, `hy_v3`, `olmo`, `stablelm`, Solar Open |
| heads | {without_heads} | hidden states are not found in the graph | no published heads are known |
| ONNX | all but {onnx} | sliding windows, states, experts or gates | onnxruntime-genai: some with windows and experts |

## File layouts

The tests write the files of {num_layouts} published models (`tests/helpers/layouts.jsonl`), without weights. Tokenizers are
compared with the `tokenizers` library, configurations with what Transformers reads in them. Whether weights need `.[export]` says
[the table above](#what-a-row-lacks).

A chat template may be a text, a list with names ("default" is taken), or `chat_template.jinja`, which wins over the others.

## Architectures that are not in the table

What optimum-intel can export beyond the table is compared with its checkpoint on a random text, and refused if they differ.
These architectures are refused before weights are downloaded:

| architectures | why | what runs them |
|---|---|---|
{refused}

`apertus1p5`, `axk1`, `bailing_moe`, `flint`, `jais2`, `kolibri1`, `laguna`, `lara_mini`, `mimo`, `mimo_v2_flash`, `minicpm`, `minicpm3`,
`mistral4`, `muse_spark_text`, `nanochat`, `sarvam_mla` and `step3p7` have no entry. llama.cpp or Transformers run them; `outrider inspect
CONFIG.json` and [A new architecture](new-architecture.md) say what an entry needs.

## Layers with a state

A layer with a state (short convolution, gated delta net, Mamba-2) has no keys and values to drop. OpenVINO stores its state after
each token of a call, and Outrider continues from the state after the last accepted token.

| rule | why |
|---|---|
| converted without PyTorch only | OpenVINO recognises these layers by the form of the graph; a graph whose states are not paged is refused |
| at least one layer with attention | OpenVINO gives a model without attention no paged cache, so `mamba2` is refused |
| not in ONNX | ONNX Runtime stores no states per token |
| Nemotron 3 Super (`moe_latent_size`) is refused | its experts read a shorter row |
| Kimi-Linear is refused | its layers have a decay rate for each number of a key; OpenVINO has one for each head |
| GGUF files of Granite 4.0 with attention in all layers | name the architecture `granite` |

A call of 8 rows takes 1.2 (LFM2.5-1.2B), 1.6 (Granite-4.0-H-1B) or 2.5 (Qwen3.5-0.8B) times as long as one of one row, with 0.2, 58.5 and
20.6 MB for a row of states.
[Benchmarks](benchmarks.md#models-with-states) compares plain decoding with openvino-genai's.

## Models that read images, as text models

Of EXAONE 4.5, Gemma 3n, Llama 4 and Muse Glimmer the text part is converted. [Images](vision.md#the-export) lists the models
whose images are read.

## What differs in some families

| models | what to know |
|---|---|
| Gemma 4 (E2B, E4B, 12B, 31B, 26B-A4B) | checkpoints read [images](vision.md), GGUF files text only, nothing reads sounds; embeddings by layer are in 8 bits, and only rows of tokens that occur are in memory; several layers share a cache; its [assistants](drafters.md#gemma-4s-assistants) and DSpark drafters draft for it |
| Gemma 3n (E2B, E4B) | text only; no heads |
| Llama 4 | text only. **The context ends at the first chunk of 8,192 tokens**, as a paged cache has no chunked attention. Models without chunks (MobileLLM-R1) have their whole context |
| DeepSeek V2 and V3, Moonlight, GLM-4.7-Flash, Youtu-LLM (latent attention) | the cache holds whole keys and values, so a token takes much memory (see [sizes](#sizes)); DeepSeek V2's scaling for YaRN is llama.cpp's, and Transformers has it after 5.5 only; MTP layers are left out, also of GLM-4.5 to 4.7 and dots.llm1 |
| Gemma 3n and 4, latent attention | a LoRA adapter can be merged, not attached; not in ONNX |

## LongRoPE

Phi 3.5, Phi 4 mini and others use one set of rotary frequencies up to a length, such as 4,096 tokens, and another beyond it.
Outrider chooses the set by the prompt's tokens plus `max_new_tokens`, once for a text.

| rule | consequence |
|---|---|
| a text that may pass the length has the second set from its first token on | a smaller `max_new_tokens` keeps it on the first; `outrider inspect` shows the length |
| the prefix cache keeps the sets apart | a conversation that passes the length is read once again |
| GGUF files without the second set, PyTorch, ONNX, NPU | the context ends at the first length |

## Sizes

Calculated by `python bench/scripts/family_sizes.py FOLDER TOKENIZER`: weights in int8 and int4; the keys and values of a token
in f32 (half of that in bf16); the states of a text in f32. The largest model of each architecture up to 5 GB in int4:

| model | int8, GB | int4, GB | a token, kB |
|---|---|---|---|
{calculated}

## Mixtures of experts

A call reads the weights of all experts that any of its tokens activates, so verifying several tokens costs more than in a dense
model: with two of 16 experts active, calls of 2, 4 and 8 random tokens take 1.5, 2.6 and 4.5 times as long as one in int8. The tokens
of a text activate fewer. The [controller](controller.md) knows these costs.
"""  # noqa: E501  (rows of tables)


API_HEAD = """\
# What apps may import

<!-- Made by docs/generate.py from docstrings. Change them there, and run the script. -->

These names are public: they change only with an entry in CHANGELOG.md. All other modules and names are internal, and
may change with any version. [Options](options.md) and [errors](troubleshooting.md) have pages of their own.

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
        rows = ["| option | default | allowed | meaning |", "|---|---|---|---|"]
        missing = []
        for option in dataclasses.fields(config):
            each = described[option.name]
            default = f"{each.default:g}" if isinstance(each.default, float) else repr(each.default)
            meaning = each.describe(f"`{each.default}`" if each.default == "auto" else default)
            allowed = re.sub(r" \(\S+ is off\)|^true or false$", "", each.says)  # the meaning or the default says it
            rows.append(f"| `{option.name}` | `{default}` | {allowed} | {meaning} |")
            if option.name not in flags:
                missing.append(f"`{option.name}`")
        parts += [f"## {title.capitalize()}: `{config.__name__}`\n", f"{intro}\n", "\n".join(rows) + "\n"]
        if missing:
            parts.append(f"Not on the command line under this name: {', '.join(missing)}.\n")
        notes = inspect.cleandoc(config.__doc__ or "").split("\n\n", 1)[1:]
        parts += [f"{note}\n" for note in notes]
    return "\n".join(parts)


def commands_page() -> str:
    """The page with every command's help; options that several commands share are described once."""
    context = click.Context(cli.root)
    commands = {name: cli.root.get_command(context, name) for name in cli.root.list_commands(context)}
    configured = {parameter.name for parameter in _shared_parameters()}
    often: dict[tuple[str, str], list[click.Option]] = {}
    for command in commands.values():
        for each in command.params if command else ():
            if isinstance(each, click.Option) and each.name not in configured:
                often.setdefault((each.opts[0], each.help or ""), []).append(each)
    shared = {key: found[0] for key, found in often.items() if len(found) > 1 and key[0] not in ("--json", "--draft")}
    common = _help(click.Command("COMMAND", params=[*shared.values()]), "outrider COMMAND").split("Options:\n")[1]
    common = "\n".join(line for line in common.splitlines() if "-h, --help" not in line)
    parts = [
        COMMANDS_HEAD, f"```text\n{_help(cli.root, 'outrider').split('Commands:')[0].rstrip()}\n```\n",
        f"Options of several commands:\n\n```text\n{common}\n```\n",
    ]  # fmt: skip
    for name, command in commands.items():
        if command is None:
            raise RuntimeError(f"there is no command {name}")
        takes_config = any(parameter.name == "config" for parameter in command.params)  # others have own of these names
        all_of_them, also = command.params, list[str]()
        command.params = []
        for each in all_of_them:
            if isinstance(each, click.Option) and (each.opts[0], each.help or "") in shared:
                also.append(f"`{each.opts[0]}`")
            elif not (takes_config and each.name in configured):
                command.params.append(each)
        whole, command.help = command.help, (command.help or "").split("\n\n")[0]
        try:
            text = _help(command, f"outrider {name}")
        finally:
            command.params, command.help = all_of_them, whole
        if isinstance(command, click.Group):
            texts = [_help(each, f"outrider {name} {each.name}") for each in command.commands.values()]
            text = "\n\n".join([text, *texts])
        text = _SAID_ABOVE.sub("", text)
        parts.append(f"## outrider {name}\n\n```text\n{text.rstrip()}\n```\n")
        if takes_config:
            sections = [
                section
                for section, (config, _) in SECTIONS.items()
                if {p.name for p in all_of_them} & {option.name for option in dataclasses.fields(config)}
            ]
            also += ["`--config`", *(f"[{section}](options.md#{section}-{_class(section)})" for section in sections)]
        if also:
            parts.append(f"Also {', '.join(also)}.\n")
    return "\n".join(parts)


def models_page() -> str:
    """The page with every architecture that is tried, and every one that is refused."""
    layouts = _layouts()
    rows = [
        "| architecture | models | attention, if not full |",
        "|---|---|---|",
    ]
    for each in ARCHITECTURES.values():
        attention = {"full": "", "sliding": "full or window", "mixed": "full and window"}[each.attention]
        cells = (
            f"`{each.name}`",
            each.models,
            ", ".join(filter(None, (attention, each.states, "experts" if each.experts else ""))),
        )
        rows.append(f"| {' | '.join(cells)} |")
    of_rule: dict[str, list[str]] = {}
    for name in REFUSED:
        of_rule.setdefault(REFUSED[name].removeprefix(f"{STATES}; "), []).append(name)
    refused = "\n".join(
        f"| `{'`, `'.join(names)}` | {rule} | {', '.join(sorted({PEERS[name] for name in names}))} |"
        for rule, names in of_rule.items()
    )
    as_llama = ("ministral", "mistral", "mixtral")  # whose GGUF files name the architecture so
    lists = {
        "with_torch": [name for name in ARCHITECTURES if name not in ARCHS],
        "without_gguf": [name for name, arch in ARCHS.items() if not arch.gguf and name not in as_llama],
        "without_heads": [each.name for each in ARCHITECTURES.values() if not each.features],
        "onnx": [each.name for each in ARCHITECTURES.values() if each.onnx],
    }
    named = {what: ", ".join(f"`{name}`" for name in names) for what, names in lists.items()}
    real = ", ".join(f"`{each.name}` ({each.real})" for each in ARCHITECTURES.values() if each.real)
    return (
        MODELS_HEAD
        + "\n".join(rows)
        + "\n"
        + MODELS_TAIL.format(
            refused=refused,
            num_layouts=len(layouts.LAYOUTS),
            calculated=_sizes(),
            real=real,
            **named,
        )
    )


_MOST_GIGABYTES = 5  # of int4, in the table of sizes: what edge machines may have


def _sizes() -> str:
    """The rows of sizes, of what `bench/scripts/family_sizes.py` wrote."""
    path = DOCS.parent / "bench" / "scripts" / "family_figures.json"
    read: dict[str, dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
    small = sorted((each["int4"], name) for name, each in read.items() if each["int4"] <= _MOST_GIGABYTES)
    figures = {name: read[name] for name in {read[name]["kind"]: name for _, name in small}.values()}
    rows = (
        (
            name, *map(_gigabytes, (each["int8"], each["int4"])),
            f"{each['token']:,.0f}" + (f"; states {each['states']:.1f} MB" if each["states"] else ""),
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


def api_page() -> str:
    """The page with every public name, and the first sentence of its docstring."""
    parts = [API_HEAD]
    for module, (intro, names) in API.items():
        package = importlib.import_module(module)
        rows = ["| name | meaning |", "|---|---|"]
        for name in sorted(names or package.__all__, key=str.lower):
            value = getattr(package, name)
            if isinstance(value, type) and issubclass(value, Exception):
                continue  # in the table of errors
            meaning = _first_sentence(inspect.getdoc(value) or "") if callable(value) else f"`{value!r}`"
            rows.append(f"| `{name}` | {meaning} |")
        parts.append(f"## {module}\n\n{intro}\n\n" + "\n".join(rows) + "\n")
    return "\n".join(parts)


# The README's columns, by those of the table in benchmarks.md.
PROOF = {
    "all": "all", "open questions": "general", "code": "code", "summaries": "summarization",
    "slowest prompt": "slowest", "same text": "same text",
}  # fmt: skip


def readme() -> str:
    """The README. Its table is made of the first one in benchmarks.md: both of ours, and the best of other runtimes."""
    text, measured = (path.read_text(encoding="utf-8") for path in (DOCS.parent / "README.md", DOCS / "benchmarks.md"))
    first = re.search(r"^\| \|.*\n\|---.*\n((?:\|.*\n)+)", measured, re.MULTILINE)
    if first is None:
        raise RuntimeError("benchmarks.md has no table")
    head, *rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in first[0].splitlines()]
    figures = {row[0]: dict(zip(head[1:], row[1:], strict=True)) for row in rows[1:]}
    plain, *others = figures
    rate = float(plain.removeprefix("plain, ").split()[0])
    shown = {"Outrider, plain": plain, "**Outrider, `auto`**": "**auto**"}
    for peer in ("llama.cpp, plain", "llama.cpp, ", "openvino-genai, "):
        tried = [name for name in others if name.startswith(peer) and name not in shown.values()]
        if tried:
            best = max(tried, key=lambda name: _number(figures[name]["all"]))
            shown[best if "plain" in peer else f"{best}: its best"] = best
    lines = [f"| | tokens/s | {' | '.join(PROOF)} |", "|---" * (len(PROOF) + 2) + "|"]
    for said, name in shown.items():
        cells = [f"{rate * _number(figures[name]['all']):.1f}", *(figures[name][column] for column in PROOF.values())]
        lines.append(f"| {said} | {' | '.join(cells)} |")
    before, _, rest = text.partition("\n| | tokens/s |")
    return f"{before}\n" + "\n".join(lines) + "\n\n" + rest.partition("\n\n")[2]


def _number(cell: str) -> float:
    return float(cell.strip("* ").split()[0])


def index_page() -> str:
    """The site's home: the README up to what the site's navigation has."""
    text = readme().split("\n## Your own model")[0]
    text = text.replace("](docs/", "](")
    text = re.sub(r"\[([^]]+)\]\((?:samples|configs)\)", r"`\1`", text)
    return "<!-- Made by docs/generate.py from README.md. Change it there, and run the script. -->\n\n" + text


def pages() -> dict[Path, str]:
    """What the generated pages have to be."""
    made = {"options.md": options_page(), "commands.md": commands_page(), "models.md": models_page()}
    made |= {"api.md": api_page(), "index.md": index_page()}
    return {DOCS / name: text for name, text in made.items()} | {DOCS.parent / "README.md": readme()}


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
