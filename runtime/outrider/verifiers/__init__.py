"""How much of a draft the main model keeps.

`Greedy` and `Rejection` are lossless: with either, the text is the main model's own.
"""

from outrider.verifiers.greedy import Greedy
from outrider.verifiers.rejection import Rejection

__all__ = ["Greedy", "Rejection"]
