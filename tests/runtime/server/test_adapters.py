"""A served model's adapters: a field of requests, or a part of the model's name."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from adapters import write_adapter
from serving import MESSAGES, serving
from tiny import SHAPE


@pytest.fixture(scope="module")
def adapted(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from outrider_export import add_adapter

    root = tmp_path_factory.mktemp("served")
    shutil.copytree(tiny, root / "bundle")
    for i, name in enumerate(("pirate", "poet")):
        add_adapter(root / "bundle", write_adapter(root / name, SHAPE, seed=i))
    with serving({"tiny": root / "bundle"}) as live:
        yield live.client()


def test_requests_choose_an_adapter_by_field_or_by_name(adapted: Any) -> None:
    def say(model: str, **fields: Any) -> Any:
        return adapted.chat.completions.create(model=model, messages=MESSAGES, max_tokens=12, extra_body=fields)

    plain, pirate = say("tiny"), say("tiny", adapter="pirate")
    named = say("tiny:pirate")
    assert named.choices[0].message.content == pirate.choices[0].message.content != plain.choices[0].message.content
    assert (plain.model, named.model) == ("tiny", "tiny:pirate")
    assert say("tiny", adapter="none").choices[0].message.content == plain.choices[0].message.content
    stream = adapted.completions.create(model="tiny:poet", prompt="The fox", max_tokens=6, stream=True)
    assert {chunk.model for chunk in stream} == {"tiny:poet"}
    (served,) = adapted.models.list().data
    assert served.adapters == ["pirate", "poet"]


def test_unknown_adapters_are_refused(adapted: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="There is no adapter 'pirat' here: loaded are 'pirate', 'poet'"):
        adapted.completions.create(model="tiny", prompt="Hi", extra_body={"adapter": "pirat"})
    with pytest.raises(openai.NotFoundError, match="The model 'tiny' has no adapter 'pirat'. Did you mean 'pirate'"):
        adapted.completions.create(model="tiny:pirat", prompt="Hi")
    with pytest.raises(openai.BadRequestError, match="name says adapter 'poet', and the field says 'pirate'"):
        adapted.completions.create(model="tiny:poet", prompt="Hi", extra_body={"adapter": "pirate"})


def test_a_single_model_s_adapter_is_found_by_any_name(adapted: Any) -> None:
    texts = [adapted.completions.create(model=name, prompt="Hi", max_tokens=8).choices[0].text
             for name in ("tony:pirate", "tiny:pirate")]  # fmt: skip
    assert texts[0] == texts[1]
