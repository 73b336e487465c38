"""How fast a model is in each form on this machine, and what it loses, from slices of it.

    with Trial(plan, config) as trial:
        forms = trial.measure([("openvino", "int8"), ("onnx", "int4")])
        forms[0].seconds[1]    # of a call of one row, of the whole model
        trial.slice_kl(forms[1])

Slices are converted to each form, and timed in turns; see `forms.slices`. Their tokens are those of a text, and the
vocabulary's first. What a form loses is measured on the larger slice, against the same slice in 16 bits.
"""

from __future__ import annotations

import gc
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Self

import numpy as np

from outrider.bundle.manifest import Source
from outrider.drafters.prediction import Costs, predict
from outrider.errors import ExportError
from outrider.models.tuning.reference import NUM_SAMPLED, SAMPLE, Reference
from outrider.system.progress import report
from outrider_export.describe.plan import check_route
from outrider_export.tokenizers.copy import copy_tokenizer
from outrider_export.tokenizers.files import read_tokenizer
from outrider_export.weights_choice.cut import describe_whole, write_slice
from outrider_export.weights_choice.slices import FormSlices, SliceCheckpoint, Whole, time_slices

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    from outrider.bundle.manifest import Format
    from outrider.config import Config
    from outrider_export.describe.plan import Plan

FORMS: tuple[tuple[Format, str], ...] = (
    ("openvino", "int8"),
    ("openvino", "int4"),
    ("onnx", "int8"),
    ("onnx", "int4"),
)
ROWS = (1, 2, 4, 8)
CUTS = (65_536, 32_768)  # sizes of a draft model's output matrix, in tokens
# What `auto` is predicted for: a draft model whose token takes this share of the fastest form's call of one row, and
# whose tokens are accepted as often as this.
DRAFT_SHARE, ACCEPTANCE = 0.25, 0.6
_MOST_SECONDS = 40.0  # of calls that are timed
_VOCABULARY, _MORE_TOKENS = 8_192, 57_344  # tokens of the slices, and those that one of them has more
_MOST_MORE = 4  # layers that the large slice has more than the small one
_MORE_WEIGHTS = 160_000_000  # that these have at least; in small models, where they are fewer, all `_MOST_MORE`


@dataclass(frozen=True)
class FormSpeed:
    """The whole model in one form, as predicted.

    seconds: of a call, by rows. cut: seconds of a call of one row with an output matrix for so many tokens. num_bytes:
    of its weights, on disk and at least in memory. slice_kl: the mean KL divergence of the large slice's distributions
    from those in 16-bit weights, calculated in f32, in nats; None: not measured.
    """

    format: Format
    weights: str
    seconds: dict[int, float]
    cut: dict[int, float]
    num_bytes: int
    setting: str
    slice_kl: float | None = None

    @property
    def plain(self) -> float:
        """Tokens a second of plain decoding."""
        return 1 / self.seconds[1]

    def auto(self, draft: float, acceptance: float = ACCEPTANCE) -> float:
        """Tokens a second with the draft length that is best. draft: seconds of a draft token."""
        most = max(self.seconds)
        rows = range(1, most + 1)
        check = np.interp(rows, [*self.seconds], [*self.seconds.values()]).tolist()
        costs = Costs(check, [draft * length for length in rows])
        return self.plain * predict([acceptance] * most, costs).speed_up


