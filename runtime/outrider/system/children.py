"""Python processes that this program starts."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def child_command(module: str) -> list[str] | None:
    """The command that runs a module in a process of its own; None if there is no Python interpreter to start.

    An app that is frozen into one file, or that embeds Python, would start itself.
    """
    if getattr(sys, "frozen", False) or not Path(sys.executable or "").stem.lower().startswith(("python", "pypy")):
        return None
    return [sys.executable, "-P", "-m", module]


def child_environment() -> dict[str, str]:
    """This process's environment, and its module search path."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)}
