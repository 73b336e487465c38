"""Training data on disk: conversations of the main model, and its hidden states for every token of them.

    add_conversations(folder, writer, num_conversations=2000, questions=questions, seed=0)
    write_features(folder, main)
    data = Data(folder)

A folder holds `conversations.jsonl` (one conversation a line: prompt, prompt_token_ids, answer_token_ids, temperature)
and parts features-000, …: of the C conversations of a part and their T tokens, one behind the other,

    tokens.npy     int32   [T]
    answer.npy     bool    [T]         whether the main model wrote the token
    starts.npy     int64   [C + 1]     where conversation c begins; the last is T
    taps.npy       float16 [T, 3 * h]  outputs of decoder layers 1, n/2 - 1 and n - 4, side by side
    last.npy       float16 [T, h]      the last layer's output after the final norm: what the output matrix reads
    greedy.npy     bool    [C]         whether the answer is greedy

Source of the tapped layers: EAGLE-3 (Li et al. 2025), as vLLM and SGLang take them: the inputs of layers 2, n/2, n - 3.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from outrider.errors import ExportError
from outrider_export.train.answers import is_loop

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from outrider_export.train.answers import Writer

HELD_OUT = 20  # every 20th conversation is never trained on
TOKENS_IN_PASS = 8192
_LARGEST_HALF = 65504.0


def tapped_layers(num_layers: int) -> list[int]:
    """The decoder layers whose outputs are taken, counted from 0."""
    if num_layers < 6:
        raise ExportError(f"The main model has {num_layers} layers; taps at 1, n/2 - 1 and n - 4 need at least 6.")
    return [1, num_layers // 2 - 1, num_layers - 4]


def add_conversations(
    folder: Path,
    writer: Writer,
    num_conversations: int,
    questions: Sequence[str],
    seed: int,
    max_new_tokens: int = 192,
) -> int:
    """Append about `num_conversations` to the folder's conversations; returns how many there are then.

    A fifth of the prompts are `questions`, a tenth ask to work on an answer that was given before, the others are made
    up by the main model. Half of the answers are greedy, the others sampled at temperature 0.7.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "conversations.jsonl"
    old = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
    generator = np.random.default_rng((seed, len(old)))
    asked = {each["prompt"] for each in old}
    fresh = [each for each in questions if each not in asked][: num_conversations // 5]
    earlier = [str(writer.tokenizer.decode(each["answer_token_ids"])) for each in old]
    prompts = fresh + _follow_ups(earlier, num_conversations // 10, generator)
    num_made_up = num_conversations - len(prompts)
    prompts += writer.make_prompts(num_made_up, int(generator.integers(2**31)), known=[*asked, *prompts])
    generator.shuffle(prompts)
    half = len(prompts) // 2
    num_conversations = len(old)
    for part, temperature in ((prompts[:half], 0.0), (prompts[half:], 0.7)):
        token_ids = [writer.chat_token_ids(each) for each in part]
        answers = writer.write(token_ids, max_new_tokens, temperature=temperature, seed=int(generator.integers(2**31)))
        with path.open("a", encoding="utf-8") as file:
            for prompt, prompt_token_ids, answer in zip(part, token_ids, answers, strict=True):
                if len(answer) < 4 or is_loop(answer):
                    continue
                num_conversations += 1
                record = {
                    "prompt": prompt,
                    "temperature": temperature,
                    "prompt_token_ids": prompt_token_ids,
                    "answer_token_ids": answer,
                }
                file.write(json.dumps(record) + "\n")
    return num_conversations


_TASKS = (
    "Summarize the following text in two sentences:\n\n{}", "{}\n\nSummarize the text above.",
    "Rewrite this text in simpler words:\n\n{}", "What is the main point of this text?\n\n{}",
    "Read the text and answer in one sentence: what is it about?\n\n{}", "List the key points of the following:\n\n{}",
)  # fmt: skip


def _follow_ups(texts: list[str], count: int, generator: np.random.Generator) -> list[str]:
    if not texts:
        return []
    picked = [texts[int(generator.integers(len(texts)))].strip()[:900] for _ in range(count)]
    return [_TASKS[int(generator.integers(len(_TASKS)))].format(each) for each in picked if len(each) > 200]


def write_features(folder: Path, main: Any) -> int:
    """Run the torch model `main` over the conversations that have no features yet; returns how many tokens those have.

    They become one more part of the data, a folder features-000, features-001, …, so that data can grow.
    """
    import torch

    path = folder / "conversations.jsonl"
    if not path.is_file():
        raise ExportError(f"{path} is missing: write conversations first, with add_conversations.")
    parts = _parts(folder)
    num_done = sum(len(np.load(part / "starts.npy")) - 1 for part in parts)
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()][num_done:]
    if not records:
        return 0
    texts = [each["prompt_token_ids"] + each["answer_token_ids"] for each in records]
    starts = np.cumsum([0, *map(len, texts)], dtype=np.int64)
    layers = tapped_layers(main.config.num_hidden_layers)
    hidden_size, num_tokens = main.config.hidden_size, int(starts[-1])
    new = folder / "unfinished"
    new.mkdir(exist_ok=True)
    taps = _create(new / "taps.npy", (num_tokens, len(layers) * hidden_size))
    last = _create(new / "last.npy", (num_tokens, hidden_size))
    for rows in _passes([len(each) for each in texts]):
        width = max(len(texts[row]) for row in rows)
        # Padded on the right: attention is causal, so that padding changes nothing before it.
        token_ids = torch.tensor([texts[row] + [0] * (width - len(texts[row])) for row in rows])
        with torch.inference_mode():
            states = main.model(input_ids=token_ids, output_hidden_states=True, use_cache=False).hidden_states
        tapped = torch.cat([states[layer + 1] for layer in layers], -1).float().clamp(-_LARGEST_HALF, _LARGEST_HALF)
        final = states[-1].float()
        for i, row in enumerate(rows):
            length = len(texts[row])
            taps[starts[row] : starts[row + 1]] = tapped[i, :length].numpy()
            last[starts[row] : starts[row + 1]] = final[i, :length].numpy()
    taps.flush()
    last.flush()
    written = [[False] * len(each["prompt_token_ids"]) + [True] * len(each["answer_token_ids"]) for each in records]
    np.save(new / "tokens.npy", np.concatenate(texts).astype(np.int32))
    np.save(new / "answer.npy", np.concatenate(written))
    np.save(new / "greedy.npy", np.array([each["temperature"] == 0 for each in records]))
    np.save(new / "starts.npy", starts)
    new.rename(folder / f"features-{len(parts):03}")
    return num_tokens


class Batch(NamedTuple):
    """Conversations side by side, padded on the right."""

    token_ids: Any  # int64 [rows, tokens]
    answer: Any  # bool [rows, tokens]: whether the main model wrote the token
    taps: Any  # float32 [rows, tokens, 3 * h]
    last: Any  # float32 [rows, tokens, h]


class Data:
    """Training data, read from disk as it is needed."""

    def __init__(self, folder: Path) -> None:
        """Open a folder that `write_features` has written to."""
        parts = _parts(folder)
        if not parts:
            raise ExportError(f"{folder} has no features: make them with python -m outrider_export.train data.")
        arrays = ("tokens", "answer", "taps", "last", "starts", "greedy")
        self._parts = [{name: np.load(part / f"{name}.npy", mmap_mode="r") for name in arrays} for part in parts]
        # (part, first token, end, greedy) of every conversation.
        self._all = [
            (index, int(part["starts"][i]), int(part["starts"][i + 1]), bool(part["greedy"][i]))
            for index, part in enumerate(self._parts)
            for i in range(len(part["starts"]) - 1)
        ]
        self.num_tokens = sum(len(part["tokens"]) for part in self._parts)
        self.num_answer_tokens = sum(int(part["answer"].sum()) for part in self._parts)
        self.hidden_size: int = self._parts[0]["last"].shape[1]

    def frequent_tokens(self, count: int, vocab_size: int) -> NDArray[np.int64]:
        """The ids of the tokens that answers have most, in ascending order; of those they lack, the lowest."""
        seen = np.zeros(vocab_size, dtype=np.int64)
        for part in self._parts:
            seen += np.bincount(part["tokens"][part["answer"]], minlength=vocab_size)
        return np.sort(np.argsort(-seen, kind="stable")[:count])

    def tap_scales(self) -> list[float]:
        """The root mean square of each tapped layer: the median of some tokens, as first tokens are far larger."""
        taps = np.asarray(self._parts[0]["taps"][:4096], dtype=np.float32).reshape(-1, 3, self.hidden_size)
        return [float(each) for each in np.median(np.sqrt((taps**2).mean(-1)), axis=0)]

    def batches(self, tokens_in_batch: int, seed: int) -> list[list[int]]:
        """One epoch of training conversations, in random order, each batch of similar lengths: for `read`."""
        generator = np.random.default_rng(seed)
        train = [i for i in range(len(self._all)) if i % HELD_OUT]
        generator.shuffle(train)
        # Lengths are sorted with some noise, so that each epoch has other batches.
        lengths = np.array([self._all[i][2] - self._all[i][1] for i in train]) + generator.normal(0, 20, len(train))
        ordered = [train[i] for i in np.argsort(lengths)]
        found = list(self._split(ordered, tokens_in_batch))
        generator.shuffle(found)
        return found

    def held_out(self, tokens_in_batch: int, max_tokens: int) -> list[list[int]]:
        """Batches of held-out conversations with greedy answers, `max_tokens` in all or a little more."""
        picked: list[int] = []
        num_tokens = 0
        for i in range(0, len(self._all), HELD_OUT):
            _, start, end, greedy = self._all[i]
            if greedy and num_tokens < max_tokens:
                picked.append(i)
                num_tokens += end - start
        return list(self._split(sorted(picked, key=lambda i: self._all[i][2] - self._all[i][1]), tokens_in_batch))

    def read(self, conversations: Sequence[int]) -> Batch:
        """The conversations of one batch."""
        import torch

        spans = [self._all[i] for i in conversations]
        width = max(end - start for _, start, end, _ in spans)

        def stack(name: str, dtype: Any) -> Any:
            first = self._parts[0][name]
            array = np.zeros((len(spans), width, *first.shape[1:]), dtype=dtype)
            for row, (part, start, end, _) in enumerate(spans):
                array[row, : end - start] = self._parts[part][name][start:end]
            return torch.from_numpy(array)

        return Batch(
            stack("tokens", np.int64), stack("answer", np.bool_), stack("taps", np.float32), stack("last", np.float32)
        )

    def _split(self, ordered: Sequence[int], tokens_in_batch: int) -> list[list[int]]:
        return [
            [ordered[i] for i in rows]
            for rows in _passes([self._all[i][2] - self._all[i][1] for i in ordered], tokens_in_batch, keep_order=True)
        ]


def _passes(lengths: Sequence[int], limit: int = TOKENS_IN_PASS, *, keep_order: bool = False) -> list[list[int]]:
    """Rows for one pass each: of similar lengths, `limit` tokens at most with their padding."""
    order = range(len(lengths)) if keep_order else sorted(range(len(lengths)), key=lengths.__getitem__)
    passes: list[list[int]] = []
    widest = 0
    for row in order:
        widest = max(widest, lengths[row])
        if not passes or widest * (len(passes[-1]) + 1) > limit:
            passes.append([])
            widest = lengths[row]
        passes[-1].append(row)
    return passes


def _parts(folder: Path) -> list[Path]:
    return sorted(folder.glob("features-*"))


def _create(path: Path, shape: tuple[int, ...]) -> Any:
    return np.lib.format.open_memmap(path, mode="w+", dtype=np.float16, shape=shape)
