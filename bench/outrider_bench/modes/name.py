"""The names of modes; see `outrider_bench.modes` for their form."""

from __future__ import annotations

import re
from dataclasses import dataclass

from outrider.errors import OptionError
from outrider_bench.modes.peers.known import PEERS, PRECISIONS


@dataclass(frozen=True, slots=True)
class ModeName:
    """A parsed name of a mode.

    number: draft tokens a round, or genai-dynamic's threshold; None: not given. bundle: the name of
    another bundle to run on. precision: a peer's; empty: its default.
    """

    text: str
    kind: str
    number: float | None
    bundle: str = ""
    precision: str = ""

    @classmethod
    def parse(cls, text: str) -> ModeName:
        """Parse a name.

        Raises:
            OptionError: when it is not KIND or KIND:N, with or without /PRECISION or @NAME.
        """
        head, _, bundle = text.partition("@")
        name, _, precision = head.partition("/")
        kind, _, number = name.partition(":")
        form = r"\d*\.?\d+" if kind == "genai-dynamic" else r"\d+"
        empty = ("@" in text) != bool(bundle) or ("/" in head) != bool(precision)
        if not kind or (":" in name and not re.fullmatch(form, number)) or empty:
            raise OptionError(f"There is no mode '{text}': write KIND or KIND:N, such as draft or draft:3.")
        if bundle and kind in PEERS:
            raise OptionError(f"Mode '{text}' cannot be run: only Outrider's modes can have another bundle.")
        if precision and (kind not in PEERS or not PEERS[kind].precisions):
            raise OptionError(
                f"Mode '{text}' cannot be run: only openvino-genai's modes name a precision, as genai/f32. "
                "Outrider's use --precision."
            )
        if precision and precision not in PRECISIONS:
            raise OptionError(
                f"Mode '{text}' names no precision: write one of {', '.join(PRECISIONS)} after the slash."
            )
        return cls(text, kind, float(number) if number else None, bundle, precision)

    @property
    def num_assistant_tokens(self) -> int | None:
        """Draft tokens per round, for modes that take them."""
        return None if self.number is None else int(self.number)

    @property
    def worker(self) -> str:
        """The worker. Modes of one worker share their models: our own, or a peer's."""
        if self.kind in PEERS:
            return PEERS[self.kind].worker + (f"-{self.precision}" if self.precision else "")
        return f"outrider@{self.bundle}" if self.bundle else "outrider"


def split_modes(modes: str) -> list[str]:
    """The names in a comma-separated list.

    Raises:
        OptionError: for a name that is not of the form above, or that occurs twice.
    """
    names = [name.strip() for name in modes.split(",")]
    for name in names:
        ModeName.parse(name)
        if names.count(name) > 1:
            raise OptionError(f"Mode '{name}' is given twice. Leave one out.")
    return names
