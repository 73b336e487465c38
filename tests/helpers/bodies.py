"""Bodies of requests to the server, in which each part is there."""

import json
from pathlib import Path

_ROWS = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
# OpenAI's, by paths below /v1, and those of Anthropic and Ollama.
BODIES, OTHERS = ([(row["path"], row["body"]) for row in rows] for rows in (_ROWS[:4], _ROWS[4:]))
_, (_, FORMAT), _, (_, COMPLETION) = BODIES
