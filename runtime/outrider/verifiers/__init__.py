"""Ways to choose tokens, and how much of a draft is kept in each.

`Greedy`, `Coupled` and `Rejection` are lossless: with any of them, the text is the main model's own.
"""

from outrider.verifiers.matching import Coupled, Greedy
from outrider.verifiers.rejection import Rejection

__all__ = ["Coupled", "Greedy", "Rejection"]
