"""The published JSON-Schema-Test-Suite: what the grammars accept.

It is the folder OUTRIDER_JSON_SCHEMA_SUITE, for `pytest -m slow`. A few cases of our own are always there.

    pip download --no-binary jsonschema --no-deps jsonschema && tar xf jsonschema-*.tar.gz   # has it as json/
    OUTRIDER_JSON_SCHEMA_SUITE=$(echo $PWD/jsonschema-*/json) pytest -m slow -s tests/runtime/test_json_schema_suite.py
"""

import os
from collections import Counter
from pathlib import Path

import pytest

import schema_suite
from grammars import new_grammars
from outrider.tokens.grammar import Grammars, GrammarSource
from schema_suite import Case, judge, kind_of, read_cases, source_of
from tiny import train_tokenizer

OWN = Path(schema_suite.__file__).with_name("schema_cases")
NAME = "OUTRIDER_JSON_SCHEMA_SUITE"
TOKENIZER = train_tokenizer()


@pytest.fixture(scope="module", params=["own", pytest.param("published", marks=pytest.mark.slow)])
def cases(request: pytest.FixtureRequest) -> list[Case]:
    if request.param == "own":
        return read_cases(OWN)
    return published()


def published() -> list[Case]:
    if not os.environ.get(NAME):
        pytest.skip(f"{NAME} names no folder with the JSON-Schema-Test-Suite")
    found = read_cases(Path(os.environ[NAME]))
    assert len(found) > 500, f"{NAME}={os.environ[NAME]} has {len(found)} schemas: is it the suite's folder?"
    return found


@pytest.fixture(scope="module")
def grammars(tmp_path_factory: pytest.TempPathFactory) -> Grammars:
    return new_grammars(tmp_path_factory.mktemp("tokenizer"))


def test_instances(grammars: Grammars, cases: list[Case]) -> None:
    """Every difference from the suite has a reason, and most of them are that the grammar is stricter."""
    refusals, verdicts = Counter[str](), Counter[str]()
    for case in cases:
        source = source_of(grammars, case)
        if isinstance(source, GrammarSource):
            verdicts.update(judge(grammars, lambda text: TOKENIZER.encode(text).ids, case, source))
        else:
            refusals[kind_of(source)] += 1
    print(f"\n{len(cases)} schemas, refused {refusals.total()}: {refusals}\ninstances: {verdicts}")
    assert {"accepted", "refused", "keys in another order", "1.0 for 1", "no leap seconds"} <= {*verdicts}
    assert {"keywords", "references to other documents", "nothing is valid"} <= {*refusals}
