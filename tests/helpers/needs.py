"""What a test asks of a machine before it does anything: `@pytest.mark.needs("bf16")`. See `pytest_runtest_setup`.

Packages of an extra are asked for where they are imported, by `pytest.importorskip`.
"""

import os
import platform
import shutil
import sys

from outrider.models.backends.processor import INSTRUCTIONS, this_processor


def has_instructions(name: str) -> bool:
    """Whether the processor has these instructions, or OpenVINO the precision."""
    processor = this_processor()
    if name == "AVX2 alone":
        return [each for each in processor.instructions if each.startswith(("avx", "amx"))] == ["avx2"]
    return "BF16" in processor.capabilities if name == "bf16" else name in processor.instructions


# Not AVX2, which CI holds the tests to: what is marked with one of these runs there once more, with all instructions.
PROCESSOR = {*INSTRUCTIONS} - {"avx2"}
SYSTEM = {
    "POSIX": os.name != "nt",
    "Linux": sys.platform == "linux",
    "fork": hasattr(os, "fork"),
    "glibc": platform.libc_ver()[0] == "glibc",
}


def what_is_missing(name: str) -> str | None:
    """In words, for the report; None if the machine has it."""
    if name in SYSTEM:
        return None if SYSTEM[name] else f"{name}: this system is {platform.system()}"
    if name in PROCESSOR or name in ("avx2", "AVX2 alone"):
        return None if has_instructions(name) else f"{name}: this processor has {this_processor().instructions}"
    return None if shutil.which(name) else f"the program {name}, which is not installed"
