"""What a grammar costs: limits of time and memory, and what becomes of those who wait beside it."""

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import outrider
from grammars import EOS, SCHEMAS, VOCAB_SIZE, make_request, new_grammars
from in_the_loop import run
from outrider.decoding.answer import Answer
from outrider.errors import EngineClosed, NoTokenLeft, OptionError
from outrider.system import processes
from outrider.testing import FakeBackend
from outrider.tokens.grammar import GrammarLimits, Grammars, GrammarSource
from outrider.types import Draft, Drafter
from toys import wait_until

ATTACK = GrammarSource("grammar", "start: A\nA: " + " & ".join(f"/(?s:.*)w{i}(?s:.*)/" for i in range(26)))
DEAR = [
    GrammarSource("json_schema", json.dumps({"allOf": [{"type": "string"}, {"pattern": f"^a{i}b*$"}]}))
    for i in range(4)
]
QUICK = GrammarLimits(compile_seconds=0.2)
PATIENT = GrammarLimits(compile_seconds=10, compile_memory=1 << 30)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    new_grammars(folder).close()
    return folder


@pytest.fixture
def make(folder: Path) -> Iterator[Callable[..., Grammars]]:
    made: list[Grammars] = []

    def new(limits: GrammarLimits | None = None) -> Grammars:
        made.append(Grammars(folder, VOCAB_SIZE, EOS, limits))
        return made[-1]

    yield new
    for each in made:
        each.close()
        assert not each.trials.process_ids


