"""The base of drafters that copy."""

from __future__ import annotations

from outrider.types import Drafter


class Copier(Drafter):
    """A drafter without a model: its drafts cost nothing, and do not depend on the noise.

    A subclass implements `reserve`, `propose` and `release`. `propose` can read the committed tokens itself.
    """

    is_priced = is_free = at_once = True
