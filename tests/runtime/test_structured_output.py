"""Answers that follow a grammar: the same text with any drafter, valid to the last character, in fewer rounds."""

import itertools
import json
import re
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

import outrider
from grammars import EOS, SCHEMAS, VOCAB_SIZE, make_request, new_grammars, save_pair
from in_the_loop import run, say
from outrider.config import GenerationConfig
from outrider.decoding.answer import Answer
from outrider.decoding.checks import _allowed
from outrider.drafters import DraftModel, HiddenModel, MarkovHead
from outrider.testing import FakeBackend, FakeHead
from outrider.tokens.grammar import Grammars, GrammarSource
from outrider.tokens.sampling import LogitsSampler
from outrider.tokens.verifiers import BlockRejection, Coupled, Greedy, TokenRejection
from outrider.types import Distribution, Draft, Drafter, LogitsRow, Noise
from outrider_bench.verify.exact import chi_square_p_value
from tiny import train_tokenizer

TOKENIZER = train_tokenizer()
LARK = 'start: "the " noun ("," " " noun)~1..3\nnoun: /fo[xg]/ | "dog" | %json {"type": "boolean"}'
MODES: list[dict[str, Any]] = [{}, {"temperature": 1.0, "seed": 5}, {"temperature": 1.0, "seed": 6, "top_k": 40}]


@pytest.fixture(scope="module")
def engine(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> outrider.Engine:
    bundle = save_pair(tmp_path_factory.mktemp("pair") / "bundle", tiny / "tokenizer")
    return outrider.Engine(bundle, outrider.Config().replace(cache_size=0.01))


def token_of(character: str) -> int:
    (token_id,) = TOKENIZER.encode(character).ids
    return int(token_id)


def text_of(engine: outrider.Engine, **options: Any) -> outrider.Result:
    return engine.generate([1, 2, 3], **{"max_new_tokens": 400, **options})


@pytest.mark.fast_cases(6)
@pytest.mark.parametrize("schema", SCHEMAS.values(), ids=SCHEMAS.keys())
def test_random_models_write_valid_json(engine: outrider.Engine, schema: dict[str, Any]) -> None:
    for mode in MODES:
        plain = text_of(engine, json_schema=schema, drafter=None, **mode)
        assert plain.finish_reason == "stop"
        jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker()).validate(
            json.loads(plain.text)
        )
        assert not {*EOS} & {*plain.token_ids}  # nothing but the end may follow, so it is not asked for
        for drafter in ("ngram", "draft", "auto"):
            drafted = text_of(engine, json_schema=schema, drafter=drafter, num_assistant_tokens=4, **mode)
            assert drafted.token_ids == plain.token_ids
            assert drafted.finish_reason == "stop"


@pytest.mark.parametrize("sampling", ["rejection", "token-rejection", "threshold", "typical"])
def test_modes_whose_text_depends_on_drafts_are_valid_too(engine: outrider.Engine, sampling: str) -> None:
    for seed, drafter in itertools.product(range(2), ("suffix", "draft")):
        options = {"temperature": 1.0, "sampling": sampling, "seed": seed, "num_assistant_tokens": 4}
        result = text_of(engine, json_schema=SCHEMAS["object"], drafter=drafter, **options)
        jsonschema.validate(json.loads(result.text), SCHEMAS["object"])


def test_regular_expressions_and_lark(engine: outrider.Engine) -> None:
    for mode in MODES:
        for options, pattern in (
            ({"regex": r"[a-f]{3}-\d{2,4}"}, r"[a-f]{3}-\d{2,4}"),
            ({"grammar": LARK}, r"the (fo[xg]|dog|true|false)(, (fo[xg]|dog|true|false)){1,3}"),
        ):
            results = [text_of(engine, drafter=drafter, **options, **mode) for drafter in (None, "suffix", "draft")]
            texts = [re.sub(r"<\|.*", "", result.text) for result in results]
            assert re.fullmatch(pattern, texts[0]), texts[0]
            assert len({result.text for result in results}) == 1


def test_an_answer_may_go_on_or_end(engine: outrider.Engine) -> None:
    """Where the grammar accepts and may go on, the model decides; the end is a token as elsewhere."""
    results = [text_of(engine, regex="[ab]{1,9}", temperature=1.0, seed=seed) for seed in range(12)]
    assert {result.finish_reason for result in results} == {"stop"}
    assert {len(result.text) for result in results} > {1, 2}
    for result in results:
        assert (result.token_ids[-1] in EOS) == (len(result.text) < 9)


def test_an_answer_that_is_cut(engine: outrider.Engine) -> None:
    result = text_of(engine, json_schema=SCHEMAS["const"], max_new_tokens=7)
    assert result.finish_reason == "length"
    assert '{"version": "2.0"'.startswith(result.text)


