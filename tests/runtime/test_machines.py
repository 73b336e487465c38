"""The table of processors: whose row is whose."""

import pytest

from outrider.models.backends.processor import INSTRUCTIONS, ProcessorFacts
from outrider.models.tuning.machines import machine_of, read_machines


@pytest.mark.parametrize(("instructions", "tells_all", "name"), [
    ("avx2 avx512f avx512_vnni amx_int8", True, "AMX"), ("avx2 avx512f avx512_vnni", True, "AVX-512 with VNNI"),
    ("avx2 avx_vnni", True, "AVX2 with VNNI"), ("avx2", True, "AVX2 alone"), ("avx2 avx512f", True, "AVX2 alone"),
    ("avx2", False, "AVX2 at least"), ("asimd i8mm", True, "any"), ("", True, "any"),
])  # fmt: skip
def test_a_processor_has_the_first_row_that_it_fits(instructions: str, tells_all: bool, name: str) -> None:
    processor = ProcessorFacts("a processor", tuple(instructions.split()))
    assert machine_of(processor, tells_all=tells_all).name == name


def test_the_table_has_instructions_and_forms_that_there_are() -> None:
    for machine in read_machines():
        assert machine.has | machine.lacks <= {*INSTRUCTIONS}
        for form in (*machine.main, *machine.draft, *(machine.exact - {"states"})):
            assert tuple(form.split()) in {(f, w) for f in ("openvino", "onnx") for w in ("int8", "int4")}
        assert machine.main[-1] == "openvino int8"  # that every model and installation can have
