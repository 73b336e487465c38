"""Writes the training data: what is asked, shard by shard, and which answers are kept.

    recipe = Recipe(num_tokens=2_000_000, taps=True)
    write_data(folder, bundle, recipe, prompts=read_prompts(path), progress=print)
    data = Data(folder)

A shard is a function of the recipe, the prompts and the main model: prompts and random numbers depend on the seed, the
number of the conversation and the position, and shards begin with an empty batch. So what was killed is written again
as it would have been, from the first shard that is not there.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import shutil
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.bundle import Bundle
from outrider.errors import ExportError, RequestError
from outrider.inputs.text import Tokenizer
from outrider.system.files import reading, write_whole
from outrider_distill.data import (
    LEAST_ANSWER,
    USUAL_PROMPT,
    Conversation,
    Recipe,
    Shard,
    bytes_per_token,
    find_shards,
    tap_names,
)
from outrider_distill.prompts import LIST, DistillPrompt, Filter, is_refusal, make_follow_ups, make_prompts
from outrider_distill.texts import DistillText, WritingTask, is_loop
from outrider_distill.writer import Writer

TEMPERATURE = 0.7  # of every second answer; the others are greedy
_FOLLOW_UP_SHARE = 0.1  # of the prompts
_BEGINNING = 40  # tokens of an answer that are looked at for a refusal
_TURNS = 3  # least conversations of a shard for each place in the batch, which is not full at the shard's end
_NUMBERS = 1 << 20  # of texts that one shard may write
_TELL = 1.0  # seconds
# Files: all shards have the conversations, and are written in batches, of the sizes that were chosen at first.
_SHARD_SIZE, _BATCH_SIZE = "shard_size", "batch_size"
_MIN_ANSWERS = 8  # answers, whose mean length says little of the others'


@dataclass(frozen=True)
class DataProgress:
    """How far the data is.

    num_tokens: of the answers that are kept, of which num_safe are in whole shards, which a stop leaves. num_expected:
    tokens in the end, as the last shard is written to its end; `num_wanted` as long as that is not known. num_written:
    in this run, in removed texts and made-up prompts too, in `seconds`. seconds_left: None if unknown. is_asking:
    whether answers are written, not prompts. removed: how many prompts and answers, by reason.
    """

    num_tokens: int
    num_safe: int
    num_wanted: int
    num_expected: int
    num_conversations: int
    num_written: int
    seconds: float
    seconds_left: float | None
    is_asking: bool
    batch_size: int
    removed: dict[str, int]


def write_data(
    folder: Path,
    bundle: Bundle,
    recipe: Recipe,
    *,
    prompts: Sequence[DistillPrompt] = (),
    excluded: Sequence[DistillPrompt] = (),
    progress: Callable[[DataProgress], None] = lambda _: None,
    batch_size: int | None = None,
    is_late: Callable[[], bool] = lambda: False,
) -> DataProgress:
    """Write shards until there are `recipe.num_tokens`; go on with those that are there.

    prompts: the user's or general ones, half of all as long as there are some; the main model makes up the others. It
    answers general ones only if it can make up some, as a model without a chat template cannot. excluded: prompts
    that are never asked. progress: called about once a second; whatever it raises ends the writing, and the shard under
    way is lost. batch_size: see `Writer`. is_late: whether to be content with what is there: no answer begins then.

    Raises:
        ExportError: when the disk is full, nothing is left to ask or no
            answer can be kept.
        BundleError, OptionError, DeviceError: as `outrider.load`.
    """
    return _Job(folder, bundle, recipe, (prompts, excluded), batch_size, progress).run(is_late)


def _stored(folder: Path, name: str) -> int | None:
    """A size that a folder's data is written with; None for a new folder."""
    path = folder / name
    if not path.exists():
        return None
    with reading(str(path), "Name another folder.", ExportError):
        return int(path.read_text(encoding="utf-8"))


