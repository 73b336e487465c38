"""A forked process does not have the engine's threads. It gets an error, and does not wait for them."""

import subprocess
import sys
from pathlib import Path

import pytest

from outrider.bundle import Bundle

PROGRAM = """
import os, sys, time, outrider
from pathlib import Path
from outrider.system import saved
from outrider.testing import ToyTokenizer

saved.FOLDER = Path(sys.argv[2])
config = outrider.Config().replace(cache_size=0.005, ignore_eos=True, max_new_tokens=100)
engine = outrider.Engine(outrider.read_bundle(sys.argv[1]), config, tokenizer=ToyTokenizer())
begun = engine.stream("hello", drafter=None)
next(begun)
pid = os.fork()
if not pid:
    for use in (lambda: engine.generate("hello"), lambda: next(engine.stream("hello")), lambda: next(begun)):
        try:
            use()
        except outrider.RequestError as error:
            print(error)
    del engine, begun
    sys.exit(7)
status, patience = None, time.monotonic() + 200
while status is None and time.monotonic() < patience:
    done, found = os.waitpid(pid, os.WNOHANG)
    status = os.waitstatus_to_exitcode(found) if done else None
    time.sleep(0.05)
if status is None:
    os.kill(pid, 9)
*_, last = begun
print(f"the fork ended with {status}, the parent's answer with {len(last.result.token_ids)} tokens")
"""


@pytest.mark.slow
@pytest.mark.needs("fork")
def test_a_fork_is_told_that_it_has_no_engine_and_can_exit(openvino_bundle: Bundle, tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, str(openvino_bundle.folder), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    *refusals, ending = done.stdout.splitlines()
    assert ending == "the fork ended with 7, the parent's answer with 100 tokens"
    assert len(refusals) == 3
    assert all("its fork, which has no copy of the engine's threads. Load an engine in each" in r for r in refusals)
