"""The options of an engine: how memory and calls are shared, and where its models run."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from outrider.config.checks import are_texts, as_tuple
from outrider.config.option import Section, Values, integer, number, one_of, option, path, property_table, switch, text

PRECISIONS = ("auto", "f32", "bf16", "f16")  # that models calculate in
MOST_THREADS = 1024  # of a model; OpenVINO makes as many as it is told, however many that are

_gigabytes = number(0, 1e6, above=True, says="a number of GB above 0")
_round = number(0.001, 3600, says="seconds from 0.001 to 3600")
_threads = integer(0, MOST_THREADS)
_device = text("a device such as 'CPU', 'GPU' or 'GPU.1', or 'auto'")
_adapters = Values(tuple, "a list of adapters' names", are_texts, as_tuple)


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig(Section):
    """How memory and calls are shared."""

    cache_size: float = option(
        2.0, _gigabytes, "GB (10^9 bytes) for the KV caches of main and draft model together, the prefix cache included"
    )
    enable_prefix_caching: bool = option(
        True, switch, "keep prompts and answers in the prefix cache, for prompts that begin with the same tokens"
    )
    max_num_batched_tokens: int = option(512, integer(32), "most tokens of a call; running answers alone may need more")
    max_round_seconds: float | str = option(
        "auto",
        _round,
        "most seconds of a round while answers are decoded. It limits how many tokens of a long prompt a round reads",
        means="0.1, or twice the round's time without prompts if that is more",
        metavar="SECONDS|auto",
    )
    overlap: bool | str = option(
        "auto", switch, "draft for the next round during this round's target pass", means="if that is faster"
    )
    keep_records: bool = option(
        True, switch, "save acceptance records on disk, by bundle and kind of request, for later starts", flag=""
    )
    image_memory: float = option(0.5, _gigabytes, "GB of memory to decode an image; images that need more are refused")
    special_tokens_in_content: bool = option(
        True, switch, "read special tokens in the contents of messages as tokens, as in the chat template. Off: as text"
    )
    answer_store: str | None = option(
        None,
        path("a file's name"),
        "file that keeps answers, unencrypted, to copy drafts from",
        means="no file",
        metavar="FILE",
    )
    prefix_store: str | None = option(
        None,
        path("a folder's name, or 'auto'"),
        "folder that keeps the prefix cache, unencrypted, for later starts; `auto`: in the cache folder. "
        "Benchmarks do not use it",
        means="no folder",
        metavar="FOLDER|auto",
    )
    prefix_store_size: float = option(4.0, _gigabytes, "most GB of this folder; the least used prefixes are deleted")


@dataclass(frozen=True, kw_only=True)
class DeviceConfig(Section):
    """Where the models run and how they are compiled.

    A device is one that `outrider devices` lists, "auto", or "AUTO". "auto" is the first GPU that runs the model,
    otherwise the CPU. "AUTO" is the device that OpenVINO's own AUTO chooses. A main device that was named and fails is
    an error. One that "auto" chose, or a draft device, is replaced with a warning. "auto" never takes an NPU: a main
    model there limits every request, and a draft model there drafts for one request at a time, for prompts of up to
    `npu_max_prompt_tokens`; other requests are decoded without it.

    With precision="auto", a CPU computes in f32. Other devices have their own default. The cache has the same
    precision unless you name one. With a cache of 8 bits on a GPU, the text may depend on drafts: blocks may be
    rounded as wholes, with rejected tokens.
    """

    main_device: str = option("CPU", _device, "device of the main model", metavar="DEVICE")
    draft_device: str | None = option(
        None, _device, "device of the draft models", means="the main device", metavar="DEVICE"
    )
    draft_bundle: str | None = option(
        None,
        text("a bundle's folder"),
        "another bundle, in any format, whose draft models are used, or its main model if it has none",
        means="the bundle's own",
        metavar="FOLDER",
    )
    adapters: tuple[str, ...] | None = option(
        None,
        _adapters,
        "the bundle's LoRA adapters to load; each request chooses one. They make all calls slower. Empty: none",
        means="all of them",
        metavar="NAME,…",
    )
    precision: str = option("auto", one_of(PRECISIONS), "number format of the models' computations", metavar="TYPE")
    cache_precision: str = option(
        "auto",
        one_of((*PRECISIONS, "u8")),
        "number format of the KV cache; `u8` is a quarter of `f32`, and as exact on CPUs",
        metavar="TYPE",
    )
    num_threads: int = option(
        0,
        _threads,
        "CPU threads of the models",
        means="the fastest number in OpenVINO, ONNX Runtime's default otherwise, a container's quota where it has one",
    )
    draft_num_threads: int | None = option(
        None, _threads, "CPU threads of the draft models", means="as the main model's"
    )
    npu_max_prompt_tokens: int | None = option(
        None, integer(1), "prompt length that models on an NPU are compiled for", means="1024 or less"
    )
    npu_max_new_tokens: int | None = option(
        None, integer(1), "answer length that models on an NPU are compiled for", means="512 or less"
    )
    npu_window: int | None = option(
        None, integer(1), "rows of a main model's call on an NPU", means="the longest draft + 1"
    )
    properties: Mapping[str, Any] = option(
        {},
        property_table,
        "properties for all models, passed on unchanged: to ONNX Runtime with a dot in the name, else to OpenVINO",
        flag="--property",
        metavar="NAME=VALUE",
    )
    main_properties: Mapping[str, Any] = option(
        {},
        property_table,
        "the same for the main model only; they override `properties`",
        flag="--main-property",
        metavar="NAME=VALUE",
    )
    draft_properties: Mapping[str, Any] = option(
        {},
        property_table,
        "the same for the draft models only; they override `properties`",
        flag="--draft-property",
        metavar="NAME=VALUE",
    )
    measure: str = option(
        "auto",
        one_of(("auto", "first", "idle")),
        "when models are measured: before the `first` answer, or while the engine is `idle`, by a table until then",
        means="idle on a CPU, for models of 16 MB and more",
        metavar="WHEN",
    )
    compiled_cache: str = option(
        "auto",
        text("a folder's name, 'auto' or 'off'"),
        "folder for models that OpenVINO compiled for devices other than the CPU. `off`: none",
        means="in the cache folder",
        metavar="FOLDER",
    )

    @property
    def takes_any_form(self) -> bool:
        """Whether the main model may have any format: it runs on the CPU, with no option of one library alone."""
        properties = {**self.properties, **self.main_properties, **self.draft_properties}
        on_cpu = self.main_device == "CPU" and self.draft_device in (None, "CPU")
        return on_cpu and not properties and self.precision == self.cache_precision == "auto"

    def of(self, role: str) -> DeviceConfig:
        """The options of one model, "main" or a draft model's name. Options of its role replace the general ones."""
        threads, own = self.num_threads, self.main_properties
        if role != "main":
            threads = threads if self.draft_num_threads is None else self.draft_num_threads
            own = self.draft_properties
        return dataclasses.replace(
            self,
            num_threads=threads,
            draft_num_threads=None,
            properties={**self.properties, **own},
            main_properties={},
            draft_properties={},
        )


def format_of_property(name: str) -> str:
    """The format of the models that a device property is for: ONNX Runtime's have dots in their names."""
    return "onnx" if "." in name else "openvino"


def is_npu_property(name: str) -> bool:
    """Whether a device property is only for NPUs. It is not passed on to other devices."""
    return name.startswith(("NPU_", "NPUW_", "++NPUW_"))
