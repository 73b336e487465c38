"""The published JSON-Schema-Test-Suite: what the grammars accept, and the same valid texts with drafts and without.

It is the folder OUTRIDER_JSON_SCHEMA_SUITE, for `pytest -m slow`. A few cases of our own are always there.

    pip download --no-binary jsonschema --no-deps jsonschema && tar xf jsonschema-*.tar.gz   # has it as json/
    OUTRIDER_JSON_SCHEMA_SUITE=$(echo $PWD/jsonschema-*/json) pytest -m slow -s tests/runtime/test_json_schema_suite.py
"""

import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

import outrider
import schema_suite
from grammars import EOS, VOCAB_SIZE, new_grammars, save_pair
from outrider.tokens.grammar import Grammars, GrammarSource
from schema_suite import Case, Silent, Wrong, judge, kind_of, read_cases, source_of
from tiny import train_tokenizer

OWN = Path(schema_suite.__file__).with_name("schema_cases")
NAME = "OUTRIDER_JSON_SCHEMA_SUITE"
TOKENIZER = train_tokenizer()
WRONG, FORCED = Wrong(VOCAB_SIZE), Silent(VOCAB_SIZE)


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


@pytest.fixture(scope="module")
def engine(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[outrider.Engine]:
    bundle = save_pair(tmp_path_factory.mktemp("pair") / "bundle", tiny / "tokenizer")
    with outrider.Engine(bundle, outrider.Config().replace(cache_size=0.01, keep_records=False)) as engine:
        add_drafters(engine)
        yield engine


def add_drafters(engine: outrider.Engine) -> None:
    engine.add_drafter("wrong", WRONG)
    engine.add_drafter("forced", FORCED)


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


def biased(token_of: Callable[[str], int], eos: Iterable[int]) -> dict[str, Any]:
    """Towards the ends of texts, objects, arrays and answers, as random models find none of their own accord."""
    return {"logit_bias": dict.fromkeys([*map(token_of, '"}]'), *eos], 4.0)}


def compare(
    engine: outrider.Engine,
    cases: Iterable[Case],
    modes: list[dict[str, Any]],
    drafters: Iterable[str],
    prompt: Callable[[Case], Any],
) -> Counter[str]:
    """Figures of answers in all modes, which are the same with every drafter, and valid if they end.

    Raises:
        AssertionError: when one is not.
    """
    found = Counter[str]()
    for case in cases:
        for mode in modes:
            options = {"json_schema": case.schema, "max_new_tokens": 48, **mode}
            plain = engine.generate(prompt(case), drafter=None, **options)
            found["plain"] += 1
            found[plain.finish_reason] += 1
            if plain.finish_reason == "stop":
                assert not case.errors(json.loads(plain.text)), f"{case}: {plain.text}"
            WRONG.answer = plain.token_ids
            for drafter in drafters:
                drafted = engine.generate(prompt(case), drafter=drafter, num_assistant_tokens=4, **options)
                assert drafted.token_ids == plain.token_ids, f"{case}: {drafter}: {drafted.text} for {plain.text}"
                assert (drafted.text, drafted.finish_reason) == (plain.text, plain.finish_reason)
                found["drafted"] += 1
                found[f"accepted of {drafter}"] += drafted.stats.num_accepted_tokens
                found[f"rejected of {drafter}"] += drafted.stats.num_draft_tokens - drafted.stats.num_accepted_tokens
    return found


def test_texts(engine: outrider.Engine, grammars: Grammars, cases: list[Case]) -> None:
    ends = biased(lambda text: int(TOKENIZER.encode(text).ids[0]), EOS)
    modes: list[dict[str, Any]] = [{}, ends, {"temperature": 1.0, "seed": 5, **ends}]
    taken = [case for case in cases if isinstance(source_of(grammars, case), GrammarSource)]
    drafters = ("ngram", "suffix", "draft", "forced", "wrong")
    found = compare(engine, taken, modes, drafters, lambda case: [1, 2, 3])
    print(f"\n{len(taken)} schemas: {found}")
    assert found["stop"] > found["plain"] / 3
    assert found["rejected of wrong"]
    assert found["rejected of ngram"]
    assert found["accepted of forced"]
    assert not found["rejected of forced"]
    for case in cases:
        if case not in taken:
            with pytest.raises(outrider.OptionError):
                engine.generate([1, 2, 3], json_schema=case.schema)


@pytest.mark.slow
def test_a_real_model(smollm2: Path, grammars: Grammars) -> None:
    taken = [case for case in published() if isinstance(source_of(grammars, case), GrammarSource)]
    sample = [taken[i * len(taken) // 60] for i in range(60)]
    modes: list[dict[str, Any]] = [{}, {"temperature": 0.8, "seed": 3}]
    with outrider.load(smollm2, cache_size=0.3) as engine:
        add_drafters(engine)
        drafters = ("suffix", "forced", "wrong")
        found = compare(engine, sample, modes, drafters, lambda case: f"JSON for: {json.dumps(case.schema)[:200]}")
    print(f"\n{len(sample)} schemas: {found}")
    assert found["stop"] > found["plain"] / 3
    assert found["rejected of wrong"]
