"""Options from presets and TOML files, and the paths that users give."""

from __future__ import annotations

import importlib.resources
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from outrider.config import SECTION_OF, SECTIONS, Config, without_word
from outrider.config.checks import shown_value
from outrider.errors import OptionError, nearest, one_line
from outrider.system.files import reading

MACHINES = "machines.toml"  # no preset: see `outrider.models.tuning.machines`


def load_config(source: str | Path | Config | None) -> Config:
    """Options from a preset's name, a TOML file or a `Config`; None is the defaults.

    Raises:
        OptionError: when there is no such preset or file, it is not TOML, or it holds an unknown key or a bad value.
    """
    if source is None:
        return Config()
    if isinstance(source, Config):
        return source
    if not isinstance(source, str | Path):
        raise OptionError(f"config={source!r} is neither a preset's name, nor a file, nor a Config.")
    presets = find_presets()
    path = presets.get(str(source)) or user_path(source)
    with reading(f"Config {path}"):
        try:
            text = path.read_text(encoding="utf-8-sig")
        except FileNotFoundError as error:
            known = nearest(str(source), presets)
            raise OptionError(f"There is no config '{source}', preset or file. {known}") from error
        return _parse(path, text)


def _parse(path: Path, text: str) -> Config:
    """The options of a file."""
    options = {}
    for section, table in tomllib.loads(text).items():
        if section not in SECTIONS:
            raise OptionError(f"Config {path} has no section '{section}'. {nearest(section, SECTIONS)}")
        if not isinstance(table, dict):
            raise OptionError(f"Config {path} has a value for '{section}', which is a section: write [{section}].")
        for key, value in table.items():
            if SECTION_OF.get(key) != section:
                raise OptionError(f"Config {path} has an unknown key '{section}.{key}'. {_where(key, section)}")
            if any(abs(number) >= 2**64 for number in _integers(value)):
                raise OptionError(f"Config {path} has a number in '{section}.{key}' that takes more than 64 bits.")
            options[key] = without_word(key, value)  # TOML has no null
    try:
        return Config().replace(**options)
    except OptionError as error:
        raise OptionError(f"Config {path}: {one_line(error)}.") from error


def user_path(path: str | Path) -> Path:
    """A path from a user, with "~" at its beginning replaced by the home folder.

    Raises:
        OptionError: when it is neither a text nor a path, holds a null character, or there is no such user.
    """
    try:
        found = Path(path).expanduser()
    except TypeError as error:
        raise OptionError(f"{shown_value(path)} is no path: {one_line(error)}. Give a name, as text.") from error
    except RuntimeError as error:
        raise OptionError(f"{path} is no path here: {one_line(error)}. Write the folder's full name.") from error
    if "\0" in str(found):
        raise OptionError(f"{shown_value(str(path))} is no path: no name has a null character. Take it out.")
    return found


def find_presets() -> dict[str, Path]:
    """The presets that ship with Outrider, by name."""
    return {path.stem: path for path in sorted(config_folder().glob("*.toml")) if path.name != MACHINES}


def config_folder() -> Path:
    """The folder of the presets and of `MACHINES`: inside the package in a wheel, at the top of a checkout."""
    package = Path(str(importlib.resources.files("outrider")))
    inside = package / "configs"
    return inside if inside.is_dir() else package.parents[1] / "configs"


def _integers(value: Any) -> Iterator[int]:
    """All integers in a value of a TOML file."""
    if isinstance(value, int):
        yield value
    elif isinstance(value, list | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _integers(item)


def _where(key: str, section: str) -> str:
    if key in SECTION_OF:
        return f"It belongs to section [{SECTION_OF[key]}]."
    return nearest(key, [name for name, its in SECTION_OF.items() if its == section])
