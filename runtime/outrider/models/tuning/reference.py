"""A model's logits, or a slice's, in f32 without dynamic quantisation: how far other settings are from them."""

from collections.abc import Sequence
from contextlib import closing

import numpy as np
import openvino as ov
from numpy.typing import NDArray

from outrider.errors import BundleError
from outrider.inputs.text import Tokenizer
from outrider.models.cost.slots import copied_rows, open_slot
from outrider.models.tuning.measured import compile_for_trials
from outrider.models.tuning.model_spec import ModelSpec
from outrider.models.tuning.setting import Setting
from outrider.types import Chunk, CompiledModel

SAMPLE = """The harbour was quiet when the last boat came in. Two men tied it to the wall and carried the boxes up
the steps, one after the other, without a word. "How many today?" asked the woman at the scale. "Forty-one," said the
older one, "and three of them are small." She wrote the number into her book, and under it the date, as she had done
for twenty years. Then she looked at the sky. "It will be less tomorrow," she said. "Go home and sleep."

def total(prices: list[float], rate: float = 0.2) -> float:
    \"\"\"The sum of the prices with tax.\"\"\"
    return sum(price * (1 + rate) for price in prices)
"""
NUM_SAMPLED, _NUM_LEFT_OUT = 48, 16  # tokens of it that are read; the first of these are not compared


class Reference:
    """The logits of a text in f32 without dynamic quantisation, calculated at the first use.

    reference = Reference(spec)
    reference.prepare()    # optional: compiles, so that `kl` need not
    reference.kl(backend)

    graph: instead of the model's, such as a slice's. token_ids: the text's; by default of `SAMPLE`.
    """

    def __init__(self, spec: ModelSpec, graph: ov.Model | None = None, token_ids: Sequence[int] = ()) -> None:
        self._spec, self._graph, self._text = spec, graph, token_ids
        self._token_ids: list[int] = []
        self._backend: CompiledModel | None = None
        self._logprobs: NDArray[np.float32] | None = None

    def prepare(self) -> None:
        """Compile the model and read the text's tokens. Raises as `ModelSpec.compile`."""
        self._backend = self._prepared()

    def kl(self, backend: CompiledModel) -> float:
        """The mean KL divergence of a backend's distributions from the reference's, in nats."""
        if self._logprobs is None:
            self._backend = self._backend or self._prepared()
            self._logprobs, self._backend = _logprobs(self._backend, self._token_ids), None
        here = _logprobs(backend, self._token_ids)
        return float((np.exp(self._logprobs) * (self._logprobs - here)).sum(axis=1, dtype=np.float64).mean())

    def _prepared(self) -> CompiledModel:
        self._token_ids = [*self._text] or _sample(self._spec)
        setting = Setting("f32", "f32", group_size=0)
        return compile_for_trials(self._spec, setting, self._graph, 2 * NUM_SAMPLED)  # with room for padding


def _logprobs(backend: CompiledModel, token_ids: Sequence[int]) -> NDArray[np.float32]:
    """The next token's log-probabilities, float32 [n, vocab_size], after all tokens but the first few.

    The first few are left out: they attract all attention, whatever they are.
    """
    count = len(token_ids) - _NUM_LEFT_OUT
    with closing(open_slot(backend, len(token_ids))) as slot:
        chunk = Chunk(slot, token_ids, num_rows=count)
        logits = np.array(copied_rows(backend.submit([chunk]).wait(), chunk), dtype=np.float32)
    logits -= logits.max(axis=1, keepdims=True)
    logits -= np.log(np.exp(logits).sum(axis=1, keepdims=True, dtype=np.float64)).astype(np.float32)
    return logits


def _sample(spec: ModelSpec) -> list[int]:
    """Tokens of a text if the bundle's tokenizer is the model's; otherwise random tokens."""
    vocab_size, found = min(spec.model.vocab_size, spec.model.geometry.logits_width), []
    main = spec.bundle.manifest.main
    if spec.model.vocab_sha256 == main.vocab_sha256 and spec.bundle.tokenizer_path.is_dir():
        try:
            found = [i for i in Tokenizer(spec.bundle.tokenizer_path).encode(SAMPLE) if i < main.vocab_size]
        except BundleError:
            found = []
    if len(found) < NUM_SAMPLED // 2:
        found = np.random.default_rng(0).integers(vocab_size, size=NUM_SAMPLED).tolist()
    return found[:NUM_SAMPLED]