# Compiling


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(("limits", "says"), [
    (QUICK, "compiling it takes more than 0.2 seconds, the limit. Simplify it"),
    (GrammarLimits(compile_memory=40 << 20), "compiling it takes more than 40 MB of memory, the limit. Simplify"),
], ids=["seconds", "memory"])  # fmt: skip
def test_a_grammar_beyond_a_limit_is_refused(
    make: Callable[..., Grammars], limits: GrammarLimits, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process is ended. It is refused again without another, and the next grammar is compiled."""
    grammars = make(limits)
    with pytest.raises(OptionError, match=says) as raised:
        grammars.new_state(ATTACK)
    assert "\n" not in str(raised.value)
    assert not grammars.trials.process_ids
    assert grammars.is_quick(ATTACK)
    assert grammars.new_state(DEAR[0]).num_allowed([]) == 0
    assert len(grammars.trials.process_ids) == 1
    monkeypatch.setattr(grammars.trials, "ask", None)
    with pytest.raises(OptionError, match=says):
        grammars.new_state(ATTACK)
    assert not grammars.is_quick(DEAR[1])
    assert grammars.is_quick(DEAR[0])


def test_closing_ends_compilations(make: Callable[..., Grammars]) -> None:
    grammars = make(PATIENT)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(grammars.new_state, ATTACK)
        wait_until(lambda: grammars.trials.process_ids)
        grammars.close()
        with pytest.raises(EngineClosed):
            waiting.result(60)
    with pytest.raises(EngineClosed):
        grammars.new_state(ATTACK)


def test_a_client_that_leaves_ends_its_compilation(make: Callable[..., Grammars]) -> None:
    """So that others' grammars have their turn: as many were compiled as may be at a time."""
    grammars, gone = make(PATIENT), threading.Event()
    attacks = [ATTACK, GrammarSource("grammar", ATTACK.text + " "), ATTACK]
    with ThreadPoolExecutor(4) as pool:
        waiting = [pool.submit(grammars.new_state, attack, gone) for attack in attacks]
        wait_until(lambda: len(grammars.trials.process_ids) == 2)
        other = pool.submit(grammars.new_state, DEAR[0])
        assert not other.done()
        gone.set()
        for each in waiting:
            with pytest.raises(OptionError, match="client has left"):
                each.result(60)
        assert other.result(60)
    assert not grammars.is_quick(ATTACK)  # nothing was found out about it


def test_a_task_that_is_cancelled_ends_its_compilation(tiny: Path) -> None:
    pytest.importorskip("llguidance", reason="the extra [structured]")
    with outrider.load(tiny, cache_size=0.02, keep_records=False) as engine:
        grammars: Any = engine._preparation.grammars
        grammars._compiler._limits = PATIENT

        async def leave() -> None:
            task = asyncio.create_task(engine.agenerate("hello", grammar=ATTACK.text))
            await asyncio.to_thread(wait_until, lambda: grammars.trials.process_ids)
            text = (await engine.agenerate("hello", regex="ab?c", max_new_tokens=4)).text
            assert text.startswith("a")
            task.cancel()
            await asyncio.to_thread(wait_until, lambda: not grammars.trials.process_ids)

        asyncio.run(leave())


def test_where_no_process_can_be_started(make: Callable[..., Grammars], monkeypatch: pytest.MonkeyPatch) -> None:
    """In an app that is frozen into one file."""
    monkeypatch.setattr(processes, "child_command", lambda _: None)
    assert make(QUICK).new_state(DEAR[0])


def test_compiled_grammars_are_kept_up_to_their_memory(make: Callable[..., Grammars]) -> None:
    grammars = make()
    for source in DEAR[:3]:
        grammars.new_state(source)
        entry = grammars._entries[source]
        assert entry.compiled
        entry.compiled = entry.compiled._replace(memory=300 << 20)
    grammars.new_state(DEAR[2])
    assert [*map(grammars.is_quick, DEAR[:3])] == [False, False, True]


@pytest.mark.parametrize(("source", "is_cheap"), [
    (GrammarSource("regex", "[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"), True),
    (GrammarSource("regex", "(a{1000}){1000}"), False),
    (GrammarSource("regex", "(?sx)(a{1 0 0 0}){1 0 0 0}"), False),
    (GrammarSource("regex", "a{0000000001000}{1000}"), False),
    (GrammarSource("regex", "a" * 600), False),
    (GrammarSource("grammar", 'start: "yes" | "no"\n'), True),
    (ATTACK, False),
    (GrammarSource("grammar", 'root ::= "a" # ' + "a" * 1000), False),
    (GrammarSource("grammar", "start: A{100}\nA: B{100}\nB: /a/"), False),
    (GrammarSource("tools", 'start: %json {"properties": {"a": {"type": "string"}}}'), True),
    (GrammarSource("grammar", "start: /(a{1 0 0 0}){1 0 0 0}/x"), False),
    (GrammarSource("grammar", "start: /(?x:(a{1 0 0 0}){1 0 0 0})/"), False),
    (GrammarSource("tools", 'start: %json {"allOf": []}'), False),
    (GrammarSource("json_schema", '{"maxLength": 100000}'), False),
    (GrammarSource("json_schema", '{"maxLength": 100}'), True),
    (GrammarSource("json_schema", '{"maxLength": 1e3}'), False),
    (GrammarSource("json_schema", '{"multipleOf": 0.01}'), False),
    (GrammarSource("json_schema", json.dumps({"items": [{"pattern": "a"}]})), False),
    *((GrammarSource("json_schema", json.dumps(SCHEMAS[name])), True) for name in ("object", "array", "enum",
     "ref")),
])  # fmt: skip
def test_grammars_that_are_certain_to_be_cheap(source: GrammarSource, is_cheap: bool) -> None:
    assert source.is_cheap == is_cheap


REFUSED_SOON = [
    GrammarSource("regex", "(?=a)b"),
    GrammarSource("regex", r"(a)\1"),
    GrammarSource("grammar", "start: A\nA: /a/ A"),
    GrammarSource("grammar", "start: a\na: a"),
    GrammarSource(
        "json_schema", json.dumps({"$ref": "#/$defs/a", "$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}] * 2}}})
    ),
    GrammarSource("json_schema", json.dumps({"patternProperties": {f"^a*{i}": {} for i in range(40)}})),
]
NASTY = [
    GrammarSource("regex", "(" * 300 + "a" + "){2}" * 300),
    GrammarSource("regex", "(a{1000}){1000}"),
    GrammarSource("regex", "((a|b)*a(a|b){30}){40}"),
    GrammarSource("regex", "(a*)*" * 200),
    GrammarSource("regex", "a{999999999}"),
    GrammarSource("regex", r"(\p{L}|\P{L}){0,500}x" * 3),
    GrammarSource("grammar", "start: a\na: b a | b\nb: a b | /x/"),
    GrammarSource("grammar", "start: A\nA: ~(" + "~/a.*b/ & " * 12 + "/b/)"),
    ATTACK,
    GrammarSource("json_schema", json.dumps({"type": "string", "allOf": [{"pattern": f"w{i}"} for i in range(26)]})),
    GrammarSource("json_schema", json.dumps({"enum": [f"value {i}" for i in range(5_000)]})),
    GrammarSource("json_schema", json.dumps({"properties": {f"p{i}": {"type": "string"} for i in range(3_000)}})),
    GrammarSource(
        "json_schema", json.dumps({"type": "integer", "allOf": [{"multipleOf": n} for n in (97, 89, 83, 79)]})
    ),
    GrammarSource("json_schema", json.dumps({"anyOf": [{"anyOf": [{"minLength": i}] * 20} for i in range(40)]})),
]


@pytest.mark.parametrize("sources", [REFUSED_SOON, pytest.param(NASTY, marks=pytest.mark.slow)], ids=["soon", "all"])
def test_grammars_that_are_made_to_hurt(make: Callable[..., Grammars], sources: list[GrammarSource]) -> None:
    """Each is refused in a line, or an answer may begin with it. None takes longer than the limits say."""
    grammars = make(GrammarLimits(compile_seconds=0.5, compile_memory=100 << 20))
    says: list[str] = []
    for source in sources:
        try:
            state = grammars.new_state(source)
            state._mask(())
        except (OptionError, NoTokenLeft) as error:
            says.append(str(error))
    assert max(map(len, says)) < 500
    assert not any("\n" in each for each in says)


# Masks


def state_of(request: Answer) -> Any:
    return request.grammar


def answer(*requests: Answer) -> list[list[int]]:
    return [token_ids[2:] for token_ids in run(FakeBackend(VOCAB_SIZE, seed=1), *requests, rows=64)]


class Proposes(Drafter):
    num_assistant_tokens = 4

    def propose(self, requests: Any) -> list[Draft]:
        return [Draft([5, 6]) for _ in requests]


def test_answers_whose_masks_are_timed_are_the_same(
    make: Callable[..., Grammars], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Masks that take long are computed one by one from the next round on."""
    grammars = make()
    sources = [
        GrammarSource("json_schema", json.dumps(SCHEMAS[name])) for name in ("object", "enum", "optional", "lengths")
    ]
    expected = [answer(make_request(grammars, source)) for source in sources]
    monkeypatch.setattr("outrider.tokens.grammar.state._QUICK_SECONDS", -1)
    for source, plain in zip(sources, expected, strict=True):
        timed = [make_request(grammars, source), make_request(grammars, source, drafter=Proposes())]
        assert answer(*timed) == plain * 2
        assert all(state_of(each).is_timed for each in timed)


@pytest.mark.parametrize(("limits", "says"), [
    (GrammarLimits(mask_seconds=-1), "took 0.0 seconds, and the limit of a token is -1"),
    (GrammarLimits(answer_seconds=-1), "took 0.0 seconds in all, and the limit of an answer is -1"),
], ids=["token", "answer"])  # fmt: skip
def test_an_answer_beyond_the_limit_of_its_masks_fails_alone(
    make: Callable[..., Grammars], limits: GrammarLimits, says: str
) -> None:
    other = make_request(make(), GrammarSource("regex", "[a-c]{20}"))
    (expected,) = answer(make_request(make(), GrammarSource("regex", "[a-c]{20}")))
    failing = make_request(make(limits), GrammarSource("regex", "(a|b){30}"))
    state_of(failing).is_timed = True
    run(FakeBackend(VOCAB_SIZE, seed=1), other, failing, rows=64, spared=(NoTokenLeft,))
    assert other.sequence.generated_token_ids == expected
    assert isinstance(failing.error, NoTokenLeft)
    assert f"regex cannot be followed further: finding the tokens that may come next {says}" in str(failing.error)
