"""Memory that a long prompt takes beyond its cache, that a closed engine leaves, and that mapped files take."""

import gc
import json
import mmap
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import outrider
from outrider.bundle import Bundle
from outrider.system.memory import release_pages
from toys import load_toy

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


@pytest.mark.needs("POSIX")
def test_a_long_prompt_takes_little_more_than_its_cache(smollm2: Path) -> None:
    """All its logits at once would be 0.8 GB (and 2.4 GB at a vocabulary of 152,000)."""
    command = [sys.executable, "-c", PROGRAM, str(smollm2)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert found["tokens"] == 4000
    cache = 4004 * 30 * 2 * 3 * 64 * 4  # layers, keys and values, heads, head size, at most four bytes
    assert found["rise"] < cache + 0.3e9


@pytest.fixture
def uncollected() -> Iterator[Callable[[], set[str]]]:
    """Names the classes of ours whose objects nobody holds any more, and that wait for the garbage collector."""

    def find() -> set[str]:
        gc.collect()
        names = {f"{type(each).__module__}.{type(each).__name__}" for each in gc.garbage}
        return {name for name in names if name.startswith("outrider.")}

    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    yield find
    gc.set_debug(0)
    gc.garbage.clear()
    gc.enable()


# A tree, whose leaves know its root: numbers alone.
TREE = {f"outrider.models.kv.{name}" for name in ("block_pool.BlockPool", "block_tree.Block", "block_tree.Root")}


@pytest.mark.every_format
def test_a_closed_engine_does_not_wait_for_the_garbage_collector(
    toy_bundle: Bundle, uncollected: Callable[[], set[str]]
) -> None:
    """In a server that has nothing to do it never runs, and the weights of models that were unloaded stay."""
    with load_toy(toy_bundle) as engine:
        for drafter in ("draft", "suffix"):
            engine.generate("hello", max_new_tokens=5, drafter=drafter)
        list(engine.stream("hello", max_new_tokens=5))
    del engine
    assert uncollected() <= TREE


def test_nor_do_its_grammars(tiny: Path, uncollected: Callable[[], set[str]]) -> None:
    pytest.importorskip("llguidance", reason="the extra [structured]")
    with outrider.load(tiny, cache_size=0.02) as engine:
        assert engine.generate("Hi", regex="[a-z]{3}", chat_template=False).text
    del engine
    assert uncollected() <= TREE


@pytest.mark.needs("Linux")
def test_a_mapped_files_pages_are_released_and_come_back(tmp_path: Path) -> None:
    path, content = tmp_path / "weights.bin", bytes(range(256)) * 16_384  # 4 MB
    path.write_bytes(content)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        assert mapped[:] == content
        assert resident(path) >= len(content)
        release_pages(tmp_path / "other.bin")
        assert resident(path) >= len(content)
        release_pages(path)
        assert resident(path) == 0
        assert mapped[:] == content


def resident(path: Path) -> int:
    """Bytes of a mapped file that are in this process's memory."""
    found, ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0]:
            ours = line.endswith(str(path))
        elif ours and line.startswith("Rss:"):
            found += 1024 * int(line.split()[1])
    return found


FREED = """
import ctypes, sys, threading
from pathlib import Path
from outrider.system.memory import return_free_pages, return_large_buffers

if sys.argv[1:]:
    return_large_buffers()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.memset.argtypes, libc.free.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t], [ctypes.c_void_p]
done, end = threading.Barrier(5), threading.Event()

def use():
    for size, count in ((1 << 20, 20), (20 << 20, 1), (20 << 20, 1)):  # glibc keeps most of it
        buffers = [(libc.malloc(size), libc.malloc(64))[0] for _ in range(count)]  # each has a neighbour that stays
        for buffer in buffers:
            libc.memset(buffer, 1, size)
            libc.free(buffer)
    done.wait()
    end.wait()  # a thread of its own for each, with memory of its own

def held():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

before = held()
for _ in range(4):
    threading.Thread(target=use).start()
done.wait()
if sys.argv[1:]:
    return_free_pages()
print((held() - before) >> 20)
end.set()
"""


@pytest.mark.needs("glibc")
@pytest.mark.parametrize("returned", [False, True])
def test_freed_buffers_are_returned_to_the_system(returned: bool) -> None:
    """By default glibc keeps them for the threads that had them, which is why there is a setting."""
    done = subprocess.run(
        [sys.executable, "-c", FREED, *(["returned"] if returned else [])], capture_output=True, text=True, check=True
    )
    assert (int(done.stdout) < 20) == returned
