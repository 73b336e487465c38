"""The fault drill: what one request, or one app's code, brings reaches no other request.

Eight requests, in slow tests fewer, decode texts that are known beforehand. All the time a ninth brings faults, one
after the other, at every place where an app's code or values enter. The other texts have to be right to the last token.
"""

import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, cast

import pytest

import outrider
from adapters import write_adapter
from faults import (
    DRAFTER,
    SOUND,
    VALUES,
    Fault,
    Faulty,
    Recorder,
    Trees,
    Unspeakable,
    faults_of,
    members_of,
)
from grammars import save_pair
from heads import write_head
from outrider.bundle import Format, read_bundle
from outrider.decoding import own
from outrider.decoding.request_queue import Submitted
from outrider.errors import OutriderError
from outrider.inputs.text import Tokenizer
from outrider.inputs.text import tokenizer as own_tokenizer
from outrider.tokens.grammar import GrammarState
from outrider.types import ChatTokenizer
from tiny import SHAPE

pytest.importorskip("gguf", reason="writes the file that the bundle is made of")

PROMPT = [*range(20, 40), *range(20, 40)]
NINTH: dict[str, Any] = {"max_new_tokens": 6, "ignore_eos": True}
LONG: dict[str, Any] = {"max_new_tokens": 40, "ignore_eos": True}
SEEDED: dict[str, Any] = {"temperature": 1.0, "seed": 5}
MARK = 77  # a token that the ninth alone writes
TIMED = {
    "follow",
    "guess",
    "draft_ahead",
    "first_seconds",
    "prompt_of",
    "replays",
    "name",  # read where an idle job says whose it is
}  # members that are used as measured times, other requests, a prefix store and idle time have it
EIGHT: dict[str, dict[str, Any]] = {
    "greedy": {"drafter": None},
    "seeded": {"drafter": None, **SEEDED},
    "copies": {"drafter": "suffix"},
    "automatic": {"drafter": "auto", **SEEDED},
    "grammar": {"drafter": "suffix", "regex": "[a-z ]{30,40}", "ignore_eos": False},
    "tree": {"drafter": "trees"},
}
FEW = {name: EIGHT[name] for name in ("seeded", "copies", "tree")}
HEAD = {"drafter": "eagle3", "num_assistant_tokens": 3}
MODEL = {"drafter": "draft", "num_assistant_tokens": 3}
OF: dict[str, dict[str, dict[str, Any]]] = {
    "openvino": {"head": HEAD, "adapter": HEAD | SEEDED | {"adapter": "pirate"}},
    "onnx": {"model": {"drafter": "draft"}, "sampled": MODEL | SEEDED},
    "states": {"model": {"drafter": "draft"}, "sampled": MODEL | SEEDED, "grammar": EIGHT["grammar"]},
}


def ignore(*_: Any) -> None:
    """Do nothing."""


