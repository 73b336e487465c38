"""The main model's own text, in large batches: prompts that it makes up, and its answers.

    writer = Writer(bundle_folder)
    prompts = writer.make_prompts(num_prompts=1000, seed=0)
    token_ids = [writer.chat_token_ids(each) for each in prompts]
    answers = writer.write(token_ids, max_new_tokens=192, temperature=0.0, seed=0)

Text comes from the bundle's OpenVINO model, as it will run: a drafter learns the answers of the weights that it will
draft for, and generation in 8 bits is several times as fast as torch on a CPU.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np

from outrider.errors import ExportError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

# Rows in a batch: beyond this the matrix products are no faster for each row, on processors with two cores.
BATCH_SIZE = 128
# A user's turn is complete at a line's end. Shorter ones are mostly fragments.
MIN_PROMPT_WORDS, MAX_PROMPT_TOKENS = 4, 96
# How requests often begin. Half of the prompts continue one of them: alone, a small model asks for few kinds of things.
OPENINGS = (
    "Write a Python function that", "Write a short story about", "Explain how", "What is the difference between",
    "What is", "What are", "How do I", "How can I", "Why does", "Give me", "List", "Write an email to",
    "Write a poem about", "Who was", "When did", "Where is", "Describe", "Can you explain",
    "Write a SQL query", "Write a C++ program",
    "Rewrite the following sentence:", "Translate", "Suggest", "Create a", "Compare", "Fix the bug in this code:",
    "Write a JavaScript function", "Is it true that", "Calculate", "A train", "If I have", "Tell me about",
    "What happens if", "Name three", "Write a product description for", "Give step-by-step instructions for",
    "Answer the question:", "Edit the following text to be more formal:", "I want to", "My",
)  # fmt: skip


class Writer:
    """Writes text with a bundle's main model. Opens the model once; not for several threads."""

    def __init__(self, bundle: Path) -> None:
        """`bundle`: a folder as `outrider export` writes it, with main/openvino_model.xml and tokenizer/."""
        import openvino
        from tokenizers import Tokenizer

        model, tokenizer = bundle / "main" / "openvino_model.xml", bundle / "tokenizer"
        for needed in (model, tokenizer / "tokenizer.json", tokenizer / "tokenizer_config.json"):
            if not needed.is_file():
                raise ExportError(
                    f"{needed} is missing: give a bundle in the openvino format, made by outrider export."
                )
        self.tokenizer = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
        config = json.loads((tokenizer / "tokenizer_config.json").read_text(encoding="utf-8"))
        self._template: str = config["chat_template"]
        stop = json.loads((bundle / "outrider.json").read_text(encoding="utf-8"))["tokenizer"]["eos_token_ids"]
        self.stop_token_ids = frozenset(map(int, stop))
        self._core = openvino.Core()
        network = self._core.read_model(model)
        _keep_last_row(network)
        precise = {"INFERENCE_PRECISION_HINT": "bf16"}
        self._request = self._core.compile_model(network, "CPU", precise).create_infer_request()

    def chat_token_ids(self, text: str) -> list[int]:
        """The token ids of a conversation of one user turn, up to where the answer begins."""
        return self._encode(self._chat(text))

    def make_prompts(self, num_prompts: int, seed: int, known: Sequence[str] = ()) -> list[str]:
        """User turns that the main model makes up, sampled from behind the chat template's words before a user's turn.

        Without those in `known`, duplicates, loops and fragments: about `num_prompts`, rather fewer.
        Source: Magpie (Xu et al. 2024), with openings given for half of them.
        """
        generator = np.random.default_rng(seed)
        before = self._chat("\0").split("\0")[0]
        starts = [
            "" if generator.random() < 0.5 else OPENINGS[int(generator.integers(len(OPENINGS)))]
            for _ in range(num_prompts)
        ]
        line_ends = {i for i in range(self.tokenizer.get_vocab_size()) if "\n" in self.tokenizer.decode([i])}
        token_ids = [self._encode(before + start) for start in starts]
        made = self.write(
            token_ids, MAX_PROMPT_TOKENS, temperature=1.0, seed=seed, stop=line_ends | self.stop_token_ids
        )
        prompts: dict[str, None] = {}
        seen = {" ".join(each.lower().split()) for each in known}
        for start, continuation in zip(starts, made, strict=True):
            text = (start + self.tokenizer.decode(continuation)).strip()
            key = " ".join(text.lower().split())
            if len(continuation) < MAX_PROMPT_TOKENS and key not in seen and is_good_prompt(text):
                seen.add(key)
                prompts[text] = None
        return list(prompts)

    def write(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        *,
        temperature: float,
        seed: int,
        stop: frozenset[int] | set[int] | None = None,
    ) -> list[list[int]]:
        """For each prompt's token ids, those of its continuation, with the stop token if it came to one."""
        generator = np.random.default_rng(seed)
        stop = self.stop_token_ids if stop is None else stop
        texts: list[list[int]] = [[] for _ in prompts]
        for rows in _batches([len(each) for each in prompts], BATCH_SIZE):
            found = self._write_batch([prompts[row] for row in rows], max_new_tokens, temperature, generator, stop)
            for row, text in zip(rows, found, strict=True):
                texts[row] = text
        return texts

    def _write_batch(
        self,
        prompts: list[Sequence[int]],
        max_new_tokens: int,
        temperature: float,
        generator: np.random.Generator,
        stop: frozenset[int] | set[int],
    ) -> list[list[int]]:
        self._request.reset_state()
        width = max(map(len, prompts))
        # Padded on the left: int64 [rows, width].
        token_ids = np.array([[0] * (width - len(each)) + list(each) for each in prompts], dtype=np.int64)
        mask = np.array([[0] * (width - len(each)) + [1] * len(each) for each in prompts], dtype=np.int64)
        positions = np.maximum(mask.cumsum(1) - 1, 0)
        beams = np.arange(len(prompts), dtype=np.int32)
        texts: list[list[int]] = [[] for _ in prompts]
        running = np.arange(len(prompts))  # the rows of `texts` that are still in the model's batch
        for _ in range(max_new_tokens):
            logits = self._request.infer(
                {"input_ids": token_ids, "attention_mask": mask, "position_ids": positions, "beam_idx": beams},
                share_outputs=True,
            )[0][:, -1]
            chosen = choose(logits, temperature, generator)
            for row, token_id in zip(running, chosen, strict=True):
                texts[row].append(int(token_id))
            beams = np.array([i for i, token_id in enumerate(chosen) if int(token_id) not in stop], dtype=np.int32)
            if not len(beams):
                break
            # Ended rows leave the batch: the model's state is gathered by beam_idx.
            running, token_ids, mask = running[beams], chosen[beams, None], mask[beams]
            positions = positions[beams, -1:] + 1
            mask = np.concatenate([mask, np.ones((len(beams), 1), dtype=np.int64)], axis=1)
        return texts

    def _chat(self, text: str) -> str:
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        template = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True).from_string(self._template)
        return template.render(messages=[{"role": "user", "content": text}], add_generation_prompt=True)

    def _encode(self, text: str) -> list[int]:
        token_ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return token_ids


