"""What the main model is asked: the user's prompts, and some that it makes up itself.

prompts = read_prompts(Path("prompts.jsonl"))
new = Filter(excluded=texts_in(Path("held-out.jsonl")))
asked = [prompt for prompt in prompts if new.takes(prompt)]
asked += make_prompts(writer, 100, seed=0, first=0, new=new)
"""

from __future__ import annotations

import json
import random
import re
import tomllib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from outrider.errors import ExportError, OptionError, OutriderError
from outrider.system.files import reading
from outrider_distill.texts import WritingTask

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from outrider.inputs.text import Tokenizer
    from outrider_distill.writer import Writer

_NUM_GENERAL = 2600
USER, MODEL, LIST = "user", "model", "general list"
# A made-up turn is complete at a line's end. Shorter ones are mostly fragments.
MIN_WORDS, MAX_MADE_TOKENS = 4, 96
_FIRST_WORDS = 12  # prompts that the model makes up are the same if these are
_DISTINCT = 0.5  # least share of a prompt's words that are different
_TIMES, _SPARE = 6, 1.4  # rounds of making prompts, each of so many times those that are missing
# How requests often begin. Half of the made-up prompts continue one: alone, a small model asks for few kinds of things.
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
_FOLLOW_UPS = (
    "Summarize the following text in two sentences:\n\n{}", "{}\n\nSummarize the text above.",
    "Rewrite this text in simpler words:\n\n{}", "What is the main point of this text?\n\n{}",
    "Read the text and answer in one sentence: what is it about?\n\n{}", "List the key points of the following:\n\n{}",
)  # fmt: skip
_LEAST_ANSWER, _MOST_ANSWER = 200, 900  # characters of an answer that a follow-up is about
# Of a model that declines. Such answers are all alike, and a drafter that learned many of them drafts nothing else.
_REFUSAL = re.compile(
    r"(i'?m|i am) (very |truly |really )?sorry,? but|sorry,? (but )?i (can'?t|cannot|can not|'?m not|am not|am unable)"
    r"|(i apologi[sz]e|my apologies|unfortunately),? (but )?(i|as an ai)\b"
    r"|i (can'?t|cannot|can not|won'?t) (help|assist|provide|fulfill?|comply|answer|do|create|write|access|generate)\b"
    r"|(i'?m|i am) (unable|not able) to\b|i (do not|don'?t) have (the ability|access|personal)"
    r"|as an? (ai|artificial intelligence|large language model|language model)\b"
)
_MARK = "OUTRIDER"  # stands for a user's turn in the chat template


@dataclass(frozen=True, slots=True)
class DistillPrompt:
    """A text, or chat messages of which the last is the user's. source: `USER`, `MODEL` or `LIST`."""

    content: str | list[dict[str, Any]]
    source: str = USER

    @property
    def words(self) -> list[str]:
        """The words of its user turns, in lower case and without punctuation."""
        if isinstance(self.content, str):
            return words_of(self.content)
        return [word for each in self.content if each["role"] == "user" for word in words_of(each["content"])]


def words_of(text: str) -> list[str]:
    """A text's words, in lower case and without punctuation."""
    return re.findall(r"\w+", text.lower())


def read_prompts(path: Path) -> list[DistillPrompt]:
    """The user's prompts: one a line in a .txt file; in a .jsonl file objects with `prompt`, `messages` or `turns`.

    `messages` end at the last one of the user's: the answer after it is the main model's to write. Of `turns`, which
    are the user's alone, the first is asked.

    Raises:
        OptionError: when the file cannot be read, is empty, or a line is of no such form.
    """
    found = [DistillPrompt(each) for record in _records(path) for each in _contents(record)[:1]]
    if not found:
        raise OptionError(f"{path} has no prompts. Write one per line.")
    return found


def general_prompts() -> list[DistillPrompt]:
    """Those of `general_prompts.toml`: topics, asked about in many forms. The same each time.

    What a small model makes up itself is odd and alike, so that half of the prompts are these, or the user's.
    """
    table = tomllib.loads(Path(__file__).with_name("general_prompts.toml").read_text(encoding="utf-8"))
    generator = random.Random(1)  # noqa: S311 - no secrets
    prompts = dict[str, None]()
    while len(prompts) < _NUM_GENERAL:
        topic, other = generator.sample(table["topics"], 2)
        prompts[generator.choice(table["forms"]).format(topic=topic, other=other)] = None
    return [DistillPrompt(each, LIST) for each in prompts]


def texts_in(path: Path) -> list[DistillPrompt]:
    """All texts of a file that must not be asked: as `read_prompts`, but all turns."""
    return [DistillPrompt(each) for record in _records(path) for each in _contents(record)]


def _records(path: Path) -> Iterator[dict[str, Any]]:
    with reading(f"Prompts {path}"):
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        if path.suffix != ".jsonl":
            yield {"prompt": line.strip()}
            continue
        with reading(f"{path}, line {number},"):
            record = json.loads(line)
        if not isinstance(record, dict) or not _contents(record):
            raise OptionError(f"{path}, line {number}, has no 'prompt', 'messages' or 'turns' with text of the user's.")
        yield record


def _contents(record: dict[str, Any]) -> list[str | list[dict[str, Any]]]:
    """What can be asked of a record; empty if it has another form."""
    prompt, messages, turns = (record.get(name) for name in ("prompt", "messages", "turns"))
    if isinstance(prompt, str):
        return [prompt] if prompt.strip() else []
    if isinstance(turns, list):
        return [each for each in turns if isinstance(each, str) and each.strip()]
    if not isinstance(messages, list) or not all(map(_is_message, messages)):
        return []
    ends = [i for i, each in enumerate(messages) if each["role"] == "user"]
    return [messages[: ends[-1] + 1]] if ends else []


