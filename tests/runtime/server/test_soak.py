"""Many clients for a while; see bench/scripts/soak.py. OUTRIDER_SOAK_MINUTES: less than one by default."""

import os
import runpy
from pathlib import Path

import pytest

SOAK = Path(__file__).parents[3] / "bench" / "scripts" / "soak.py"
MINUTES = float(os.environ.get("OUTRIDER_SOAK_MINUTES", "0.3"))


@pytest.mark.slow
def test_clients_leave_nothing_behind(tiny: Path) -> None:
    faults = runpy.run_path(str(SOAK))["soak"](tiny, MINUTES, 32)
    assert not faults, "\n".join(faults)
