"""Bodies of requests to the server, in which each part is there, with their paths."""

import json
from pathlib import Path
from typing import Any

_TEXT = Path(__file__).with_suffix(".json").read_text(encoding="utf-8")
_ROWS: list[tuple[str, dict[str, Any]]] = [(row["path"], row["body"]) for row in json.loads(_TEXT)]
BODIES, OTHERS = _ROWS[:4], _ROWS[4:]  # OpenAI's, below /v1; Anthropic's and Ollama's
FORMAT, COMPLETION = BODIES[1][1], BODIES[3][1]
