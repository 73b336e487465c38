"""Writes an IR whose weights are in its file already.

    packed = pack(weights, "int8", path.with_suffix(".bin"), advance)
    save(*build(decoder, weights, packed), path)

OpenVINO writes all constants of a model into a new file. So the graph has inputs in place of those that are in the
file, of their shapes and types. In the XML, these become constants again. The others are appended to the file.
"""

import math
import shutil
from pathlib import Path
from typing import TypeAlias
from xml.etree import ElementTree

import openvino as ov

from outrider.models.backends.taps import ROOM, has_room

# An input in place of a constant, and the constant's offset in the file, in bytes.
Stored: TypeAlias = "tuple[ov.Node, int]"
_FEW_BYTES = 128  # of constants that are shared


def save(model: ov.Model, stored: list[Stored], path: Path) -> None:
    """Write a model to `path`, and what is missing of its constants to the file beside it.

    Raises:
        OSError, RuntimeError: when the disk is full.
    """
    weights, others = path.with_suffix(".bin"), path.with_suffix(".others")
    ov.serialize(model, path, others)
    places = {node.get_friendly_name(): (offset, _num_bytes(node)) for node, offset in stored}
    tree, begin = ElementTree.parse(path), weights.stat().st_size  # noqa: S314  (it was just written)
    for layer in tree.iter("layer"):
        data, name = layer.find("data"), layer.get("name", "")
        if data is None:
            continue
        if layer.get("type") == "Const":
            data.set("offset", str(begin + int(data.get("offset", ""))))
        elif name in places:
            layer.set("type", "Const")
            for key, value in zip(("offset", "size"), places[name], strict=True):
                data.set(key, str(value))
    tree.write(path, encoding="utf-8", xml_declaration=True)
    with weights.open("ab") as file, others.open("rb") as source:
        shutil.copyfileobj(source, file)
    others.unlink()
    if not has_room(weights):
        with weights.open("ab") as file:
            file.write(bytes(ROOM))


def _num_bytes(node: ov.Node) -> int:
    num_bits: int = math.prod(node.get_output_shape(0)) * node.get_output_element_type(0).bitwidth
    return num_bits // 8


def share_constants(model: ov.Model) -> None:
    """Have equal small constants once: the fewer nodes a graph has, the sooner it is read and compiled."""
    known: dict[tuple[str, tuple[int, ...], bytes], ov.Output] = {}
    for node in model.get_ops():
        if node.get_type_name() == "Constant" and node.get_byte_size() <= _FEW_BYTES:
            output = node.output(0)
            key = str(node.get_element_type()), (*node.get_output_shape(0),), node.get_data().tobytes()
            first = known.setdefault(key, output)
            if first is not output:
                for reader in output.get_target_inputs():
                    reader.replace_source_output(first)
