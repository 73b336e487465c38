"""Calls of backends, and their rows."""

from typing import Any

import numpy as np

from outrider.types import Backend, Chunk


def rows_of_call(backend: Backend, *chunks: Chunk) -> Any:
    """Make a call. Returns the logits of its rows, chunk by chunk, float32 [rows, vocabulary]."""
    step = backend.submit(chunks).wait()
    return np.array([row.full() for chunk in chunks for row in step.rows(chunk)])
