"""The progress of an export.

Pass any object with these three methods as `progress`; the command line has one that draws bars. The phases of a
model are download (hub ids), read, convert, compress (int8, int4), tokenizer (main model; draft model with another
vocabulary), hash (GGUF files), and where a draft model's output matrix is cut, count (the corpus's tokens) and cut;
each is followed by the model's role: "convert draft". The last phase, "hash", is the bundle's.
"""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Receives an export's events, in order, in the thread that called `export_bundle`."""

    def phase(self, name: str, total: int | None = None) -> None:
        """Begin a phase, which ends the one before; `total` is its length in bytes, if known."""

    def advance(self, count: int) -> None:
        """Advance the current phase by `count` bytes."""

    def note(self, text: str) -> None:
        """A line for the user, such as an automatic choice."""


class ForModel:
    """Adds a model's role to the names of its phases."""

    def __init__(self, progress: Progress, role: str) -> None:
        self._progress = progress
        self._role = role
        self.advance = progress.advance
        self.note = progress.note

    def phase(self, name: str, total: int | None = None) -> None:
        """Begin a phase of this model."""
        self._progress.phase(f"{name} {self._role}", total)


class Silent:
    """The default: ignores all events."""

    def phase(self, name: str, total: int | None = None) -> None:
        """Ignored."""

    def advance(self, count: int) -> None:
        """Ignored."""

    def note(self, text: str) -> None:
        """Ignored."""


class Notes(Silent):
    """Passes notes on, and nothing else: of what is done beside another phase."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress

    def note(self, text: str) -> None:
        """As of the other."""
        self.progress.note(text)
