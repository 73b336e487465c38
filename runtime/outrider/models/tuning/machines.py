"""What is fastest on a processor without measuring it: its row of `configs/machines.toml`, by its instructions.

machine = this_machine()
machine.main    # ("onnx int4", "openvino int8"): a main model's forms, the best one first
"""

from __future__ import annotations

import functools
import sys
import tomllib
from typing import TYPE_CHECKING

import msgspec

from outrider.config.files import MACHINES, config_folder
from outrider.models.backends.processor import this_processor

if TYPE_CHECKING:
    from outrider.models.backends.processor import ProcessorFacts


class Machine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A row of the table. Its file explains the columns."""

    name: str
    main: tuple[str, ...]
    draft: tuple[str, ...]
    draft_vocab: int
    added_row: float
    has: frozenset[str] = frozenset()
    lacks: frozenset[str] = frozenset()
    rows: int = 0  # 0: multiples of 8
    most_rows: int = 0
    columns: bool = False
    exact: frozenset[str] = frozenset()

    def fits(self, processor: ProcessorFacts, *, tells_all: bool) -> bool:
        """Whether a processor is of this kind. tells_all: whether the system tells all of its instructions."""
        known = {*processor.instructions}
        return self.has <= known and (not self.lacks or (tells_all and not self.lacks & known))


@functools.cache
def read_machines() -> tuple[Machine, ...]:
    """The table."""
    text = (config_folder() / MACHINES).read_text(encoding="utf-8")
    return msgspec.convert(tomllib.loads(text)["machine"], tuple[Machine, ...])


def machine_of(processor: ProcessorFacts, *, tells_all: bool = sys.platform != "win32") -> Machine:
    """The row of a processor. tells_all: as for `Machine.fits`; Windows names few of x86's instructions."""
    return next(each for each in read_machines() if each.fits(processor, tells_all=tells_all))


def this_machine() -> Machine:
    """The row of this machine's processor."""
    return machine_of(this_processor())
