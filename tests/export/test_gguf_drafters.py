"""Drafters that read hidden states, in GGUF files as llama.cpp writes them, have what their checkpoints have."""

from pathlib import Path

import numpy as np
import pytest

from gguf_drafters import Change, write_drafter
from heads import DECODER, HEAD_SIZE, write_head
from outrider.bundle.manifest import Geometry
from outrider.cli import run
from outrider.errors import ExportError
from outrider_export.heads.formats import kind_of_head, read_head
from outrider_export.heads.plan import is_head
from outrider_export.sources.source import locate

GEOMETRY = Geometry("qwen2", 4, 4, 2, HEAD_SIZE, DECODER["hidden_size"], 512, 448)
KINDS = ("eagle3", "dflash", "dflash2", "dflash2 scaled", "dspark", "dspark without confidence")


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_has_what_its_checkpoint_has(kind: str, tmp_path: Path) -> None:
    path = write_drafter(tmp_path / "drafter.gguf", kind)
    assert kind_of_head(path) == kind.split()[0]
    assert is_head(locate(path))
    of_file, of_folder = read_head(path, GEOMETRY), read_head(write_head(tmp_path / "folder", kind), GEOMETRY)
    assert of_file.numbers == pytest.approx(of_folder.numbers)
    assert of_file.tensors.keys() == of_folder.tensors.keys()
    for name, values in of_folder.tensors.items():
        np.testing.assert_allclose(of_file.tensors[name], values, atol=1e-6, err_msg=name)
    for name in ("kind", "features", "num_layers", "context_length", "num_places", "mask_token_id"):
        assert getattr(of_file, name) == getattr(of_folder, name)
    proposed = [None if each.proposed is None else each.proposed.tolist() for each in (of_file, of_folder)]
    assert proposed[0] == proposed[1]


def test_frequencies_are_divided_as_llama_3_has_them(tmp_path: Path) -> None:
    divisors = np.linspace(1, 8, HEAD_SIZE // 2, dtype=np.float32)
    divided, plain = (
        read_head(write_drafter(tmp_path / f"{i}.gguf", "eagle3", change), GEOMETRY).tensors["rotary.frequencies"]
        for i, change in enumerate((lambda writer: writer.add_tensor("rope_freqs.weight", divisors), lambda _: None))
    )
    np.testing.assert_allclose(divided, plain / divisors, rtol=1e-6)


def zeros(name: str, *shape: int) -> Change:
    return lambda writer: writer.add_tensor(name, np.zeros(shape, np.float32))


REFUSED: dict[str, tuple[str, Change, str, str]] = {
    "tensor": ("dflash", zeros("blk.0.attn_sinks.weight", 4), "", "has a tensor 'blk.0.attn_sinks.weight', which is "),
    "tokens": ("dspark", zeros("d2t", 150), "", "has a tensor 'd2t', which is not known here. Add the drafter's check"),
    "anchor": ("dspark", lambda w: w.add_bool("dflash.sample_from_anchor", False), "", "sample_from_anchor is false"),
    "causal": ("dflash2", lambda w: w.add_bool("dflash.attention.causal", True), "", "attention.causal is true"),
    "scale": ("dflash", lambda w: w.add_float32("dflash.logit_scale", 0.5), "", "embedding_scale or logit_scale is n"),
    "layers": ("eagle3", lambda _: None, "target_layers", "has no eagle3.target_layers in its metadata"),
    "selector": ("dflash2", lambda _: None, "selector_rank", "has no dflash.selector_rank in its metadata"),
    "rotated": ("eagle3", lambda w: w.add_uint32("eagle3.rope.dimension_count", 8), "rope.dimension_count",
                "rope.dimension_count is 8, of heads of 16 numbers"),
    "divisors": ("eagle3", zeros("rope_freqs.weight", 3), "", "has 3 divisors of rotary frequencies"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_known_is_one_line(name: str, tmp_path: Path) -> None:
    kind, change, leave_out, said = REFUSED[name]
    path = write_drafter(tmp_path / "drafter.gguf", kind, change, leave_out)
    with pytest.raises(ExportError, match=said) as raised:
        read_head(path, GEOMETRY)
    assert "\n" not in str(raised.value)


def test_it_is_no_main_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_drafter(tmp_path / "drafter.gguf", "dflash")
    assert run(["export", str(path), "-o", str(tmp_path / "bundle")]) == 1
    assert "has a drafter of the kind dflash, and no model that writes by itself" in capsys.readouterr().err
    assert not (tmp_path / "bundle").exists()
