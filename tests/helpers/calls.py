"""Calls of backends, and their rows."""

import numpy as np
from numpy.typing import NDArray

from outrider.types import Backend, Chunk


def rows_of_call(backend: Backend, *chunks: Chunk) -> NDArray[np.float32]:
    """Make a call. Returns the logits of its rows, chunk by chunk, float32 [rows, vocabulary]."""
    step = backend.submit(chunks).wait()
    return np.array([row.full() for chunk in chunks for row in step.rows(chunk)], dtype=np.float32)
