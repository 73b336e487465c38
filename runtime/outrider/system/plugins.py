"""What other packages bring: commands and drafters, by the entry points of their distributions.

[project.entry-points."outrider.commands"]
distill = "outrider_distill.command:distill"    # a `click.Command`
[project.entry-points."outrider.drafters"]
mine = "my_package:MyDrafter"                   # called without arguments, when a request first names it
"""

from __future__ import annotations

import functools
from importlib.metadata import EntryPoint, entry_points
from typing import Literal


@functools.cache  # it looks at every distribution, and drafters are listed often
def plugins(kind: Literal["commands", "drafters"]) -> dict[str, EntryPoint]:
    """The plug-ins of a kind that are installed, by name, sorted."""
    return {point.name: point for point in sorted(entry_points(group=f"outrider.{kind}"))}