def test_forced_tokens_are_drafted(engine: outrider.Engine) -> None:
    """And a draft model is not asked for them."""
    schema, before = SCHEMAS["const"], engine.draft_models["draft"].seconds
    plain = text_of(engine, json_schema=schema, drafter=None)
    assert plain.stats.tokens_per_round == 1
    for drafter in ("ngram", "draft", "auto"):
        stats = text_of(engine, json_schema=schema, drafter=drafter).stats
        assert stats.num_generated_tokens == plain.stats.num_generated_tokens
        assert stats.num_rounds <= 8  # of 39 tokens
        assert stats.acceptance_rate == 1  # and the last round has no bonus token to offer
    assert engine.draft_models["draft"].seconds == before


def test_several_answers_with_grammars_of_their_own(engine: outrider.Engine) -> None:
    schemas = [*SCHEMAS.values()] * 2
    alone = [text_of(engine, json_schema=schema, temperature=1.0, seed=i) for i, schema in enumerate(schemas)]
    free = text_of(engine, temperature=1.0, seed=0, max_new_tokens=60)
    with ThreadPoolExecutor(8) as pool:
        together = pool.map(
            lambda i: text_of(engine, json_schema=schemas[i], temperature=1.0, seed=i), range(len(schemas))
        )
        beside = [pool.submit(text_of, engine, temperature=1.0, seed=0, max_new_tokens=60) for _ in range(3)]
        for one, other in zip(alone, together, strict=True):
            assert one.token_ids == other.token_ids
        assert all(each.result().token_ids == free.token_ids for each in beside)


def test_an_error_in_one_grammar_is_that_requests_own(engine: outrider.Engine) -> None:
    vocabulary = [*range(VOCAB_SIZE)]
    with pytest.raises(outrider.NoTokenLeft, match="or a grammar"):
        text_of(engine, regex="[a-z]{9}", banned_token_ids=vocabulary[:-1], drafter="draft")
    assert text_of(engine, regex="[a-z]{9}").finish_reason == "stop"


# In the loop, with fakes


class Proposes(Drafter):
    """A drafter that proposes these tokens, whatever they are."""

    num_assistant_tokens = 8

    def __init__(self, drafts: Sequence[Draft]) -> None:
        self.drafts = [*drafts]

    def propose(self, requests: Sequence[Any]) -> list[Draft]:
        return [self.drafts.pop(0) if self.drafts else Draft([]) for _ in requests]


@pytest.fixture(scope="module")
def grammars(tmp_path_factory: pytest.TempPathFactory) -> Grammars:
    return new_grammars(tmp_path_factory.mktemp("tokenizer"))


def answer(main: FakeBackend, *requests: Answer) -> list[list[int]]:
    return [token_ids[2:] for token_ids in run(main, *requests, rows=64)]


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("kind", ["module", "block", "corrected block"])
def test_heads_see_the_masks(grammars: Grammars, kind: Any) -> None:
    main = FakeBackend(VOCAB_SIZE, seed=1, features=("late",))
    width = FakeBackend.width
    head = FakeHead(VOCAB_SIZE, kind.split()[-1], hidden_width=width, own_width=width)
    w1, w2 = np.random.default_rng(0).standard_normal((2, VOCAB_SIZE, 2)).astype("f4")
    corrects = MarkovHead(VOCAB_SIZE, w1, w2)
    made: Any = {
        "module": lambda: HiddenModel.module(head, ("late",), width, context_length=2000),
        "block": lambda: HiddenModel.block(head, ("late",), [3, 3, 3], context_length=2000),
        "corrected block": lambda: HiddenModel.block(head, ("late",), [3, 3, 3], corrects, context_length=2000),
    }
    for verifier in (Greedy(), Coupled()):
        for schema in SCHEMAS.values():
            source = GrammarSource("json_schema", json.dumps(schema))
            (plain,) = answer(main, make_request(grammars, source, verifier=verifier))
            drafted = make_request(grammars, source, made[kind](), verifier=verifier)
            assert answer(main, drafted) == [plain]
            grammar = grammars.new_state(source)
            assert grammar.num_until_complete(plain) == len(plain)
            assert grammar.is_complete(plain)


class Panic(BaseException):
    """As llguidance's, which is no Exception."""


@pytest.mark.parametrize("method", ["compute_bitmask", "try_consume_tokens"])
def test_a_panic_while_a_model_drafts_ends_that_draft_alone(grammars: Grammars, method: str) -> None:
    """Requests that the same draft model drafts for go on, and the text is the one without drafts."""
    main, source = FakeBackend(VOCAB_SIZE, seed=1), GrammarSource("regex", "[a-c]{30}")
    (plain,) = answer(main, make_request(grammars, source))

    class Panics:
        """A matcher with a method that panics."""

        def __init__(self, matcher: Any) -> None:
            self.matcher = matcher

        def __getattr__(self, name: str) -> Any:
            return self.panic if name == method else getattr(self.matcher, name)

        def panic(self, *_: Any) -> None:
            panics.append(method)
            raise Panic("index out of bounds")

    class Panicking(DraftModel):
        def propose(self, requests: Sequence[Any]) -> list[Draft]:
            state.matcher = Panics(state.matcher)
            return super().propose(requests)

    panics: list[str] = []
    drafter = Panicking(FakeBackend(VOCAB_SIZE, seed=1), context_length=1000, max_num_batched_tokens=64)
    requests = [make_request(grammars, source, drafter) for _ in range(2)]
    state: Any = requests[0].grammar
    assert answer(main, *requests) == [plain, plain]
    assert len(panics) > 1