def choose(logits: NDArray[np.float32], temperature: float, generator: np.random.Generator) -> NDArray[np.int64]:
    """One token id for each row, int64 [rows]. logits: float32 [rows, vocab]. Temperature 0 takes the largest."""
    if temperature == 0:
        return np.asarray(logits.argmax(-1), dtype=np.int64)
    import torch

    # The inverse of the distribution function: one random number a row, instead of one for each token.
    sums = torch.softmax(torch.from_numpy(np.ascontiguousarray(logits)) / temperature, -1).cumsum(-1)
    at = torch.from_numpy(generator.random((len(logits), 1), dtype=np.float32)) * sums[:, -1:]
    found: NDArray[np.int64] = torch.searchsorted(sums, at).clamp(max=logits.shape[-1] - 1)[:, 0].numpy()
    return found


def is_good_prompt(text: str) -> bool:
    """Whether a made-up user turn can be asked: long enough, plain text, no loop."""
    words = text.lower().split()
    return len(words) >= MIN_PROMPT_WORDS and "\ufffd" not in text and len(set(words)) > 0.5 * len(words)


def is_loop(token_ids: Sequence[int]) -> bool:
    """Whether a text repeats itself for most of its length. Any drafter gets such text right, so it teaches nothing."""
    return len(token_ids) >= 64 and len(set(token_ids)) < 0.25 * len(token_ids)


def _batches(lengths: list[int], size: int) -> Iterator[list[int]]:
    """Rows of similar lengths, `size` at a time."""
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    for start in range(0, len(order), size):
        yield order[start : start + size]


def _keep_last_row(network: Any) -> None:
    """Cut the output matrix's input down to the last position, so that a prompt's other logits are not computed."""
    from openvino import opset13

    node = network.output("logits").get_node().input_value(0).get_node()
    while node.get_type_name() != "MatMul":
        node = node.input_value(0).get_node()
    last = opset13.gather(node.input_value(0), np.array([-1], dtype=np.int64), np.int64(1))
    node.input(0).replace_source_output(last.output(0))
    network.validate_nodes_and_infer_types()
