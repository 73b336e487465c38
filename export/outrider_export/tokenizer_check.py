"""Checks a converted tokenizer against its source."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outrider.errors import ExportError

if TYPE_CHECKING:
    from pathlib import Path

# Contractions, spaces before digits and line ends, scripts without spaces, composed and decomposed accents, emoji of
# several code points, code, marks: pre-tokenizers and normalisers differ in these.
PROBES = (
    "Hello, world! It's the year 2024, isn't it? I'LL be back.",
    "a  1   22\n\n 333\t4  \r\n x   ",
    "caf\u00e9 cafe\u0301 \u212b na\u00efve \u00df \u0130 \u0131 \ufb01",
    "日本語と中文、한국어 русский عربي עברית हिन्दी",
    "\U0001f642 \U0001f468\u200d\U0001f469\u200d\U0001f467 \u2764\ufe0f",
    "def f(x):\n    return {'a': x ** 2}  # comment\n\n\nif __name__ == '__main__':\n\tprint(f(3.14e-5))\n",
    'https://example.org/a_b?c=d&e=%20 <tag attr="1"/> ... --- ___ \u2013 \u2026 $1,234.56 €',
)


def check_tokenizer_ir(folder: Path) -> None:
    """Check that `folder`'s OpenVINO tokenizer gives the same tokens as its `tokenizer.json`.

    Raises:
        ExportError: with the first text on which they differ.
    """
    import openvino_genai
    import tokenizers

    original = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    converted = openvino_genai.Tokenizer(folder)
    for text in PROBES:
        expected = original.encode(text, add_special_tokens=False).ids
        found = converted.encode(text, add_special_tokens=False).input_ids.data[0].tolist()
        if found != expected:
            raise ExportError(
                f"OpenVINO's tokenizer turns {text!r} into {found[:12]}, where tokenizer.json says {expected[:12]}; "
                "this kind of tokenizer is not supported yet."
            )
