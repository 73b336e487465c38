"""The steps of OpenVINO's tokenizers for the parts of a `tokenizer.json` in today's spelling.

A function returns None for a part that it does not know.
"""

from __future__ import annotations

import base64
import re
from typing import Any

from outrider.inputs.text.token_bytes import BYTE_PIECE, SPACE

_UNICODE = ("NFC", "NFD", "NFKC", "NFKD")
# The parts of tokenizer.json that may be a sequence of steps, and the key of these.
_KEYS = {
    "normalizer": "normalizers",
    "pre_tokenizer": "pretokenizers",
    "post_processor": "processors",
    "decoder": "decoders",
}
# Behaviours of a split under OpenVINO's names; "Removed", inverted, drops what is between the matches.
_BEHAVIOURS = {"Isolated": "isolate", "MergedWithPrevious": "mergedwithprevious", "MergedWithNext": "mergedwithnext"}
# Unicode's white space, of which `\s` has a part only where a text is normalised.
_BLANKS = r"[\s\x{85}\x{A0}\x{1680}\x{2000}-\x{200A}\x{2028}\x{2029}\x{202F}\x{205F}\x{3000}]"
_PUNCTUATION = r"[!-/:-@\[-`{-~\p{P}]"


def steps_of(tokenizer: dict[str, Any], part: str) -> list[dict[str, Any]]:
    """The steps of a part; none where it is left out."""
    step = tokenizer[part]
    if step is None:
        return []
    return list(step[_KEYS[part]]) if step["type"] == "Sequence" else [step]


def normalizer(step: dict[str, Any]) -> Any:
    """One normaliser's step."""
    from openvino_tokenizers import tokenizer_pipeline as steps

    if step["type"] in _UNICODE:
        return steps.NormalizeUnicode(step["type"])
    if step["type"] == "Prepend":
        return steps.RegexNormalizationStep.prepend_regex(step["prepend"])
    if step["type"] == "Replace" and step["pattern"] == {"String": " "}:
        return steps.RegexNormalizationStep.replace_spaces_metaspace(step["content"])
    if step["type"] == "Replace" and "Regex" in step["pattern"] and "$" not in step["content"]:
        return steps.RegexNormalizationStep(step["pattern"]["Regex"], step["content"])
    if step["type"] == "Strip":
        ends = rf"\A{_BLANKS}+" * step["strip_left"], rf"{_BLANKS}+\z" * step["strip_right"]
        return steps.RegexNormalizationStep("|".join(filter(None, ends)) or "(?!)", "")
    if step["type"] == "Precompiled":
        charsmap = base64.b64decode(step["precompiled_charsmap"])
        return steps.CharsmapStep(charsmap=charsmap, remove_extra_whitespaces=False)
    return None


def decoders(tokenizer: dict[str, Any]) -> list[Any] | None:
    """The decoder's steps after `texts_of`."""
    from openvino_tokenizers import tokenizer_pipeline as steps

    known = {"ByteLevel": steps.CharsToBytesStep, "Fuse": steps.FuseStep, "Strip": None, "Replace": None}
    parts = [step for step in steps_of(tokenizer, "decoder") if not _is_of_pieces(step)]
    made: list[Any] = []
    for step in parts:
        if step["type"] == "Metaspace" and step["replacement"] == SPACE and step["prepend_scheme"] == "always":
            made += [steps.FuseStep(), steps.RegexDecodingStep.strip_forward_space()]
        elif step["type"] == "Strip" and (step["start"], step["stop"]) == (1, 0):
            made.append(steps.RegexDecodingStep.parse_strip_dict(step))
        elif (make := known.get(step["type"])) is not None:
            made.append(make())
        else:
            return None
    return made


def texts_of(tokenizer: dict[str, Any], pieces: list[str]) -> list[bytes]:
    """The text of each piece as bytes, for tokenizers that are not byte-level.

    OpenVINO's `ByteFallback` (2026.4) takes any piece of the length of <0x0A> in angle brackets for a byte, such as
    Gemma's <code>.
    """
    parts = steps_of(tokenizer, "decoder")
    has_bytes = tokenizer["model"]["byte_fallback"] and any(step["type"] == "ByteFallback" for step in parts)
    found = []
    for text in pieces:
        for step in parts:
            if step["type"] == "Metaspace":
                text = text.replace(step["replacement"], " ")
            elif step["type"] == "Replace" and "String" in step["pattern"]:
                text = text.replace(step["pattern"]["String"], step["content"])
        is_byte = has_bytes and BYTE_PIECE.fullmatch(text)
        found.append(bytes.fromhex(text[3:5]) if is_byte else text.encode("utf-8", "surrogatepass"))
    return found