def test_copies_are_cut_where_the_grammar_forbids_them(grammars: Grammars) -> None:
    """And go on with what it forces there, up to the round's limit."""
    a, b, c = (token_of(each) for each in "abc")
    request = make_request(grammars, GrammarSource("regex", "c(abXYZ|c)+!"), Proposes([]))
    say(request, c)
    request.sampler.commit([c])
    draft = Draft([a, b, a, b], confidences=[0.5, 0.4, 0.3, 0.2])
    assert _allowed(draft, request, goes_on=False) == Draft([a, b], confidences=[0.5, 0.4])
    longer = _allowed(draft, request, goes_on=True)
    assert longer == Draft([a, b, token_of("X"), token_of("Y")], confidences=[0.5, 0.4, 1.0, 1.0])
    assert _allowed(Draft([b]), request, goes_on=True) == Draft([])
    assert _allowed(Draft([]), request, goes_on=True) == Draft([])


def test_drafters_that_know_no_grammar(grammars: Grammars) -> None:
    """An app's own drafter may propose anything."""
    main, rng = FakeBackend(VOCAB_SIZE, seed=2), np.random.default_rng(1)
    for source in (
        GrammarSource("regex", "(aXb|bYc|c){3,9}!wwwww"),
        GrammarSource("json_schema", json.dumps(SCHEMAS["nested"])),
    ):
        (plain,) = answer(main, make_request(grammars, source))
        drafts = [Draft(rng.integers(0, VOCAB_SIZE, 4).tolist()) for _ in range(50)]
        drafts += [Draft([*plain[i : i + 2], 5, 5]) for i in range(len(plain))]
        rng.shuffle(drafts)
        drafted = make_request(grammars, source, Proposes(drafts))
        assert answer(main, drafted) == [plain]


def test_sampled_drafts_are_never_cut(grammars: Grammars) -> None:
    """To drop a drawn token after seeing it would bias the text: it is rejected, and another one is recovered."""
    request = make_request(grammars, GrammarSource("regex", "[ab]{8}"))
    certain = Distribution(np.array([token_of("x")]), np.array([1.0]))
    drawn = Draft([token_of("x")], probs=[certain])
    assert _allowed(drawn, request, goes_on=True) is drawn
    assert len(_allowed(Draft(drawn.token_ids), request, goes_on=True)) == 0
    tree = Draft([token_of("x"), token_of("a")], parents=[-1, -1])
    assert _allowed(tree, request, goes_on=True) is tree


@pytest.mark.slow
@pytest.mark.parametrize(
    "verifier",
    [pytest.param(TokenRejection(), marks=pytest.mark.slow), BlockRejection()],
    ids=lambda each: type(each).__name__,
)
def test_rejection_samples_the_masked_distribution(grammars: Grammars, verifier: Any) -> None:
    """Every text that the grammar allows, with its probability. False alarms: one in a million runs."""
    source = GrammarSource("regex", "[abc]X[ab]{2}")
    main = FakeBackend(VOCAB_SIZE, seed=3)
    draft = FakeBackend(VOCAB_SIZE, seed=3, noise=0.7)
    config = GenerationConfig(temperature=1.0)
    expected: dict[tuple[int, ...], float] = {}

    def grow(token_ids: tuple[int, ...], probability: float) -> None:
        state = grammars.new_state(source)
        state.commit(token_ids)
        if state.is_complete():
            expected[token_ids] = probability
            return
        row = LogitsRow.of(main.logits_after([7, 8, *token_ids]))
        found = LogitsSampler(config, [], grammar=state).distribution(row, [])
        for token_id, prob in zip(found.token_ids.tolist(), found.probs.tolist(), strict=True):
            grow((*token_ids, token_id), probability * prob)

    grow((), 1.0)
    assert sum(expected.values()) == pytest.approx(1)
    assert len(expected) >= 12
    model = DraftModel(draft, context_length=2000, reuse=False)
    counts: Counter[tuple[int, ...]] = Counter()
    for seed in range(50):
        many = [make_request(grammars, source, model, verifier=verifier, noise=Noise(seed * 50 + i)) for i in range(50)]
        counts.update(map(tuple, answer(main, *many)))
    assert chi_square_p_value(counts, expected) > 1e-6
