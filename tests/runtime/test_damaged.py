"""Damaged files: what the fuzzers found, one by one."""

import tracemalloc
from pathlib import Path

import msgspec
import numpy as np
import pytest

from outrider.bundle.folder import Bundle
from outrider.errors import BundleError, OptionError


def test_ids_of_a_drafter_have_the_size_that_they_promise(openvino_bundle: Bundle, tmp_path: Path) -> None:
    """NumPy makes room for as many as the header says, and reads the header as Python."""
    drafter = openvino_bundle.manifest.drafters[0]
    count = 1 << 28
    drafter = msgspec.structs.replace(drafter, model=msgspec.structs.replace(drafter.model, vocab_size=count))
    bundle = Bundle(tmp_path, openvino_bundle.manifest)
    path = tmp_path / drafter.model.folder / "to_main.npy"
    path.parent.mkdir()
    np.save(path, np.arange(40, dtype=np.int32))
    whole = path.read_bytes()
    path.write_bytes(whole.replace(b"(40,), }         ", b"(%d,), }  " % count))
    tracemalloc.start()
    try:
        with pytest.raises(BundleError, match="to_main.npy cannot be read: .*Export the bundle again"):
            bundle.read_map(drafter)
        assert tracemalloc.get_traced_memory()[1] < 1e6
    finally:
        tracemalloc.stop()
    path.write_bytes(whole.replace(b"'fortran", b"\0{'desc:"))
    with pytest.raises(BundleError, match="to_main.npy cannot be read: its header is damaged"):
        bundle.read_map(drafter)


def test_a_value_of_any_length_leaves_room_for_what_to_do() -> None:
    message = str(OptionError(f"{'[' * 40_000} is no number. Give one."))
    assert len(message) < 2100
    assert message.startswith("[[[")
    assert message.endswith("is no number. Give one.")
