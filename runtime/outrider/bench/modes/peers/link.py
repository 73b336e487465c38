"""Files of a bundle in the places where another runtime looks for them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path


def link(source: str | Path, target: str | Path) -> None:
    """Make `target` the file `source`, without another copy of its bytes where the file system can do that."""
    source = Path(source).resolve()
    for make in (os.link, os.symlink, shutil.copyfile):
        try:
            make(source, target)
        except OSError:  # another disk, a file system without links, a system that forbids them
            if make is shutil.copyfile:
                raise
        else:
            return
