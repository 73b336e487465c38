"""Cases in the layout of the published JSON-Schema-Test-Suite: schemas, with instances that are valid and others.

Source: https://github.com/json-schema-org/JSON-Schema-Test-Suite.
"""

import itertools
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema
import jsonschema_rs

from outrider.config import GenerationConfig
from outrider.errors import OptionError
from outrider.tokens.grammar import Grammars, GrammarSource

# A schema that does not name its draft is taken for 2020-12.
DRAFTS: dict[str, dict[str, str]] = {
    "draft2020-12": {},
    "draft7": {"$schema": "http://json-schema.org/draft-07/schema#"},
}
_ECMASCRIPT = "optional/ecmascript-regex.json"
_CONTENT = "draft7/optional/content.json"
# Why valid instances are refused, by the end of the file's path.
STRICTER = {
    "draft2020-12/format.json": "formats are followed, not only noted",
    "optional/format/date-time.json": "no leap seconds",
    "optional/format/time.json": "no leap seconds",
    "optional/format/email.json": "no quoted names and no addresses of hosts in an email",
    "optional/format/ipv6.json": "no IPv4 address within an ipv6",
    "optional/float-overflow.json": "no exponent in an integer",
    "draft7/ref.json": "keywords beside $ref count in draft 7 too",
    _ECMASCRIPT: "U+FEFF is no blank",
}
# Why invalid ones are accepted.
LOOSER = {
    _CONTENT: "contentEncoding and contentMediaType are only noted",
    _ECMASCRIPT: "U+FEFF is no blank",
}
# Why a schema is refused, by what the message says.
REFUSED = {
    r"Unimplemented keys: ": "keywords",
    r"oneOf constraints": "oneOf whose schemas may overlap",
    r"is not present in a registry": "references to other documents",
    r"Unknown format: ": "formats",
    r"is not a JSON schema|schema is false": "nothing is valid",
    r"are not disjoint|regex parse error": "patterns",
    r"Expected positive integer|too many digits|regex for float range": "numbers",
}


@dataclass(frozen=True)
class Case:
    """A schema. path: of its file, from the draft's name on. instances: JSON values, and whether each is valid."""

    path: str
    title: str
    schema: Any
    instances: list[tuple[Any, bool]]

    def __str__(self) -> str:
        return f"{self.path}: {self.title}: {json.dumps(self.schema)}"

    def errors(self, value: Any) -> list[str]:
        """Why a value is not valid, by two validators: one knows few formats, and its patterns are those of Python."""
        own = jsonschema.validators.validator_for(self.schema)
        validators = {
            _ECMASCRIPT: own(self.schema, format_checker=own.FORMAT_CHECKER),
            _CONTENT: jsonschema_rs.validator_for(self.schema, validate_formats=True),
        }
        asked = [validator for path, validator in validators.items() if not self.path.endswith(path)]
        return [error.message for validator in asked for error in validator.iter_errors(value)]


def read_cases(folder: Path) -> list[Case]:
    """Every schema of both drafts, optional features among them.

    `true` as a schema allows any value, and as the option `json_schema` any object: it becomes `{}`.
    """
    cases = []
    for draft, named in DRAFTS.items():
        for path in sorted((folder / "tests" / draft).rglob("*.json")):
            for group in json.loads(path.read_text(encoding="utf-8")):
                schema = {} if group["schema"] is True else group["schema"]
                cases.append(
                    Case(
                        path.relative_to(folder / "tests").as_posix(),
                        group["description"],
                        named | schema if isinstance(schema, dict) else schema,
                        [(test["data"], test["valid"]) for test in group["tests"]],
                    )
                )
    return cases


def source_of(grammars: Grammars, case: Case) -> GrammarSource | OptionError:
    """A case's grammar, or why it is refused."""
    try:
        source = GrammarSource.of(GenerationConfig(json_schema=case.schema))
        assert source is not None
        grammars.new_state(source)
    except OptionError as error:
        return error
    return source


def kind_of(error: OptionError) -> str:
    """The kind of a refusal, whose message is one line."""
    message = str(error)
    assert re.fullmatch(r"json_schema=.{1,90} (cannot be followed|is not a JSON schema).{3,400}\.", message), message
    return next(kind for pattern, kind in REFUSED.items() if re.search(pattern, message))


def judge(grammars: Grammars, encode: Callable[[str], list[int]], case: Case, source: GrammarSource) -> Iterator[str]:
    """Of each instance whether it is "accepted" or "refused" as it has to be, and otherwise why not."""

    def accepted(value: Any) -> bool:
        return _accepts(grammars, source, encode(json.dumps(value, ensure_ascii=False)))

    for value, is_valid in case.instances:
        if not is_valid:
            yield _reason(LOOSER, case, value) if any(map(accepted, _orders(value))) else "refused"
        elif accepted(value):
            yield "accepted"
        elif any(map(accepted, _orders(value))):
            yield "keys in another order"
        elif any(map(accepted, _orders(_with_integers(value)))):
            yield "1.0 for 1"
        else:
            yield _reason(STRICTER, case, value)


def _accepts(grammars: Grammars, source: GrammarSource, token_ids: list[int]) -> bool:
    """Whether a grammar allows these tokens, one after the other, and the end after them."""
    state = grammars.new_state(source)
    for token_id in token_ids:
        if not state.num_allowed([token_id]):
            return False
        state.commit([token_id])
    return bool(state.matcher.is_accepting())


def _reason(reasons: dict[str, str], case: Case, value: Any) -> str:
    found = next((reason for path, reason in reasons.items() if case.path.endswith(path)), None)
    assert found, f"{case}: {json.dumps(value)}"
    return found


def _orders(value: Any) -> Iterator[Any]:
    """The value, with its own keys in every order."""
    if isinstance(value, dict) and len(value) < 6:
        yield from map(dict, itertools.permutations(value.items()))
    else:
        yield value


def _with_integers(value: Any) -> Any:
    """The value, with integers for numbers such as 1.0."""
    if isinstance(value, list):
        return [*map(_with_integers, value)]
    if isinstance(value, dict):
        return {key: _with_integers(each) for key, each in value.items()}
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 2**60 else value
