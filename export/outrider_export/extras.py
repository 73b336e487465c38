"""The packages that an export may need, and the commands that install them."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from outrider.errors import ExportError, install, is_installed

_EXTRAS = {
    "openvino": ("export", ("torch", "transformers", "optimum.intel", "nncf", "accelerate", "gguf")),
    "onnx": ("onnx", ("onnxruntime", "onnx")),
}


def check_extra(why: str, format: str, but: str = "") -> None:  # noqa: A002
    """Check that the packages for converting to `format` are installed. but: what they may not help against.

    Raises:
        ExportError: with the command that installs them.
    """
    if names := missing(format):
        raise ExportError(f"{why} needs {names[0]}, which is not installed{but}. Run: {install(_EXTRAS[format][0])}")


def has_pytorch() -> bool:
    """Whether the packages are there that convert an architecture without an entry in `direct.archs`."""
    return not missing("openvino")


def missing(format: str) -> list[str]:  # noqa: A002
    """The packages for converting to `format` that are not installed."""
    return [name for name in _EXTRAS[format][1] if not is_installed(name)]


def version_of(package: str) -> str:
    """The version of an installed package; "unknown" without one."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"
