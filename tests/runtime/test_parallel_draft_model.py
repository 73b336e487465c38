"""A draft model with a mask token drafts all of its tokens in one call (An et al. 2025, "PARD")."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from in_the_loop import new_request, run
from outrider.bundle import Bundle, read_bundle
from outrider.bundle.manifest import write_manifest
from outrider.decoding.answer import Answer
from outrider.drafters import DraftModel
from outrider.testing import FakeBackend
from outrider.tokens.sampling import DraftRows
from outrider.tokens.verifiers import Coupled, Greedy
from outrider.types import Draft, DraftRequest, LogitsRow, Noise, Verifier
from toys import load_toy

pytestmark = pytest.mark.any_format

VOCAB_SIZE, MASK, NUM_PLACES = 3, 2, 4


def expected(rows: Sequence[Any], request: DraftRequest) -> list[int]:
    """What is drawn at the rows of one call, float32 [vocab_size] each: none depends on another token of the draft."""
    drafted: list[int] = []
    for i in range(len(rows)):
        found = DraftRows(lambda i: LogitsRow.of(rows[i]), request.sampler, Draft(drafted))
        drafted.append(request.verifier.draw(found, i, request.noise, len(request.sequence))[0])
    return drafted


class Checked(DraftModel):
    """Compares each draft with one made from scratch: rows after the text, and after the masks that follow it."""

    lengths: Sequence[int] = ()

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        drafts = super().propose(requests)
        backend: Any = self.backend
        for request, draft in zip(requests, drafts, strict=True):
            count, text = min(request.limit, NUM_PLACES), request.sequence.token_ids
            rows = [backend.logits_after([*text, *[MASK] * i]) for i in range(count)]
            assert draft.token_ids == expected(rows, request)
            self.lengths = [*self.lengths, len(draft)]
        return drafts


def answer(main: FakeBackend, drafter: Any, verifier: Verifier, most: int, num: int = 40) -> Answer:
    sampling = {"temperature": float(type(verifier) is not Greedy)}
    fields: dict[str, Any] = {"verifier": verifier, "noise": Noise(3), "max_new_tokens": num}
    request = new_request([0, 1, 2, 1], drafter, sampling, num_assistant_tokens=most, **fields)
    run(main, request)
    return request


@pytest.mark.parametrize("verifier", [Greedy(), Coupled()], ids=str)
@pytest.mark.parametrize("most", [1, 3, 9])
def test_a_block_is_drafted_in_one_call(verifier: Any, most: int) -> None:
    main, draft = FakeBackend(VOCAB_SIZE), FakeBackend(VOCAB_SIZE, noise=0.2)
    drafter = Checked(draft, context_length=200, mask_token_ids=[MASK] * (NUM_PLACES - 1))
    plain, drafted = (answer(main, each, verifier, most) for each in (None, drafter))
    assert drafted.sequence.token_ids == plain.sequence.token_ids
    stats = drafted.stats
    assert len(draft.calls) == stats.num_drafts
    assert {*drafter.lengths[:-NUM_PLACES]} == {min(most, NUM_PLACES)}
    # Each call reads what was committed, and masks: nothing of an earlier draft is left in its cache.
    committed = [1 + accepted for accepted in stats.num_accepted_tokens_per_round]
    masks = [length - 1 for length in drafter.lengths]
    read = [count for (count,) in draft.calls]
    assert read[1:] == [k + m for k, m in zip(committed, masks[1:], strict=False)]
    assert stats.num_accepted_tokens_per_position[0] > 5


def test_a_bundle_says_which_token_is_the_mask(toy_bundle: Bundle, tmp_path: Path) -> None:
    folder = shutil.copytree(toy_bundle.folder, tmp_path / "toy")
    entry = msgspec.structs.replace(toy_bundle.manifest.drafters[0], mask_token_id=7, num_places=NUM_PLACES)
    write_manifest(folder, msgspec.structs.replace(toy_bundle.manifest, drafters=(entry,)))
    engine = load_toy(read_bundle(folder), cache_size=0.01)
    model = engine.draft_models["draft"]
    assert (model.at_once, model.most_tokens) == (True, NUM_PLACES)
    for options in ({}, {"temperature": 1.0, "seed": 4}):
        asked: dict[str, Any] = {"max_new_tokens": 40, "ignore_eos": True, **options}
        plain = engine.generate("hello there", drafter=None, **asked)
        for most in (2, 6):
            drafted = engine.generate("hello there", drafter="draft", num_assistant_tokens=most, **asked)
            assert drafted.token_ids == plain.token_ids
            assert max(drafted.stats.num_draft_tokens_per_round) == min(most, NUM_PLACES)
