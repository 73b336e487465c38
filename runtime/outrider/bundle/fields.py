"""Types of a manifest's fields, and their bounds."""

from __future__ import annotations

from typing import Annotated

import msgspec

NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]*\Z"  # not $, which a line's end may follow
# Room is made for these before any weights are seen; real models have some hundred layers, and are 20,000 wide.
MOST_LAYERS, MOST_WIDTH = 10_000, 1 << 20

Positive = Annotated[int, msgspec.Meta(ge=1)]
NonNegative = Annotated[int, msgspec.Meta(ge=0)]
Width = Annotated[int, msgspec.Meta(ge=1, le=MOST_WIDTH)]
Name = Annotated[str, msgspec.Meta(pattern=NAME)]
