"""Options are checked when they are set. Errors name the wrong ones."""

import inspect
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import pytest

from outrider.config import Config, GenerationConfig
from outrider.config.files import find_presets, load_config, user_path
from outrider.config.generation_options import GenerationOptions
from outrider.config.option import options_of
from outrider.engine.chat import Chat
from outrider.engine.engine import Engine
from outrider.errors import OptionError


def test_the_presets_are_those_of_the_repository_and_all_load() -> None:
    presets = find_presets()
    assert set(presets) == {"cpu", "gpu", "gpu-main-npu-draft", "ngram", "npu", "npu-emulated"}
    for name in presets:
        assert load_config(name) != Config() or name == "cpu"


def test_the_cpu_preset_writes_the_defaults_out() -> None:
    assert load_config("cpu") == Config().replace(draft_device="CPU")


def test_keywords_win_over_the_file(tmp_path: Path) -> None:
    path = tmp_path / "my.toml"
    path.write_text('[generation]\ntemperature = 0.5\ndrafter = "none"\nstop = ["x"]\n[device]\nproperties = {A = 1}\n')
    config = load_config(path).replace(temperature=0.9)
    assert (config.generation.temperature, config.generation.drafter) == (0.9, None)
    assert config.generation.stop == ("x",)
    assert config.device.properties == {"A": 1}