class _Job:
    """Writing one folder's data."""

    def __init__(
        self,
        folder: Path,
        bundle: Bundle,
        recipe: Recipe,
        prompts: tuple[Sequence[DistillPrompt], Sequence[DistillPrompt]],
        batch_size: int | None,
        progress: Callable[[DataProgress], None],
    ) -> None:
        self._folder, self._bundle, self._recipe, self._progress = folder, bundle, recipe, progress
        geometry = bundle.manifest.main.geometry
        self._hidden_size = geometry.hidden_size
        self._batch_size = batch_size or _stored(folder, _BATCH_SIZE)
        self._shard_size = _stored(folder, _SHARD_SIZE) or recipe.shard_size
        self._options: dict[str, Any] = {
            "features": tap_names(geometry.num_layers) if recipe.taps else (),
            "max_new_tokens": recipe.max_new_tokens,
            "batch_size": self._batch_size,
            "max_batch_size": self._shard_size // _TURNS,
        }
        self._filter = Filter(prompts[1])
        self._prompts = [each for each in prompts[0] if self._filter.takes(each)]
        self._removed = Counter(self._filter.removed)
        self._kept = _Kept()  # of the shard under way
        self._num_tokens = self._num_conversations = self._num_written = 0
        self._ended = _Ended()
        self._began = self._told = time.monotonic()
        for shard in find_shards(folder):
            self._count(shard)
        self._num_before = self._num_tokens

    def run(self, is_late: Callable[[], bool]) -> DataProgress:
        """Write the shards that are missing."""

        def is_enough() -> bool:
            return self._num_tokens >= self._recipe.num_tokens or (self._num_tokens > 0 and is_late())

        if not is_enough():
            self._open()
        while not is_enough():
            index = len(find_shards(self._folder))
            self._check_disk()
            with Shard(self._folder, index, self._hidden_size, taps=self._recipe.taps) as shard:
                self._fill(shard, index, is_late)
            self._kept, self._ended = _Kept(), _Ended()
            self._count(shard.path)
        return self._state

    def _open(self) -> None:
        """Open the main model. All shards are written in batches of the size that was chosen at first."""
        self._writer = Writer(self._bundle, **self._options)
        self._batch_size = self._writer.batch_size
        if not self._writer.tokenizer.has_chat_template:  # such a model goes on with texts, and is asked nothing
            self._prompts = [each for each in self._prompts if each.source != LIST]
        with reading(str(self._folder), "Name another folder.", ExportError):
            self._folder.mkdir(parents=True, exist_ok=True)
            for name, size in ((_SHARD_SIZE, self._shard_size), (_BATCH_SIZE, self._batch_size)):
                write_whole(self._folder / name, str(size).encode())

    @property
    def _state(self) -> DataProgress:
        seconds, safe, wanted = time.monotonic() - self._began, self._num_tokens, self._recipe.num_tokens
        per_shard = self._ended.expected
        expected = safe + per_shard * math.ceil((wanted - safe) / per_shard) if per_shard and safe < wanted else 0
        done = safe - self._num_before + self._ended.num_tokens
        left = seconds * (expected - safe - self._ended.num_tokens) / done if expected and done else None
        return DataProgress(
            safe + self._kept.num_tokens,
            safe,
            wanted,
            max(expected, wanted, safe),
            self._num_conversations + self._kept.num_conversations,
            self._num_written,
            seconds,
            left,
            bool(self._ended.num_asked),
            self._batch_size or 0,
            dict(sorted((self._removed + self._kept.removed).items())),
        )

    def _count(self, path: Path) -> None:
        """Take a finished shard into account."""
        with reading(f"The shard {path}", "Delete it, and it is written again.", ExportError):
            lines = (path / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
            asked = [json.loads(line) for line in lines]
            self._filter.add(DistillPrompt(each["prompt"], each["source"]) for each in asked)
            self._removed += Counter(json.loads((path / "removed.json").read_text(encoding="utf-8")))
            self._num_tokens += int(np.load(path / "answer.npy").sum())
            self._num_conversations += len(asked)

    def _fill(self, shard: Shard, index: int, is_late: Callable[[], bool]) -> None:
        """Ask a shard's prompts, and add the answers in the prompts' order."""
        kept, first = self._kept, index * _NUMBERS
        asked = self._asked(index)
        self._ended.num_asked = len(asked)
        tasks = [WritingTask(first + i, token_ids, TEMPERATURE * (i % 2)) for i, (_, token_ids) in enumerate(asked)]
        least = self._batch_size or 1
        begun = itertools.takewhile(lambda task: task.number - first < least or not is_late(), tasks)
        waiting: dict[int, DistillText] = {}  # for those before them
        place = 0
        for text in self._writer.write(begun, seed=self._recipe.seed, watch=self._watch):
            waiting[text.number - first] = text
            self._ended.count(text)
            while (found := waiting.pop(place, None)) is not None:
                if kept.takes(found, self._writer.tokenizer):
                    shard.add(self._conversation(found, asked[place][0], greedy=not tasks[place].temperature))
                place += 1
        if not kept.num_tokens:
            removed = ", ".join(f"{reason}: {count}" for reason, count in sorted(kept.removed.items()))
            raise ExportError(f"No answer of shard {index} can be kept ({removed}). Give other prompts.")
        shard.removed = kept.removed

    def _conversation(self, text: DistillText, prompt: DistillPrompt, *, greedy: bool) -> Conversation:
        rows: dict[str, NDArray[Any]] = {
            "tokens": text.token_ids,
            "answer": np.arange(len(text.token_ids)) >= text.num_prompt_tokens,
            "top_ids": text.top_ids,
            "top_probs": text.top_probs,
        }
        if text.features is not None:
            rows["taps"] = text.features
        return Conversation(prompt.content, prompt.source, greedy, rows)

    def _asked(self, index: int) -> list[tuple[DistillPrompt, list[int]]]:
        """A shard's prompts in the order in which they are asked, with their token ids."""
        size, seed = self._shard_size, self._recipe.seed
        generator = np.random.default_rng((seed, index))
        can_make = self._writer.tokenizer.has_chat_template
        count = round(size * self._recipe.user_share) if can_make else size
        prompts = self._shuffled[index * count : (index + 1) * count]
        fresh = self._filter.copy()
        if can_make:
            count = min(round(size * _FOLLOW_UP_SHARE), size - len(prompts))
            made = make_follow_ups(self._earlier(index), count, generator)
            prompts += [each for each in made if fresh.takes(each)]
            first = index * _NUMBERS + size
            prompts += make_prompts(
                self._writer, size - len(prompts), seed=seed, first=first, new=fresh, watch=self._watch
            )
        self._kept.removed.update(fresh.removed)
        order = generator.permutation(len(prompts))
        asked = [(each, token_ids) for each in (prompts[i] for i in order) if (token_ids := self._encode(each))]
        if not asked:
            raise ExportError(
                f"All prompts are used: {len(self._prompts):,} prompts of yours gave {self._num_tokens:,} "
                f"tokens of {self._recipe.num_tokens:,}. Give more prompts, or ask for fewer tokens."
            )
        return asked

    def _encode(self, prompt: DistillPrompt) -> list[int]:
        """A prompt's token ids; none if it cannot be asked."""
        try:
            token_ids = self._writer.tokenizer.encode_prompt(prompt.content)
        except RequestError:
            self._kept.removed["prompt that the chat template refuses"] += 1
            return []
        if len(token_ids) > (most := self._writer.max_prompt_tokens):
            self._kept.removed[f"prompt above {most:,} tokens"] += 1
            return []
        return token_ids

    @functools.cached_property
    def _shuffled(self) -> list[DistillPrompt]:
        """The user's prompts in the order in which they are asked."""
        order = np.random.default_rng(self._recipe.seed).permutation(len(self._prompts))
        return [self._prompts[i] for i in order]

    def _earlier(self, index: int) -> list[str]:
        """The answers of the shard before."""
        if not index:
            return []
        path = find_shards(self._folder)[index - 1]
        tokens, answer, starts = (np.load(path / f"{name}.npy") for name in ("tokens", "answer", "starts"))
        spans = [slice(begin, end) for begin, end in itertools.pairwise(starts)]
        return [self._writer.tokenizer.decode(tokens[span][answer[span]].tolist()) for span in spans]

    def _check_disk(self) -> None:
        """Raise if the next shard may not fit on the disk."""
        tokens = self._shard_size * (USUAL_PROMPT + self._recipe.max_new_tokens)
        wanted = tokens * bytes_per_token(self._hidden_size, taps=self._recipe.taps)
        if (free := shutil.disk_usage(self._folder).free) < wanted:
            raise ExportError(
                f"{self._folder} has {free / 1e9:.2f} GB of disk space left; the next shard may need "
                f"{wanted / 1e9:.2f} GB. Free some, or ask for fewer tokens than {self._recipe.num_tokens:,}."
            )

    def _watch(self, num_written: int) -> None:
        self._num_written += num_written
        if time.monotonic() - self._told > _TELL:
            self._told = time.monotonic()
            self._progress(self._state)


@dataclass(slots=True)
class _Ended:
    """The answers of a shard that have ended, kept or not."""

    num_asked: int = 0
    num_texts: int = 0
    num_tokens: int = 0

    def count(self, text: DistillText) -> None:
        """Add one."""
        self.num_texts += 1
        self.num_tokens += len(text.token_ids) - text.num_prompt_tokens

    @property
    def expected(self) -> int:
        """Tokens of all of the shard's answers, when a few have ended; 0 before."""
        return self.num_tokens * self.num_asked // self.num_texts if self.num_texts > _MIN_ANSWERS else 0


class _Kept:
    """What a shard keeps, and how much it leaves out, by reason."""

    def __init__(self) -> None:
        self.num_tokens = self.num_conversations = 0
        self.removed: Counter[str] = Counter()

    def takes(self, text: DistillText, tokenizer: Tokenizer) -> bool:
        """Whether a drafter can learn from a text."""
        answer = text.token_ids[text.num_prompt_tokens :].tolist()
        reason = ""
        if text.reason == "loop" or is_loop(answer):
            reason = "loop in an answer"
        elif len(answer) < LEAST_ANSWER:
            reason = f"answer below {LEAST_ANSWER} tokens"
        elif is_refusal(tokenizer.decode(answer[:_BEGINNING])):
            reason = "refusal"
        if reason:
            self.removed[reason] += 1
            return False
        self.num_tokens += len(answer)
        self.num_conversations += 1
        return True