class Drill:
    """An engine with eight requests that never stop, and a ninth."""

    def __init__(self, engine: outrider.Engine, eight: dict[str, dict[str, Any]]) -> None:
        self.engine, self.num_right, self._count = engine, 0, 0
        engine.add_drafter("trees", Trees())
        self.options = {name: LONG | {"banned_token_ids": (MARK,)} | options for name, options in eight.items()}
        plain = {"drafter": None, "num_assistant_tokens": 0}
        self.expected = {name: self.alone(PROMPT, **options | plain) for name, options in self.options.items()}
        self.right = self.alone(PROMPT, **NINTH, drafter=None)
        self._begun: dict[str, SimpleQueue[Any]] = {}
        self._used: dict[str, set[str]] = {}

    def alone(self, prompt: Any, **options: Any) -> list[int]:
        """The tokens of an answer."""
        return self.engine.generate(prompt, **options).token_ids

    def go_on(self) -> None:
        """Check those of the eight that have ended, and begin them again."""
        for name, options in self.options.items():
            if name not in self._begun or self.ended(name, wait=False):
                self._begun[name] = SimpleQueue()
                self.engine.submit(PROMPT, sink=self._begun[name].put, **options)

    def ended(self, name: str, *, wait: bool) -> bool:
        """Whether one of the eight has ended, with the right text."""
        while True:
            try:
                news = self._begun[name].get(wait, timeout=300)
            except Empty:
                assert not wait, f"{name} has not ended"
                return False
            assert not isinstance(news, BaseException), f"{name} has failed: {news!r}"
            if news.result:
                assert news.result.token_ids == self.expected[name], name
                self.num_right += 1
                return True

    def ninth(
        self,
        change: Callable[..., None] = ignore,
        before: Callable[..., None] = ignore,
        cancel: Any = None,
        **options: Any,
    ) -> outrider.Result | BaseException:
        """Run the ninth beside the eight. It ends with a text, or with an error.

        change: of its request. before: is called when the eight have begun.
        """
        self.go_on()
        before()
        news: SimpleQueue[Any] = SimpleQueue()
        try:
            request = self.engine.prepare(PROMPT, cancel=cancel, **NINTH | options)
        except (OutriderError, KeyboardInterrupt) as error:  # the latter is the user's, in the main thread
            return error
        change(request)
        Submitted(self.engine._queue, request, news.put)
        self.engine._queue.submit(request)
        while True:
            each: outrider.TextChunk | BaseException = news.get(timeout=300)
            if isinstance(each, BaseException):
                return each
            if each.result:
                return each.result

    def check(self, fault: Fault, found: outrider.Result | BaseException, right: list[int] | None = None) -> None:
        """A fault that came up ends the ninth with an error, or its text is right."""
        if isinstance(found, BaseException):
            in_its_own_thread = fault.error is KeyboardInterrupt and found.args == ("of an app's",)
            assert isinstance(found, OutriderError) or in_its_own_thread, f"{fault}: {found!r}"
        else:
            assert fault.error is None or not fault.count, f"{fault}"
            assert found.token_ids == (right or self.right), f"{fault}"

    def drafted(self, fault: Fault, base: str, **options: Any) -> None:
        """Run the ninth with a drafter that has a fault."""
        make, more = SOUND[base]
        self._count += 1
        name = f"own {self._count}"
        self.engine.add_drafter(name, Faulty(make(), fault))
        found = self.ninth(drafter=name, **more, **options)
        if not (fault.member == "release" or options.get("temperature")):
            self.check(fault, found)
        self.engine._registry._own.pop(name)

    def used(self, base: str) -> dict[str, bool]:
        """The members of a drafter that a request uses, and whether each is a method."""
        make, more = SOUND[base]
        name, recorder = f"sound {base}", Recorder(make())
        if name not in self.engine.drafters:
            self.engine.add_drafter(name, cast("Any", recorder))
            self._used[base] = recorder.names
            self.check(Fault("none"), self.ninth(drafter=name, **more))
        return {member: is_method for member, is_method in DRAFTER.items() if member in self._used[base]}

    def end(self) -> None:
        """Let the eight end, and ask once more."""
        for name in [*self._begun]:
            assert self.ended(name, wait=True)
        self._begun.clear()
        assert self.num_right >= len(self.options)
        assert self.alone(PROMPT, **NINTH, drafter="auto") == self.right


