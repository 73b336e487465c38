"""What tests of exports ask of bundles and models, and a progress that remembers."""

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

import outrider


class Recorder:
    """A progress that remembers, and raises an error at a phase if it is told to."""

    def __init__(
        self,
        phases: Iterable[str] = (),
        notes: Iterable[str] = (),
        num_bytes: int = 0,
        raises: tuple[str, BaseException] | None = None,
    ) -> None:
        self.phases, self.notes, self.num_bytes = list(phases), list(notes), num_bytes
        self._raises = raises

    def phase(self, name: str, total: int | None = None) -> None:
        self.phases.append(name)
        assert total is None or total > 0
        if self._raises is not None and self._raises[0] == name:
            raise self._raises[1]

    def advance(self, count: int) -> None:
        self.num_bytes += count

    def note(self, text: str) -> None:
        self.notes.append(text)

    @property
    def told(self) -> dict[str, Any]:
        """For another one like this."""
        return {"phases": self.phases, "notes": self.notes, "num_bytes": self.num_bytes}


def content(folder: Path) -> dict[str, str]:
    """What each file of a folder is."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def check_answers(folder: Path, prompt: str, drafter: str = "draft") -> None:
    """Greedy and coupled text is the same, plain and drafted."""
    engine = outrider.load(folder, cache_size=0.01)
    options: list[dict[str, Any]] = [{}, {"temperature": 1.0, "seed": 1}]
    fixed: dict[str, Any] = {"max_new_tokens": 40, "ignore_eos": True, "num_assistant_tokens": 3}
    for option in options:
        plain, drafted = (engine.generate(prompt, drafter=name, **fixed, **option) for name in (None, drafter))
        assert drafted.token_ids == plain.token_ids
        assert drafted.stats.num_draft_tokens > 0


def logits_of_ir(model: Any, token_ids: list[int], sizes: Iterable[int] = ()) -> Any:
    """Logits float32 [tokens, width] in f32 of a stateful IR or its file, read in calls of these sizes, or in one."""
    import openvino as ov

    hints = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0"}
    request = ov.Core().compile_model(model, "CPU", hints).create_infer_request()
    made, past = [], 0
    for size in sizes or [len(token_ids)]:
        end = past + size
        inputs = {
            "input_ids": np.array([token_ids[past:end]]),
            "attention_mask": np.ones((1, end), np.int64),
            "position_ids": np.arange(past, end)[None],
            "beam_idx": np.zeros(1, np.int32),
        }
        past = end
        made.append(request.infer(inputs)["logits"][0].copy())
    return np.concatenate(made)


def error_of(found: Any, expected: Any) -> float:
    """The largest difference of logits, as a share of the largest logit."""
    return float(np.abs(found - expected).max() / np.abs(expected).max())