def _is_of_pieces(step: dict[str, Any]) -> bool:
    """Whether `texts_of` has done this step."""
    return step["type"] == "ByteFallback" or (step["type"] == "Replace" and "String" in step["pattern"])


def splits(tokenizer: dict[str, Any]) -> list[Any] | None:
    """The pre-tokenizer's steps.

    They must not be merged into one expression: each splits the pieces of the one before.
    """
    parts = steps_of(tokenizer, "pre_tokenizer")
    words = [step["type"] for step in parts] == ["WhitespaceSplit", "Metaspace"]
    made = [_splits(step, tokenizer) for step in (parts[1:] if words else parts)]
    if any(each is None for each in made):
        return None
    return [*(_words() if words else []), *(step for each in made for step in each or [])]


def _words() -> list[Any]:
    """A text is split at its spaces, of any kind and number, and each word begins with a space (T5)."""
    from openvino_tokenizers import tokenizer_pipeline as steps

    return [
        steps.RegexNormalizationStep(rf"\A{_BLANKS}+|{_BLANKS}+\z", ""),
        steps.RegexNormalizationStep(rf"{_BLANKS}+{SPACE}?", SPACE),
    ]


def _splits(step: dict[str, Any], tokenizer: dict[str, Any]) -> list[Any] | None:
    from openvino_tokenizers import tokenizer_pipeline as steps

    def split(pattern: str, behaviour: str = "isolate", *, invert: bool = False) -> Any:
        return steps.RegexSplitStep(pattern, behaviour=behaviour, invert=invert, mergeable=False)

    if step["type"] == "Digits":
        return [split(r"\p{N}" if step["individual_digits"] else r"\p{N}+")]
    if step["type"] == "Punctuation" and step["behavior"] in ("Isolated", "Contiguous"):
        return [split(_PUNCTUATION + "+" * (step["behavior"] == "Contiguous"))]
    if step["type"] == "Split" and "Regex" in step["pattern"]:
        pattern, removed = flat(step["pattern"]["Regex"]), (step["behavior"], step["invert"]) == ("Removed", True)
        behaviour = "remove" if removed else None if step["invert"] else _BEHAVIOURS.get(step["behavior"])
        return [split(pattern, behaviour, invert=removed)] if pattern is not None and behaviour else None
    if step["type"] == "Split" and step["pattern"] == {"String": " "}:
        # Where spaces have been replaced, there are none to split at (Gemma).
        replaced = [each.get("pattern") for each in steps_of(tokenizer, "normalizer")]
        return [] if {"String": " "} in replaced else None
    if step["type"] == "Metaspace" and step["replacement"] == SPACE:
        made: list[Any] = [steps.RegexNormalizationStep.replace_spaces_metaspace(SPACE)]
        if step["prepend_scheme"] == "always":
            made.append(steps.RegexNormalizationStep.prepend_with_check_regex(SPACE, SPACE))
        # "mergedwithnext" would drop one of two spaces.
        return [*made, *([split(f"{SPACE}[^{SPACE}]*")] if step["split"] else [])]
    if step["type"] == "ByteLevel" and not step["add_prefix_space"]:
        pattern = steps.RegexSplitStep.byte_level_splitter().split_pattern
        return [*([split(pattern)] if step["use_regex"] else []), steps.BytesToCharsStep()]
    return None


def flat(pattern: str) -> str | None:
    """A pattern whose sets have no sets within, as PCRE reads them (BLOOM); None if that would be another pattern.

    >>> flat("[^(a|[bc])]+"), flat("[a[^b]]")
    ('[^(a|bc)]+', None)
    """
    made, depth, last = [], 0, ""
    for part in _PARTS.findall(pattern):
        is_open, is_close = part == "[", part == "]" and depth > 0
        if (depth > 1 and (last, part) == ("[", "^")) or (depth and (last, part) == ("&", "&")):
            return None
        depth += is_open - is_close
        made.append("" if (is_open and depth > 1) or (is_close and depth > 0) else part)
        last = part
    return "".join(made)


_PARTS = re.compile(r"\\.|\[:\^?\w+:\]|.", re.DOTALL)  # escapes, and sets by name, are wholes


def prepends_first(tokenizer: dict[str, Any]) -> bool:
    """Whether a text that does not begin with an added token or a space gets a space before it."""
    parts = steps_of(tokenizer, "pre_tokenizer")
    return any(step["type"] == "Metaspace" and step["prepend_scheme"] == "first" for step in parts)
