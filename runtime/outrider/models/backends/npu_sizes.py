"""Fixed shapes on an NPU: the sizes a model is compiled for, its windows, and the properties for NPUW."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import openvino as ov

from outrider.errors import OptionError
from outrider.models.backends.devices import find_name

CACHE_KINDS = {"auto": "f16", "f16": "f16", "f32": "f32"}  # of keys and values; NPUW's default is f16
_ROWS_STEP, _TOKENS_STEP = 8, 64  # to multiples of which NPUW rounds a window's rows, and prompt and answer
_PIECE = 256  # prompt tokens per call of the prefill model
_DEFAULT_PROMPT, _DEFAULT_ANSWER = 1024, 512  # tokens; GenAI's are 1024 and 128


@dataclass(frozen=True, slots=True)
class NpuSizes:
    """The sizes a model is compiled for, in tokens.

    prompt, answer: as the user set them. window: rows of each decoding call. piece: tokens of each prefill call.
    """

    prompt: int
    answer: int
    window: int
    piece: int

    @property
    def prefill(self) -> int:
        """Tokens the prefill model has room for. NPUW reads a prompt in pieces only if there is room for two."""
        return max(_up(_up(self.prompt, _TOKENS_STEP), self.piece), 2 * self.piece)

    @property
    def total(self) -> int:
        """Columns of the cache: the tokens, a window's own rows, and the rest of the last window."""
        return self.prefill + _up(self.answer + 2 * self.window, _TOKENS_STEP)

    @property
    def past(self) -> int:
        """Tokens before a window that its attention can see."""
        return self.total - self.window

    @property
    def max_tokens(self) -> int:
        """Most tokens of a sequence. Every window then fits in the cache whole."""
        return min(self.prompt + self.answer, self.window_begin(self.past))

    def window_begin(self, position: int) -> int:
        """The first position of the window that contains `position`.

        Windows begin at fixed positions, so that a token is evaluated in the same layout whatever is drafted. Token 0
        has a window of its own, because NPUW takes several tokens from position 0 on for a new prompt.
        """
        return 1 + (position - 1) // self.window * self.window if position else 0

    def window_end(self, begin: int) -> int:
        """The end of the window that begins at `begin`."""
        return begin + self.window if begin else 1


def find_sizes(max_rows: int, context_length: int, prompt: int | None, answer: int | None) -> NpuSizes:
    """The sizes for windows of `max_rows` rows, and for prompts and answers of so many tokens.

    prompt, answer: None means 1,024 and 512, or less if the model's context is shorter.

    Raises:
        OptionError: when they exceed the model's context.
    """
    beside = answer or min(_DEFAULT_ANSWER, context_length // 3)
    prompt = prompt or max(min(_DEFAULT_PROMPT, context_length - beside), 1)
    answer = answer or max(min(_DEFAULT_ANSWER, context_length - prompt), 1)
    if prompt + answer > context_length:
        raise OptionError(
            f"npu_max_prompt_tokens={prompt:,} and npu_max_new_tokens={answer:,} exceed the model's context of "
            f"{context_length:,} tokens. Lower one of them."
        )
    window = _up(max_rows, _ROWS_STEP)
    piece = _PIECE
    while piece > _TOKENS_STEP and 2 * piece > prompt:
        piece //= 2
    return NpuSizes(prompt, answer, window, piece)


def check_npu(core: ov.Core, device: str, runs_on: str) -> str:
    """The device that an NPU is emulated on; empty if there is an NPU. runs_on: the property NPUW_DEVICES.

    Raises:
        OptionError: when there is no NPU and none is emulated.
    """
    if runs_on and not runs_on.startswith("NPU"):  # NPUW takes the first of these that works
        return runs_on.split(",")[0]
    found = core.available_devices
    if find_name(device, found) is None:
        raise OptionError(
            f"There is no device '{device}' here. Found: {', '.join(found)}. To try an NPU's way of working on the "
            "CPU, load with properties={'NPUW_DEVICES': 'CPU'}, or the preset npu-emulated."
        )
    return ""


def npuw_properties(
    sizes: NpuSizes, cache_precision: str, precision: str, num_threads: int, asked: Mapping[str, Any]
) -> dict[str, Any]:
    """The properties for NPUW. asked: the user's own properties.

    Raises:
        OptionError: for a property that Outrider sets.
    """
    made: dict[str, Any] = {
        "NPU_USE_NPUW": "YES",
        "NPUW_LLM": "YES",
        "NPUW_LLM_BATCH_DIM": 0,
        "NPUW_LLM_SEQ_LEN_DIM": 2,
        "NPUW_LLM_MAX_PROMPT_LEN": sizes.prefill,
        "NPUW_LLM_MIN_RESPONSE_LEN": sizes.total - sizes.prefill,
        "NPUW_LLM_MAX_GENERATION_TOKEN_LEN": sizes.window,
        "NPUW_LLM_PREFILL_HINT": "DYNAMIC",
        "NPUW_LLM_PREFILL_CHUNK_SIZE": sizes.piece,
        "NPUW_LLM_ENABLE_CONTINUOUS_PREFILL": "YES",
        "NPUW_LLM_GENERATE_PYRAMID": "NO",  # it compiles models for several lengths, whose last bits may differ
        "KV_CACHE_PRECISION": cache_precision,
    }
    if precision != "auto":
        made["INFERENCE_PRECISION_HINT"] = precision
    if num_threads:
        made["INFERENCE_NUM_THREADS"] = num_threads
    for name in asked:
        if name in made and name.startswith("NPUW_LLM"):
            raise OptionError(
                f"properties has {name!r}, which Outrider sets to {made[name]}. Leave it out: sizes are chosen by "
                "npu_max_prompt_tokens, npu_max_new_tokens and num_assistant_tokens."
            )
    return {**made, **asked}


def _up(number: int, step: int) -> int:
    return -(-number // step) * step