@pytest.fixture(scope="module")
def folders(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The bundle of each kind: with a head, and an adapter or a draft model; or a main and a draft model alone.

    Layers of "states" keep some, in both.
    """
    from outrider_export import add_adapter, add_drafter, export_bundle

    def make(kind: str) -> Path:
        root = tmp_path_factory.mktemp("drill")
        bundle, model = root / "bundle", tiny.with_name("tiny.gguf")
        if kind in ("onnx", "pair", "states"):
            form: Format = "onnx" if kind == "onnx" else "openvino"
            return save_pair(bundle, tiny / "tokenizer", format=form, states="gdn" * (kind == "states")).folder
        if kind == "openvino":
            shutil.copytree(tiny, bundle)
            add_adapter(bundle, write_adapter(root / "pirate", SHAPE, seed=1))
        else:
            export_bundle(model, draft=model, output=bundle, weights="int8", format="onnx")
        return add_drafter(bundle, write_head(root / "eagle3", "eagle3")).folder

    return make


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in OF if name != "onnx"]


@contextmanager
def drilling(kind: str, folder: Path, eight: dict[str, dict[str, Any]]) -> Iterator[Drill]:
    bundle = read_bundle(folder)
    config = outrider.Config().replace(cache_size=0.05, keep_records=False)
    tokenizer: Any = Faulty(Tokenizer(bundle.tokenizer_path))
    overlaps = kind != "openvino"  # heads do not draft ahead
    with outrider.Engine(bundle, config.replace(overlap=overlaps, num_threads=1), tokenizer=tokenizer) as engine:
        yield Drill(engine, eight)


@pytest.fixture(scope="module", params=["onnx", *SLOW])
def drill(request: pytest.FixtureRequest, folders: Callable[[str], Path]) -> Iterator[Drill]:
    beside = EIGHT if request.param == "onnx" else FEW  # what differs by kind is in OF
    with drilling(request.param, folders(request.param), beside | OF[request.param]) as made:
        yield made


def test_every_member_of_the_interfaces_has_a_rule() -> None:
    """What is added to an interface is checked where it enters, and part of the drill."""
    assert own.RULES.keys() == DRAFTER.keys()
    assert {name for name, rule in own.RULES.items() if rule.of_call} == {name for name in DRAFTER if DRAFTER[name]}
    assert own_tokenizer.RULES.keys() == members_of(ChatTokenizer).keys()


@pytest.mark.filterwarnings("ignore:A drafter failed to release")
def test_a_drafter_s_faults_end_its_request_alone(drill: Drill) -> None:
    """Each member raises something, gives something wrong, or is no method."""
    used: set[str] = set()
    for base in SOUND:
        used |= drill.used(base).keys()
        for fault in faults_of(drill.used(base), (None,), (SystemExit,)):
            drill.drafted(fault, base)
            assert fault.count or fault.member in TIMED, f"{base}, {fault}"
    drill.end()
    assert DRAFTER.keys() - used <= {"name", *TIMED}  # an app's drafter has the name of `add_drafter`


def test_a_tokenizer_s_faults_end_their_request_alone(drill: Drill) -> None:
    """Text is encoded in the app's thread, and decoded in the engine's."""
    tokenizer: Any = drill.engine.tokenizer
    reached = set()
    for fault in faults_of(members_of(ChatTokenizer), VALUES[:2]):
        found = drill.ninth(before=partial(setattr, tokenizer, "fault", fault))
        tokenizer.fault = None
        if fault.member != "encode_prompt" or fault.error:  # else it may be another prompt
            drill.check(fault, found)
        reached |= {fault.member} if fault.count else set()
    drill.end()
    assert {"encode_prompt", "decode"} <= reached  # the others are for chats, other vocabularies and references


def test_faults_of_cancel_and_of_sinks_end_their_request_alone(drill: Drill) -> None:
    for fault in faults_of({"is_set": True}):
        found = drill.ninth(cancel=Faulty(threading.Event(), fault))
        if not isinstance(found, outrider.Result) or found.finish_reason != "cancelled":
            drill.check(fault, found)
    for fault in faults_of({"sink": True}, values=()):
        if fault.is_method:
            drill.go_on()
            drill.engine.submit(PROMPT, sink=fault.bring, drafter=None, **NINTH)
            assert drill.ninth(drafter=None)
            assert fault.count == 1  # it is told no more
    drill.end()


def test_a_grammar_s_faults_end_their_request_alone(drill: Drill) -> None:
    """Every method fails, and the library's matcher after it. A panic in llguidance is no Exception."""
    options: dict[str, Any] = {"regex": "[a-z]{6}", "ignore_eos": False, "drafter": "suffix"}
    right = drill.alone(PROMPT, **NINTH | options | {"drafter": None})
    names = [name for name, member in vars(GrammarState).items() if callable(member) and name[0] != "_"]
    for fault in [Fault(name, error) for name in ("matcher", *names) for error in (ValueError, Unspeakable)]:

        def change(request: Any, fault: Fault = fault) -> None:
            setattr(request.grammar, fault.member, fault.bring)

        found = drill.ninth(change, **options)
        if isinstance(found, outrider.Result):  # what is computed ahead is computed again where it is needed
            assert found.token_ids == right, f"{fault}"
        else:
            assert isinstance(found, Exception), f"{fault}: {found!r}"
    drill.end()


@pytest.mark.parametrize("failing", ["fill_masks", "draft_ahead"])
def test_a_call_is_awaited_whatever_fails_beside_it(
    openvino_engine: outrider.Engine, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    """Else the next round writes the tensors that it reads."""
    engine = openvino_engine
    options: dict[str, Any] = {"max_new_tokens": 5, "ignore_eos": True}
    plain = engine.generate("hello", **options).token_ids
    begun: list[Any] = []
    submit = engine.main.submit

    class Awaited:
        done = True

        def __init__(self, chunks: Any) -> None:
            assert not begun, "a call is under way"
            self.pending = submit(chunks)
            begun.append(self)

        def wait(self) -> Any:
            begun.remove(self)
            return self.pending.wait()

    def fail(*_: Any) -> None:
        raise RuntimeError("of ours")

    monkeypatch.setattr(engine.main, "submit", Awaited)
    with monkeypatch.context() as patched:
        patched.setattr(f"outrider.decoding.loop.{failing}", fail)
        with pytest.raises(RuntimeError, match="of ours"):
            engine.generate("hello", **options)
    assert not begun
    assert engine.generate("hello", **options).token_ids == plain
