"""Weights in pages of 2 MB: what is found, what is moved, and when that ends."""

import mmap
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from outrider.decoding import large_pages
from outrider.decoding.large_pages import LargePages
from outrider.system.memory import full_regions, use_large_pages

MB = 1 << 20
MAIN: Any = None


def move_all(job: LargePages) -> int:
    """Parts until nothing is due."""
    count = 0
    while job.is_due:
        job.go_on(MAIN, lambda: False)
        count += 1
    return count


@pytest.mark.needs("Linux")
def test_memory_in_use_is_moved_and_keeps_its_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    full, half = region(mmap.MADV_DONTDUMP), region(mmap.MADV_DONTFORK)
    full[:], half[: 32 * MB] = np.arange(64 * MB, dtype=np.uint8), 1
    kept, begin = full.copy(), full.ctypes.data
    regions = full_regions(2 * MB)
    if not regions:
        pytest.skip("this system does not say how its memory is used")
    found = [each for each in regions if each.start < begin + 32 * MB < each.stop]
    assert len(found) == 1
    assert not any(each.start <= half.ctypes.data + 48 * MB < each.stop for each in regions)
    piece = range(max(found[0].start, begin), min(found[0].stop, begin + len(full)))
    try:
        use_large_pages(piece[: 2 * MB])
    except OSError as error:
        pytest.skip(f"this system has no large pages to give: {error}")
    moved = [piece[: 2 * MB]]

    def use(part: range) -> None:
        use_large_pages(part)
        moved.append(part)

    monkeypatch.setattr(large_pages, "full_regions", lambda _: [piece])
    monkeypatch.setattr(large_pages, "use_large_pages", use)
    assert move_all(LargePages(1 << 30)) <= 1 + -(-len(piece) // (16 * MB))  # fewer where the system has no more
    assert np.array_equal(full, kept)
    lines = iter(Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines())
    next(line for line in lines if re.match(r"[0-9a-f]+-", line) and begin + MB in range_of(line))
    large = next(line for line in lines if line.startswith("AnonHugePages:"))
    assert 1024 * int(large.split()[1]) >= max(map(len, moved))


def region(advice: int) -> NDArray[np.uint8]:
    """64 MB. advice: memory with another one is another region."""
    memory = mmap.mmap(-1, 64 * MB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(advice)
    return np.frombuffer(memory, np.uint8)


def range_of(line: str) -> range:
    """The addresses that a line of a process's map begins with."""
    return range(*(int(each, 16) for each in line.split()[0].split("-")))