class FormTrial:
    """A model's slices, in a folder that is deleted in the end.

    tokenizer: the folder of its tokenizer, if it was converted already. left_out: why it cannot have a format.
    is_settled: whether times of the same call agreed; see `time_slices`.

    Raises:
        ExportError: when the model cannot be cut.
    """

    is_settled = True

    def __init__(self, plan: Plan, config: Config, tokenizer: Path | None = None) -> None:
        self._plan, self._config, self._tokenizer = plan, config, tokenizer
        self._role = "main" if plan.role == "main" else "draft"
        self._made: dict[tuple[str, str], FormSlices] = {}
        self.left_out: dict[str, ExportError] = {}
        self._num_layers, self._is_tied = describe_whole(plan.source)

    def __enter__(self) -> Self:
        self._scratch = tempfile.TemporaryDirectory(prefix="outrider-slices-", ignore_cleanup_errors=True)
        try:
            self._folder = Path(self._scratch.name)
            self._text, self._checkpoints = self._write()
        except BaseException:
            self._scratch.cleanup()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._made.clear()
        gc.collect()  # a file that is mapped cannot be deleted on Windows
        self._scratch.cleanup()

    def measure(
        self, forms: Sequence[tuple[Format, str]] = FORMS, rows: Sequence[int] = ROWS, cuts: Sequence[int] = ()
    ) -> list[FormSpeed]:
        """The model in these forms, but those whose format it cannot have: `left_out` says why.

        cuts: sizes of the output matrix, in tokens.

        Raises:
            ExportError: when it can have none of them.
            DeviceError: when the processor fails.
        """
        source = self._plan.source
        for form, weights in forms:
            if form in self.left_out:
                continue
            report(f"Slices of {source.id} are converted: {weights}, {form}.")
            try:
                check_route(self._role, source, form, weights)
                self._made[form, weights] = self._convert(form, weights)
            except ExportError as error:
                self.left_out[form] = error
        made = [self._made[each] for each in forms if each in self._made]
        if not made:
            raise next(iter(self.left_out.values()))
        report(f"Slices of {source.id} are timed.")
        self.is_settled &= time_slices(made, rows, _MOST_SECONDS)
        return [
            FormSpeed(
                each.format,
                each.weights,
                {count: each.seconds(count) for count in rows},
                {size: each.seconds(1, size) for size in cuts},
                each.size + self._missing_bytes,
                each.setting,
            )
            for each in made
        ]

    @property
    def _missing_bytes(self) -> int:
        """Of embedding and output matrix, in 8 bits, for the tokens that slices lack."""
        rows = (self._plan.geometry.logits_width - self._checkpoints[0].num_tokens) * (1 if self._is_tied else 2)
        return rows * self._plan.geometry.hidden_size

    def slice_kl(self, forms: Sequence[FormSpeed]) -> list[FormSpeed]:
        """Forms that were measured, with what they lose."""
        report(f"Slices of {self._plan.source.id} are compared with 16 bits.")
        exact = self._convert("openvino", "fp16", self._checkpoints[1:2])
        reference = Reference(exact.parts[0], token_ids=self._text)
        return [
            replace(each, slice_kl=reference.kl(self._made[each.format, each.weights].backends[1])) for each in forms
        ]

    def _convert(self, form: Format, weights: str, checkpoints: Sequence[SliceCheckpoint] = ()) -> FormSlices:
        geometry = self._plan.geometry
        whole = Whole(self._num_layers, geometry.logits_width)
        source = Source(self._plan.source.id, self._plan.source.kind)
        folder = self._folder / f"{form}-{weights}{'-alone' if checkpoints else ''}"
        return FormSlices.make(
            checkpoints or self._checkpoints, (form, weights), folder, self._config, whole, self._role, source
        )

    def _write(self) -> tuple[list[int], list[SliceCheckpoint]]:
        """A text in the slices' tokens, and the slices."""
        plan, geometry = self._plan, self._plan.geometry
        tokenizer = self._tokenizer or self._folder / "tokenizer"
        if self._tokenizer is None:
            copy_tokenizer(plan.header, plan.path, tokenizer)
        text = read_tokenizer(tokenizer).encode(SAMPLE).ids[:NUM_SAMPLED]
        width, num_layers = geometry.logits_width, self._num_layers
        order = np.array([*dict.fromkeys([*text, *range(width)])], np.int64)
        few, many = (np.sort(order[:count]) for count in (_VOCABULARY, _VOCABULARY + _MORE_TOKENS))
        more = _MOST_MORE
        if not geometry.layer_states:
            of_layers = plan.num_weights - (1 if self._is_tied else 2) * width * geometry.hidden_size
            more = min(max(-(-_MORE_WEIGHTS * num_layers // max(of_layers, 1)), 1), _MOST_MORE)
        sizes = [(1, few), (min(1 + more, num_layers), few), *([(1, many)] if len(many) > len(few) else [])]
        made = []
        for number, (count, token_ids) in enumerate(sizes):
            folder = self._folder / f"slice-{number}"
            write_slice(plan.source, count, folder, token_ids)
            made.append(SliceCheckpoint(folder, count, len(token_ids)))
        return np.searchsorted(few, np.array(text, np.int64)).tolist(), made
