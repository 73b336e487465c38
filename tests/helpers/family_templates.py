"""Chat templates of 30 families of models, by name: see family_templates.toml."""

import tomllib
from pathlib import Path

FAMILIES: dict[str, str] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
