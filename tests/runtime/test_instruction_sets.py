"""An engine's claims also hold with other processors' instruction sets, as far as this one has them.

oneDNN leaves out instructions above `ONEDNN_MAX_CPU_ISA`; it is read once a process.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from outrider.bundle import Bundle

# What the processor must have, and the precision to calculate in: one each. Not bf16 below AVX512_CORE_BF16: OpenVINO
# 2026.4 takes it where the processor itself has more, and fails or dies in its first call; so it does with AVX2 alone.
LEVELS = {
    "AVX512_CORE_AMX": ("amx_bf16", "bf16"),
    "AVX512_CORE_FP16": ("avx512_fp16", "auto"),
    "AVX512_CORE_BF16": ("avx512_bf16", "bf16"),
    "AVX512_CORE_VNNI": ("avx512_vnni", "f32"),
    "AVX512_CORE": ("avx512bw", "auto"),
    "AVX2_VNNI": ("avx_vnni", "auto"),
    "AVX2": ("AVX2 alone", "auto"),
}

CODE = """
import json, sys, warnings
from pathlib import Path
import outrider
from outrider.system import saved
from outrider.models.tuning.measure.readings import compare_readings
from outrider.testing import ToyTokenizer

bundle, folder, precision = sys.argv[1:]
saved.FOLDER = Path(folder)
warnings.simplefilter("ignore", outrider.ExactnessWarning)
config = outrider.Config().replace(cache_size=0.02, precision=precision)
engine = outrider.Engine(outrider.read_bundle(bundle), config, tokenizer=ToyTokenizer())
options = {"max_new_tokens": 60, "ignore_eos": True}
plain = engine.generate("abcabcabc", drafter=None, **options)
drafted = [engine.generate("abcabcabc", drafter=d, num_assistant_tokens=n, **options)
           for d in ("draft", "suffix") for n in (1, 4, 15)]
print(json.dumps({
    "claimed": plain.exact,
    "differences": compare_readings(engine.main, 200),
    "same": all(each.token_ids == plain.token_ids for each in drafted),
}))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("level", "precision"), [
    pytest.param(level, precision, marks=pytest.mark.needs(needed)) for level, (needed, precision) in LEVELS.items()
])  # fmt: skip
def test_what_is_claimed_is_true(openvino_bundle: Bundle, tmp_path: Path, level: str, precision: str) -> None:
    command = [sys.executable, "-c", CODE, str(openvino_bundle.folder), str(tmp_path), precision]
    done = subprocess.run(
        command, env=os.environ | {"ONEDNN_MAX_CPU_ISA": level}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["claimed"] == (set(found["differences"].values()) == {0.0})
    if found["claimed"]:
        assert found["same"]
    else:
        assert precision == "bf16"
