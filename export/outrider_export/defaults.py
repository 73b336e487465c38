"""What an export does unless it is told otherwise."""

from __future__ import annotations

# GGUF files are converted, too, unless "keep" is set: a target pass takes 276 ms in Q4_K_M against 123 in int8 (Intel
# Xeon), and more for every draft token. A draft model has to be fast rather than right: in 4 bits, the 0.5B of the
# Qwen2.5-Coder pair drafts in 11 ms per token instead of 15, and 83 % instead of 85 % of its first tokens are accepted.
DEFAULT_WEIGHTS = {"main": "int8", "draft": "int4"}
