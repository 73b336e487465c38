"""What determines the training data, and what of it is stored beside them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from outrider.bundle import Bundle
from outrider.errors import ExportError
from outrider.system.files import reading, write_whole
from outrider_distill.data import find_shards
from outrider_distill.prompts import DistillPrompt

LEAST_ANSWER = 4  # tokens
USUAL_PROMPT, USUAL_ANSWER = 128, 200
_USER_SHARE = 0.5  # of the prompts
_SHARDS, _LEAST_SIZE, _MOST_SIZE = 8, 64, 512  # conversations of a shard
_FILE = "recipe.json"


@dataclass(frozen=True)
class Recipe:
    """What determines the data, besides the prompts and the main model.

    num_tokens: of answers, at least; the last shard is written whole. needs: see `needs_of`. user_share: of the
    prompts, as long as there are some of the user's.
    """

    num_tokens: int
    needs: frozenset[str] = frozenset()
    seed: int = 0
    max_new_tokens: int = 256
    user_share: float = _USER_SHARE

    def __post_init__(self) -> None:
        if self.num_tokens < 1 or self.max_new_tokens < LEAST_ANSWER or not 0 <= self.user_share <= 1:
            raise ExportError(
                f"The recipe asks for {self.num_tokens:,} tokens in answers of up to {self.max_new_tokens:,} and "
                f"{self.user_share:g} of the prompts from the user; it needs at least 1 and {LEAST_ANSWER}, and a "
                "share from 0 to 1."
            )

    @property
    def shard_size(self) -> int:
        """Conversations of a shard: small amounts are divided, too."""
        return min(_MOST_SIZE, max(_LEAST_SIZE, self.num_tokens // (_SHARDS * USUAL_ANSWER)))


@dataclass(frozen=True)
class DataRecipe:
    """What must not change while a folder's data is written."""

    seed: int
    max_new_tokens: int
    user_share: float
    needs: frozenset[str]
    prompts: str  # hashes
    excluded: str
    main_model: str
    shard_size: int
    batch_size: int = 0

    @classmethod
    def of(
        cls, bundle: Bundle, recipe: Recipe, prompts: Sequence[DistillPrompt], excluded: Sequence[DistillPrompt]
    ) -> DataRecipe:
        """Of what is asked now."""
        entry = bundle.manifest.main
        files = {each.path: each.sha256 for each in bundle.files_of(entry.folder)}
        return cls(
            seed=recipe.seed,
            max_new_tokens=recipe.max_new_tokens,
            user_share=recipe.user_share,
            needs=recipe.needs,
            prompts=_hash([each.content for each in prompts]),
            excluded=_hash([each.content for each in excluded]),
            main_model=_hash(files),
            shard_size=recipe.shard_size,
        )

    def continued(self, now: DataRecipe, folder: Path) -> DataRecipe:
        """This, to go on with. Raises if something else is asked now."""
        for name in ("seed", "max_new_tokens", "user_share", "prompts", "excluded", "main_model"):
            before, asked = getattr(self, name), getattr(now, name)
            if before != asked:
                raise ExportError(
                    f"{folder} has data with another {name} ({before}, now {asked}). Go on with the same, or name "
                    "another folder."
                )
        if not now.needs <= self.needs:
            missing = ", ".join(sorted(now.needs - self.needs))
            raise ExportError(f"{folder} has data without {missing}, which are needed now. Name another folder.")
        return self


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def read_stored(folder: Path) -> DataRecipe | None:
    """What a folder's data is made by; None for a new folder.

    Raises:
        ExportError: when it cannot be read, or there are shards without it.
    """
    path = folder / _FILE
    if not path.exists():
        if find_shards(folder):
            raise ExportError(f"{folder} has shards and no {_FILE}, which says what they are. Name another folder.")
        return None
    with reading(str(path), "Name another folder.", ExportError):
        return msgspec.json.decode(path.read_bytes(), type=DataRecipe)


def write_stored(folder: Path, stored: DataRecipe) -> None:
    """Store it in the folder, which is made if it is not there.

    Raises:
        ExportError: when it cannot be written.
    """
    with reading(str(folder), "Name another folder.", ExportError):
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / _FILE, msgspec.json.encode(stored, order="deterministic"))
