"""Ctrl-C ends a program as Python says it does, whatever OpenVINO has done to the signal stack."""

import subprocess
import sys

import pytest

from outrider.bundle import Bundle

PROGRAM = """
import gc, os, signal, sys, warnings
import outrider
from outrider.testing import ToyTokenizer

signal.signal(signal.SIGINT, signal.default_int_handler)
for _ in range(2):
    with outrider.Engine(outrider.read_bundle(sys.argv[1]), tokenizer=ToyTokenizer()) as engine:
        engine.generate("abc", max_new_tokens=4)
    del engine
    gc.collect()  # and with it the cores
try:
    os.kill(os.getpid(), signal.SIGINT)
except KeyboardInterrupt:
    print("interrupted")
"""


@pytest.mark.slow
@pytest.mark.needs("POSIX")
def test_a_signal_after_models_were_freed(openvino_bundle: Bundle) -> None:
    command = [sys.executable, "-c", PROGRAM, str(openvino_bundle.folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "interrupted\n"), done.stderr
