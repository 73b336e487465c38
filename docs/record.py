"""Draws the README's moving picture: an answer as it came, in real time, with the source of each token.

    python docs/record.py           # writes images/chat.svg; for an idle machine

The model is the demo's, SmolLM2-135M in int8 with its drafter. The picture has no script: it is CSS in an SVG file.
"""

from __future__ import annotations

import time
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import outrider
from outrider.cli.demo import PROMPTS, demo_bundle
from outrider.system import saved

if TYPE_CHECKING:
    from collections.abc import Iterator

PICTURE = Path(__file__).with_name("images") / "chat.svg"
PROMPT = PROMPTS["fix code"]
COLUMNS, LEADING, LETTER = 88, 24, 8.4  # characters of a line; pixels of a line and of a character
PAUSE = 1.2, 4.0  # seconds before the answer and after it
SOURCES = {"accepted": "right draft", "recovered": "in place of a wrong one", "bonus": "after a draft", "plain": ""}
STYLE = """
:root { color-scheme: light dark; --paper: #fff; --ink: #1b1d28; --soft: #565b70; --line: #c9cddd; --asked: #e6e9fa;
  --accepted: #bfecca; --recovered: #ffdcb8; --bonus: #cfe0ff; --plain: #eef0f6 }
@media (prefers-color-scheme: dark) { :root { --paper: #1d1f2a; --ink: #e9eaf2; --soft: #a9aec4; --line: #363a4d;
  --asked: #2b3052; --accepted: #1b5533; --recovered: #643c14; --bonus: #234681; --plain: #2a2d3b } }
text { font: 14px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; fill: var(--ink); white-space: pre }
.soft { fill: var(--soft) } .paper { fill: var(--paper); stroke: var(--line) } .asked { fill: var(--asked) }
.accepted { fill: var(--accepted) } .recovered { fill: var(--recovered) } .bonus { fill: var(--bonus) }
.plain { fill: var(--plain) }
@media (prefers-reduced-motion: reduce) { g { animation: none !important } }
"""


def record() -> tuple[list[tuple[float, str, str]], Any]:
    """The tokens of an answer: the second when each came, its text and its source. And the answer's figures."""
    with outrider.load(demo_bundle(saved.FOLDER, quiet=False), max_new_tokens=160, keep_records=False) as engine:
        engine.generate(PROMPTS["list"])  # the first answer packs the drafter's weights
        messages = [{"role": "user", "content": PROMPT}]
        began, came = time.perf_counter(), []
        for chunk in engine.stream(messages, earlier_answers=False):
            came += [(time.perf_counter() - began, token.source) for token in chunk.tokens]
        token_ids = chunk.result.token_ids if chunk.result else []
        texts = [engine.tokenizer.decode(token_ids[:i]) for i in range(len(token_ids) + 1)]
        stats = chunk.stats
    return [(at, texts[i + 1][len(texts[i]) :], source) for i, (at, source) in enumerate(came)], stats


def place(text: str) -> list[tuple[int, int]]:
    """Line and column of each character; lines are broken at spaces."""
    places: list[tuple[int, int]] = []
    line = 0
    for written in text.split("\n"):
        column = 0
        for i, letter in enumerate(written):
            rest = written[i:]
            word = len(rest) - len(rest.lstrip()) if letter == " " else len(rest.split(" ")[0])
            if column and (letter != " " and written[i - 1] == " ") and column + word > COLUMNS:
                line, column = line + 1, 0
            places.append((line, column))
            column += 1
        places.append((line, column))  # the line's end
        line += 1
    return places


def runs(text: str, places: list[tuple[int, int]]) -> Iterator[tuple[int, int, str]]:
    """The parts of a token in one line each: line, column, text."""
    begin = 0
    for i in range(1, len(text) + 1):
        if i == len(text) or places[i][0] != places[begin][0] or text[i - 1] == "\n":
            if shown := text[begin:i].rstrip("\n"):
                yield *places[begin], shown
            begin = i


def draw(tokens: list[tuple[float, str, str]], stats: Any) -> str:
    """The SVG file."""
    left, width = 24, round(COLUMNS * LETTER) + 48
    asked = PROMPT.replace("\n\n```python", "").removesuffix("\n```")
    asked_places = place(asked)
    asked_height = (asked_places[-1][0] + 1) * LEADING + 16
    top = 64 + asked_height + 22
    whole = "".join(text for _, text, _ in tokens)
    places = place(whole)
    height = top + (places[-1][0] + 1) * LEADING + 44
    seconds = PAUSE[0] + tokens[-1][0] + PAUSE[1]

    def words(x: float, y: float, text: str, kind: str = "") -> str:
        mark = f' class="{kind}"' if kind else ""
        return f'<text x="{x:g}" y="{y:g}" textLength="{len(text) * LETTER:.1f}"{mark}>{escape(text)}</text>'

    parts = [f'<rect class="paper" x=".5" y=".5" width="{width - 1}" height="{height - 1}" rx="12"/>']
    x = float(left)
    for source, meaning in SOURCES.items():
        parts.append(
            f'<rect class="{source}" x="{x:g}" y="16" width="{(len(source) + 1) * LETTER:.1f}" height="21" rx="4"/>'
        )
        parts.append(words(x + LETTER / 2, 31, source))
        x += (len(source) + 2) * LETTER
        if meaning:
            parts.append(words(x, 31, meaning, "soft"))
            x += (len(meaning) + 2) * LETTER
    parts.append(f'<rect class="asked" x="12" y="52" width="{width - 24}" height="{asked_height}" rx="10"/>')
    for line, column, text in runs(asked, asked_places):
        parts.append(words(left + column * LETTER, 76 + line * LEADING, text))
    moves, drawn = [], 0
    rounds: dict[float, list[str]] = {}
    for at, text, source in tokens:
        group = rounds.setdefault(round(at, 3), [])
        for line, column, shown in runs(text, places[drawn : drawn + len(text)]):
            x, y = left + column * LETTER, top + line * LEADING
            size = f'width="{len(shown) * LETTER:.1f}" height="20"'
            group.append(f'<rect class="{source}" x="{x:.1f}" y="{y - 15}" {size} rx="3"/>{words(x, y, shown)}')
        drawn += len(text)
    rounds.setdefault(round(tokens[-1][0] + 0.05, 3), []).append(words(left, height - 18, str(stats), "soft"))
    for i, (at, group) in enumerate(rounds.items()):
        share = 100 * (PAUSE[0] + at) / seconds
        moves.append(
            f"@keyframes k{i} {{ 0%, {share:.2f}% {{ opacity: 0 }} {share + 0.01:.2f}%, 100% {{ opacity: 1 }} }}"
        )
        moves.append(f"#g{i} {{ animation: k{i} {seconds:.2f}s infinite }}")
        parts.append(f'<g id="g{i}">{"".join(group)}</g>')
    said = "An answer as it came, with the source of each token: accepted, recovered, bonus or plain"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" aria-label="{said}">\n'
        f"<style>{STYLE}{chr(10).join(moves)}\n</style>\n" + "\n".join(parts) + "\n</svg>\n"
    )


if __name__ == "__main__":
    PICTURE.write_text(draw(*record()), encoding="utf-8")
    print(f"{PICTURE}: {PICTURE.stat().st_size / 1e3:.0f} kB")
