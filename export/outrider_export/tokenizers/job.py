"""Child process: OpenVINO's tokenizer and detokenizer for the tokenizer of a checkpoint, before its weights are read.

Job: `model`, the checkpoint folder or GGUF file that the tokenizer comes from; `tokenizer`, the folder with its
tokenizer.json, which gets openvino_tokenizer and openvino_detokenizer; and, if allowed, `trust_remote_code`;
`decodes_only`, for a model whose prompts are no texts; `encodes_only`, for one that writes none and reads special
tokens around a text; `pairs`, for one that reads two at once. BPE and Unigram need neither torch nor transformers,
unless special tokens are read.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.errors import ExportError, one_line
from outrider_export.child import limited
from outrider_export.extras import check_extra
from outrider_export.progress import Progress, Silent
from outrider_export.tokenizers.files import read_tokenizer
from outrider_export.tokenizers.ir import write_tokenizer_ir

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# Contractions, spaces before digits and line ends, scripts without spaces, composed and decomposed accents, emoji of
# several code points, code, marks: pre-tokenizers and normalisers differ in these.
PROBES = (
    "Hello, world! It's the year 2024, isn't it? I'LL be back.",
    "  two\u00a0blanks \u3000first",
    "a  1   22\n\n 333\t4  \r\n x   ",
    "caf\u00e9 cafe\u0301 \u212b na\u00efve \u00df \u0130 \u0131 \ufb01",
    "日本語と中文、한국어 русский عربي עברית हिन्दी",
    "\U0001f642 \U0001f468\u200d\U0001f469\u200d\U0001f467 \u2764\ufe0f",
    "def f(x):\n    return {'a': x ** 2}  # comment\n\n\nif __name__ == '__main__':\n\tprint(f(3.14e-5))\n",
    'https://example.org/a_b?c=d&e=%20 <tag attr="1"/> ... --- ___ \u2013 \u2026 $1,234.56 €',
)


_PLAIN = (PROBES[0], PROBES[6], PROBES[7])  # without rare characters and runs of blanks
_PAIR = ("Who goes ahead?", "An outrider goes ahead of the others.")
_TRIAL_SECONDS = 30.0  # of processor time; a usual tokenizer takes up to a second
_TRIAL_BYTES = 1 << 30  # a usual tokenizer of 256,000 tokens takes some hundreds of MB
_MOST_ADDED = 16  # added tokens that are tried


def add_tokenizer(job: dict[str, Any], progress: Progress | None = None) -> None:
    """Write openvino_tokenizer and openvino_detokenizer, and check them against tokenizer.json.

    Raises:
        ExportError: if they differ, or the kind of tokenizer needs packages that are not installed.
    """
    folder, decodes_only = Path(job["tokenizer"]), job.get("decodes_only", False)
    encodes_only = job.get("encodes_only", False)
    original = read_tokenizer(folder, decodes_only=decodes_only)
    if encodes_only or not write_tokenizer_ir(folder, original):
        check_extra("This kind of tokenizer", "openvino")
        _convert_with_transformers(Path(job["model"]), folder, job.get("trust_remote_code", False))
    progress = progress or Silent()
    with limited(progress, "trying it on short texts", seconds=_TRIAL_SECONDS, memory=_TRIAL_BYTES):
        different = check_tokenizer_ir(folder, original, decodes_only=decodes_only, encodes_only=encodes_only)
    if different:
        progress.note(
            f"OpenVINO's tokenizer differs from tokenizer.json in {len(different)} of {len(PROBES)} trial texts with "
            f"rare characters, such as {different[0]!r}: of such texts it gives other numbers than Transformers."
        )
    if job.get("pairs", False):
        check_pairs(folder)


def check_tokenizer_ir(
    folder: Path, original: Tokenizer | None = None, *, decodes_only: bool = False, encodes_only: bool = False
) -> list[str]:
    """Check that `folder`'s OpenVINO tokenizer gives the same tokens and texts as its `tokenizer.json`.

    original: that, if it was read already. decodes_only: only texts have to be the same. encodes_only: only tokens,
    with the special ones around a text, and the texts with rare characters on which these differ are returned.

    Raises:
        ExportError: with the first text on which they differ.
    """
    import openvino_genai

    original = original or read_tokenizer(folder, decodes_only=decodes_only)
    if encodes_only:  # files of sentence-transformers often say how texts are padded and cut
        original.no_padding()
        original.no_truncation()
    converted = openvino_genai.Tokenizer(folder)
    added = [token.content for _, token in sorted(original.get_added_tokens_decoder().items())]
    step = max(1, len(added) // _MOST_ADDED)
    different = []
    for text in (*PROBES, *(f"{token}x {token}\n{token}" for token in added[::step])):
        expected = original.encode(text, add_special_tokens=encodes_only).ids
        if not decodes_only:
            found = converted.encode(text, add_special_tokens=encodes_only).input_ids.data[0].tolist()
            if found != expected and encodes_only and text not in _PLAIN:
                different.append(text)
            elif found != expected:
                raise ExportError(
                    f"OpenVINO's tokenizer turns {text!r} into {found[:12]}, where tokenizer.json says "
                    f"{expected[:12]}; this kind of tokenizer is not supported yet."
                )
        for skip in () if encodes_only else (True, False):
            ours, theirs = (
                each.decode(expected, skip_special_tokens=skip) if expected else "" for each in (converted, original)
            )
            if ours != theirs:
                raise ExportError(
                    f"OpenVINO's detokenizer turns {expected[:12]} into {ours[:80]!r}, where tokenizer.json says "
                    f"{theirs[:80]!r}; this kind of tokenizer is not supported yet."
                )
    return different


def check_pairs(folder: Path) -> None:
    """Check that two texts are joined as `tokenizer.json` says, as a reranker reads them.

    Raises:
        ExportError: if they are not.
    """
    import openvino_genai

    expected = read_tokenizer(folder).encode(*_PAIR).ids
    try:
        converted = openvino_genai.Tokenizer(folder, add_second_input=True)
        found = converted.encode(*([text] for text in _PAIR)).input_ids.data[0].tolist()
    except RuntimeError as error:
        raise ExportError(f"OpenVINO's tokenizer cannot join two texts, as rerankers do: {one_line(error)}.") from error
    if found != expected:
        raise ExportError(
            f"OpenVINO's tokenizer joins two texts as {found[:16]}, where tokenizer.json says {expected[:16]}; this "
            "kind of reranker is not supported yet."
        )


def work(job: dict[str, Any], progress: Progress) -> dict[str, Any]:
    """The work function of this child process."""
    progress.phase("tokenizer")
    add_tokenizer(job, progress)
    return {}


def _convert_with_transformers(source: Path, folder: Path, trust_remote_code: bool) -> None:
    import openvino
    from openvino_tokenizers import convert_tokenizer as convert
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source, local_files_only=True, trust_remote_code=trust_remote_code)
    # Cleaning up spaces would change text that was already shown when the next token comes.
    encoder, decoder = convert(tokenizer, with_detokenizer=True, clean_up_tokenization_spaces=False)
    openvino.save_model(encoder, folder / "openvino_tokenizer.xml")
    openvino.save_model(decoder, folder / "openvino_detokenizer.xml")