def _is_message(each: Any) -> bool:
    return isinstance(each, dict) and all(isinstance(each.get(name), str) for name in ("role", "content"))


class Filter:
    """Removes prompts, and counts them by reason.

    excluded: never asked, such as a benchmark's. known: asked before. The user's prompts are the same if their words
    are; made-up ones, of which many differ in their ends only, if their first twelve are.
    """

    def __init__(self, excluded: Iterable[DistillPrompt] = (), known: Iterable[DistillPrompt] = ()) -> None:
        self.removed: Counter[str] = Counter()
        self._excluded, self._known = set[tuple[str, ...]](), set[tuple[str, ...]]()
        for each in excluded:
            self._excluded |= _keys(each)
        for each in known:
            self._known |= _keys(each)

    def copy(self) -> Filter:
        """One that knows the same prompts, and counts anew."""
        made = Filter()
        made._excluded, made._known = self._excluded, set(self._known)
        return made

    def add(self, prompts: Iterable[DistillPrompt]) -> None:
        """These were asked."""
        for each in prompts:
            self._known |= _keys(each)

    def takes(self, prompt: DistillPrompt) -> bool:
        """Whether to ask a prompt. If so, it is known from now on."""
        reason = self._reason(prompt)
        if reason:
            self.removed[reason] += 1
            return False
        self._known |= _keys(prompt)
        return True

    def _reason(self, prompt: DistillPrompt) -> str:
        keys = _keys(prompt) if prompt.source == MODEL else {tuple(prompt.words)}
        if keys & self._excluded:
            return "excluded prompt"
        if keys & self._known:
            return "duplicate prompt"
        return _fault(prompt.content) if prompt.source == MODEL and isinstance(prompt.content, str) else ""


def _keys(prompt: DistillPrompt) -> set[tuple[str, ...]]:
    words = tuple(prompt.words)
    return {words, words[:_FIRST_WORDS]}


def _fault(text: str) -> str:
    """What is wrong with a made-up prompt; empty if it can be asked."""
    words = text.lower().split()
    if len(words) < MIN_WORDS or "\ufffd" in text:
        return "fragment of a prompt"
    return "loop in a prompt" if len(set(words)) <= _DISTINCT * len(words) else ""


def is_refusal(answer: str) -> bool:
    """Whether an answer begins as one that declines, in English."""
    return _REFUSAL.match(answer.strip().lower().replace("\u2019", "'").lstrip("\"'*# ")) is not None


def make_prompts(
    writer: Writer, count: int, *, seed: int, first: int, new: Filter, watch: Callable[[int], None] = lambda _: None
) -> list[DistillPrompt]:
    """User turns that the main model makes up, from after the chat template's words before a user's turn.

    About `count`, fewer if it repeats itself. first: the number of the first text that is written. new: takes those
    that were not asked before. watch: see `Writer.write`. Source: Magpie (Xu et al. 2024), with openings given for
    half of them.

    Raises:
        ExportError: when the model has no chat template.
    """
    before, ends = _before_a_turn(writer.tokenizer), _LineEnds(writer)
    made: list[DistillPrompt] = []
    for _ in range(_TIMES):
        if (missing := count - len(made)) <= 0:
            break
        tasks, starts = [], {}
        for number in range(first, first := first + round(missing * _SPARE) + 1):
            generator = np.random.default_rng((seed, number))
            start = "" if generator.random() < 0.5 else OPENINGS[int(generator.integers(len(OPENINGS)))]
            starts[number] = start
            tasks.append(WritingTask(number, writer.tokenizer.encode_rendered(before + start), temperature=1.0))
        texts = {}
        for text in writer.write(tasks, seed=seed, max_new_tokens=MAX_MADE_TOKENS, stop=ends, watch=watch):
            words = writer.tokenizer.decode(text.token_ids[text.num_prompt_tokens :].tolist())
            is_whole = text.reason == "stop" and words.strip()
            texts[text.number] = (starts[text.number] + words).strip() if is_whole else ""
        made += [each for number in sorted(texts) if new.takes(each := DistillPrompt(texts[number], MODEL))]
    return made[:count]


def make_follow_ups(answers: Sequence[str], count: int, generator: np.random.Generator) -> list[DistillPrompt]:
    """Prompts that ask to work on an answer that was given before."""
    found = []
    for _ in range(count if answers else 0):
        text = answers[int(generator.integers(len(answers)))].strip()[:_MOST_ANSWER]
        form = _FOLLOW_UPS[int(generator.integers(len(_FOLLOW_UPS)))]
        if len(text) >= _LEAST_ANSWER:
            found.append(DistillPrompt(form.format(text), MODEL))
    return found


def _before_a_turn(tokenizer: Tokenizer) -> str:
    """What the chat template writes before a user's turn."""
    try:
        before, mark, _ = tokenizer.render([{"role": "user", "content": _MARK}]).partition(_MARK)
    except OutriderError as error:
        raise ExportError(f"The main model cannot generate prompts: {error} Give prompts with --prompts.") from error
    if not mark:
        raise ExportError("The main model's chat template changes a user's words. Give prompts with --prompts.")
    return before


class _LineEnds:
    """The tokens that end a made-up turn: the model's own, and those with a line's end. Decoded as they come."""

    def __init__(self, writer: Writer) -> None:
        self._tokenizer = writer.tokenizer
        self._known = dict.fromkeys(writer.end_token_ids, True)

    def __contains__(self, token_id: object) -> bool:
        if not isinstance(token_id, int):
            return False
        if token_id not in self._known:
            self._known[token_id] = "\n" in self._tokenizer.decode([token_id])
        return self._known[token_id]
