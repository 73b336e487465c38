"""Links a bundle's files to paths where another runtime expects them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path


def link(source: str | Path, target: str | Path) -> None:
    """Make `target` the file `source`: a link if the file system allows it, otherwise a copy."""
    source = Path(source).resolve()
    for make in (os.link, os.symlink, shutil.copyfile):
        try:
            make(source, target)
        except OSError:  # another disk, a file system without links, a system that forbids them
            if make is shutil.copyfile:
                raise
        else:
            return
