"""Memory that a long prompt takes beyond its cache."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

PROGRAM = """
import json, resource, sys
import outrider

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

engine = outrider.load(sys.argv[1])
engine.generate([1, 2, 3], max_new_tokens=10, ignore_eos=True)
before = peak()
result = engine.generate([100 + i % 3000 for i in range(4000)], max_new_tokens=4, ignore_eos=True)
print(json.dumps({"rise": peak() - before, "tokens": result.stats.num_prompt_tokens}))
"""


@pytest.mark.skipif(os.name == "nt", reason="there is no getrusage")
def test_a_long_prompt_takes_little_more_than_its_cache(smollm2: Path) -> None:
    """All its logits at once would be 0.8 GB (and 2.4 GB at a vocabulary of 152,000)."""
    command = [sys.executable, "-c", PROGRAM, str(smollm2)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert found["tokens"] == 4000
    cache = 4004 * 30 * 2 * 3 * 64 * 4  # layers, keys and values, heads, head size, at most four bytes
    assert found["rise"] < cache + 0.3e9