@pytest.mark.parametrize(("text", "message"), [
    ("[generation]\ntemprature = 1\n", r"unknown key 'generation.temprature'. Did you mean 'temperature'\?"),
    ("[device]\ntemperature = 1\n", r"unknown key 'device.temperature'. It belongs to section \[generation\]"),
    ("[devices]\n", r"no section 'devices'. Did you mean 'device'\?"),
    ("temperature = 1\n", "no section 'temperature'"),
    ("[generation]\ntemperature = 'hot'\n", r"temperature='hot' is not 0 \(greedy\)"),
    ("[scheduler]\ncache_size = 0\n", "cache_size=0 is not a number of GB above 0"),
    ("[generation]\nlogit_bias = {x = 1}\n", "logit_bias={'x': 1} is not a table of token ids"),
    ("[generation\n", "cannot be read"),
    ("\ufeff\x00", "cannot be read"),
])  # fmt: skip
def test_bad_files_name_file_and_key(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "my.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(OptionError, match=message) as error:
        load_config(path)
    assert "my.toml" in str(error.value)


def test_a_preset_that_does_not_exist_names_the_nearest() -> None:
    with pytest.raises(OptionError, match="no config 'npgram', preset or file. Did you mean 'ngram'"):
        load_config("npgram")


def test_a_home_that_does_not_exist_is_said() -> None:
    with pytest.raises(OptionError, match="~nouser/x.toml is no path here"):
        load_config("~nouser/x.toml")


def test_an_unknown_option_names_the_nearest() -> None:
    with pytest.raises(OptionError, match="no option 'cash_size'. Did you mean 'cache_size'"):
        Config().replace(cash_size=1)
    with pytest.raises(OptionError, match="no generation option 'xyz'. Known: acceptance_threshold"):
        GenerationConfig().replace(xyz=1)


def test_token_ids_of_a_file_may_be_its_keys(tmp_path: Path) -> None:
    path = tmp_path / "my.toml"
    path.write_text("[generation]\nlogit_bias = {7 = -100, 9 = 1.5}\nbanned_token_ids = [3]\nmin_new_tokens = 4\n")
    config = load_config(path).generation
    assert config.logit_bias == {7: -100, 9: 1.5}
    assert (config.banned_token_ids, config.min_new_tokens) == ((3,), 4)


def test_a_table_is_copied() -> None:
    given: dict[Any, float] = {"7": 1.0}
    config = GenerationConfig(logit_bias=given)
    given["8"] = 1.0
    assert config.logit_bias == {7: 1.0}


@pytest.mark.parametrize(("options", "message"), [
    ({"references": ["a", ""]}, r"references=\('a', ''\) is not a text or a list of texts, none of them empty"),
    ({"typical_p": 0}, "typical_p=0 is not a number above 0"),
    ({"no_repeat_ngram_size": -1}, "no_repeat_ngram_size=-1 is not an integer of at least 0"),
    ({"min_new_tokens": 1.0}, "min_new_tokens=1.0 is not an integer"),
    ({"min_new_tokens": 5, "max_new_tokens": 4}, "min_new_tokens=5 is more than max_new_tokens=4. Lower"),
    ({"banned_token_ids": [-1]}, r"banned_token_ids=\(-1,\) is not a list of token ids"),
    ({"logit_bias": {"9" * 5000: 1}}, r"logit_bias=\{'9+… is not a table of token ids"),
    ({"logit_bias": {1: 101}}, "logit_bias={1: 101} is not .* from -100 to 100"),
    ({"logit_bias": {1: float("nan")}}, "logit_bias={1: nan} is not"),
    ({"logit_bias": {1: 1, "1": 2}}, "is not a table of token ids, each once"),
    ({"logprobs": 21}, "logprobs=21 is not an integer from 0 to 20"),
    ({"logprobs": 1, "logprobs_of": "raw"}, "logprobs_of='raw' is not one of unprocessed, processed"),
    ({"logprobs_of": "processed"}, "logprobs_of='processed' needs logprobs: set it to 0 or more"),
    ({"max_new_tokens": np.int8(-1)}, "max_new_tokens=-1 is not an integer of at least 1"),
    ({"max_new_tokens": np.array([5])}, r"max_new_tokens=\[5\] is not"),
    ({"top_p": Fraction(10**400)}, "top_p=Fraction.*… is not a number above 0"),
    ({"temperature": 10**5000}, "temperature=<int> is not 0"),
    ({"stop_token_ids": np.array([1.5])}, r"stop_token_ids=\(1.5,\) is not a list of token ids"),
    ({"logit_bias": {3: np.float32("nan")}}, "logit_bias={3: nan} is not"),
    ({"stop": ["x" * 10**6, ""]}, "^stop=.{200}… is not a text"),
])  # fmt: skip
def test_bad_values_are_named_with_their_rule(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        GenerationConfig(**options)


@pytest.mark.parametrize(("options", "plain"), [
    ({"max_new_tokens": np.int8(100), "top_k": np.uint64(3)}, {"max_new_tokens": 100, "top_k": 3}),
    ({"seed": np.uint64(2**64 - 1), "logprobs": np.array(2)}, {"seed": 2**64 - 1, "logprobs": 2}),
    ({"temperature": np.float32(0.5), "top_p": Fraction(1, 2)}, {"temperature": 0.5, "top_p": 0.5}),
    ({"stop_token_ids": np.array([3, 4], dtype=np.uint8)}, {"stop_token_ids": (3, 4)}),
    ({"logit_bias": {np.int8(3): np.float16(0.5), 4: Fraction(-1, 4)}}, {"logit_bias": {3: 0.5, 4: -0.25}}),
    ({"stop": np.array(["a", "b"]), "drafter": np.str_("ngram")}, {"stop": ("a", "b"), "drafter": "ngram"}),
    ({"cache_size": np.float64(0.5), "num_threads": np.int64(2)}, {"cache_size": 0.5, "num_threads": 2}),
])  # fmt: skip
def test_numbers_of_numpys_become_pythons(options: dict[str, Any], plain: dict[str, Any]) -> None:
    config = Config().replace(**options)
    sections = (config.generation, config.scheduler, config.device)
    found = {name: getattr(section, name) for section in sections for name in plain if hasattr(section, name)}
    assert repr(found) == repr(plain)  # the types as well


@pytest.mark.parametrize("path", [None, 5, b"x", "a\0b"])
def test_what_is_no_path_is_refused(path: Any) -> None:
    with pytest.raises(OptionError, match="is no path: .*[.] (Give a name, as text|Take it out)[.]"):
        user_path(path)


def test_type_checkers_know_the_options_of_a_request() -> None:
    wider = {
        tuple[str, ...]: str | Sequence[str],
        tuple[int, ...]: Sequence[int],
        tuple[Mapping[str, Any], ...]: Sequence[Mapping[str, Any]],
    }
    known = get_type_hints(GenerationConfig)
    described = {name: wider.get(known[name], known[name]) for name in options_of(GenerationConfig)}
    assert get_type_hints(GenerationOptions) == described
    for method in (Engine.generate, Engine.stream, Engine.submit, Engine.agenerate, Engine.astream, Chat.send):
        assert inspect.signature(method).parameters["options"].annotation == "Unpack[GenerationOptions]"
