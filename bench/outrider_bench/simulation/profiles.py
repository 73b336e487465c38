"""Profiles: the times of a machine's calls, for `outrider_bench.simulation.simulate`.

    profile = read_profile(Path("core-ultra.toml"))

A profile is TOML, in milliseconds::

    name = "GPU and NPU"
    [main]                      # rows: [..], near and far: a call's time with 256 and 2,048 tokens of context
    rows = [1, 4, 16]
    near = [30, 31, 36]
    far = [33, 34, 40]
    [draft]
    …
    [contention]                # how many times as long a call takes while the other model's runs
    check = 1.1
    draft = 1.2
    [host]
    round = 0.6                 # between two target passes, besides drafting
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import msgspec

from outrider.errors import OptionError
from outrider.models.measure import Contention, PassCost
from outrider.system.files import reading

_LONGEST = 1e9  # milliseconds
_MOST = 8  # far / near: beyond this, a call without context would take less than 0 seconds


class _Calls(msgspec.Struct, forbid_unknown_fields=True):
    rows: tuple[int, ...]
    near: tuple[float, ...]
    far: tuple[float, ...] | None = None

    def cost(self) -> PassCost:
        near = tuple(ms / 1000 for ms in self.near)
        return PassCost(self.rows, near, tuple(ms / 1000 for ms in self.far) if self.far else near)

    def faults(self) -> Iterator[str]:
        """The invalid values, each with its rule."""
        if not self.rows or self.rows[0] < 1 or any(after <= before for before, after in pairwise(self.rows)):
            yield f"rows = {[*self.rows]}: numbers of rows ascend, from 1 or more"
        far = self.near if self.far is None else self.far
        for name, times in (("near", self.near), ("far", far)):
            if len(times) != len(self.rows):
                yield f"{name} = {[*times]}: {len(self.rows)} numbers of rows have as many times"
            if wrong := [ms for ms in times if not 0 < ms < math.inf]:
                yield f"{name} = {[*times]}: {wrong[0]:g} milliseconds is no time of a call, which is above 0"
        for rows, short, long in zip(self.rows, self.near, far, strict=False):
            if not short <= long < _MOST * short:
                yield (
                    f"far = {long:g} where near = {short:g}, for {rows} rows: with more context a call takes at least "
                    f"as long, and less than {_MOST} times as long"
                )


class _Contention(msgspec.Struct, forbid_unknown_fields=True):
    check: float = 1.0
    draft: float = 1.0


class _Host(msgspec.Struct, forbid_unknown_fields=True):
    round: float = 0.5


class _File(msgspec.Struct, forbid_unknown_fields=True):
    main: _Calls
    draft: _Calls
    name: str = ""
    contention: _Contention = msgspec.field(default_factory=_Contention)
    host: _Host = msgspec.field(default_factory=_Host)

    def faults(self) -> Iterator[str]:
        """The invalid values, each with its table and its rule."""
        for table, calls in (("main", self.main), ("draft", self.draft)):
            yield from (f"[{table}] {fault}" for fault in calls.faults())
        for name, times in (("check", self.contention.check), ("draft", self.contention.draft)):
            if not 1 <= times < math.inf:
                yield f"[contention] {name} = {times:g}: next to another, a call takes 1 time as long or more"
        if not 0 <= self.host.round <= _LONGEST:
            yield f"[host] round = {self.host.round:g}: milliseconds are 0 or more, and {_LONGEST:g} at most"


@dataclass(frozen=True, slots=True)
class Profile:
    """The times of a machine's calls. host: seconds per round in which no device works."""

    name: str
    main: PassCost
    draft: PassCost
    contention: Contention
    host: float


def read_profile(path: Path) -> Profile:
    """A profile from a file.

    Raises:
        OptionError: when it is missing, not of the form above, or has an invalid value.
    """
    with reading(f"Profile {path}"):
        try:
            text = path.read_text(encoding="utf-8-sig")
        except FileNotFoundError as error:
            raise OptionError(f"There is no profile {path}.") from error
        file = msgspec.convert(tomllib.loads(text), _File)
        if fault := next(file.faults(), None):
            raise OptionError(f"Profile {path} has {fault}. Correct it.")
        contention = Contention(file.contention.check, file.contention.draft)
        return Profile(file.name or path.stem, file.main.cost(), file.draft.cost(), contention, file.host.round / 1000)
