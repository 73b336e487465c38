"""`python -m outrider_export.train KIND MAIN`: training data (KIND is data), or a head of that kind."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import click

from outrider.errors import ExportError, OutriderError

KINDS = ("eagle3", "eagle", "mtp", "medusa", "hydra", "blockwise", "dflash", "masks")
CONVERSATIONS_AT_ONCE = 512


@click.command()
@click.argument("kind", type=click.Choice(["data", *KINDS]))
@click.argument("main", type=click.Path(exists=True, path_type=Path))
@click.option("--data", "data_folder", type=click.Path(path_type=Path), required=True, help="Folder of training data.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Folder for the head.")
@click.option("--minutes", default=30.0, show_default=True, help="Training time.")
@click.option("--learning-rate", type=float, help="Peak learning rate, instead of the kind's own.")
@click.option("--resume", is_flag=True, help="Go on with the head that is in the output folder.")
@click.option("--mask-token-id", type=int, help="dflash: a token of the vocabulary that texts do not have.")
@click.option(
    "--bundle", type=click.Path(exists=True, path_type=Path), help="data: the bundle whose main model writes."
)
@click.option("--questions", type=click.Path(exists=True, path_type=Path), help="data: prompts to use, one a line.")
@click.option("--conversations", default=2048, show_default=True, help="data: about how many to add.")
@click.option("--seed", default=0, show_default=True)
def run(kind: str, main: Path, data_folder: Path, **options: Any) -> None:
    """Train a drafter head for the main model MAIN, a checkpoint folder or a .gguf file."""
    try:
        if kind == "data":
            make_data(main, data_folder, options)
        else:
            train(kind, main, data_folder, options)
    except OutriderError as error:
        raise click.ClickException(str(error)) from error


def make_data(main: Path, folder: Path, options: dict[str, Any]) -> None:
    """Write conversations if there is a bundle to write them, then the features that are missing."""
    from outrider_export.train.answers import Writer
    from outrider_export.train.data import add_conversations, write_features

    if options["bundle"] is not None:
        writer = Writer(options["bundle"])
        questions = options["questions"].read_text(encoding="utf-8").splitlines() if options["questions"] else []
        for start in range(0, options["conversations"], CONVERSATIONS_AT_ONCE):
            count = min(CONVERSATIONS_AT_ONCE, options["conversations"] - start)
            total = add_conversations(folder, writer, count, questions, options["seed"])
            click.echo(f"{total} conversations")
    click.echo(f"{write_features(folder, load_main(main, 'bfloat16'))} more tokens with features")


def train(kind: str, main: Path, data_folder: Path, options: dict[str, Any]) -> None:
    """Train a head of this kind and write its folder."""
    if options["output"] is None:
        raise ExportError("Give the folder for the head with -o.")
    from outrider_export.train.data import Data
    from outrider_export.train.files import save
    from outrider_export.train.fit import fit, start_head
    from outrider_export.train.layers import Teacher

    data = Data(data_folder)
    # Mask tokens need the whole main model in training, which takes half the time in half precision.
    teacher = Teacher.of(load_main(main, "bfloat16" if kind == "masks" else "float32"))
    if data.hidden_size != teacher.shape.hidden_size:
        raise ExportError(
            f"{data_folder} has features of size {data.hidden_size}, the main model {teacher.shape.hidden_size}: "
            f"make the data with {main}."
        )
    head, config, earlier = resume(options["output"], teacher) if options["resume"] else (None, {}, [])
    if head is None:
        head, config = start_head(kind, teacher, data, mask_token_id=options["mask_token_id"], seed=options["seed"])
    elif head.kind != kind:
        raise ExportError(
            f"{options['output']} has a head of kind {head.kind}, not {kind}: give another folder with -o."
        )
    report = fit(
        head,
        data,
        minutes=options["minutes"],
        seed=options["seed"],
        learning_rate=options["learning_rate"],
        tell=click.echo,
    )
    save(head, config, options["output"], report | {"earlier": earlier})


def resume(folder: Path, teacher: Any) -> tuple[Any, dict[str, Any], list[Any]]:
    """A trained head, to train it further; its config.json, and what training.json says of it."""
    from outrider_export.train.files import load

    head = load(folder, teacher.embedding, teacher.lm_head)
    if head.kind == "masks":
        head.teach(teacher)
    training = json.loads((folder / "training.json").read_text(encoding="utf-8"))
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return head, config, [*training.pop("earlier", []), training]


def load_main(path: Path, dtype: str) -> Any:
    """The frozen main model as a transformers model, from a checkpoint folder or a GGUF file."""
    import torch

    from outrider_export.convert import load_model

    with tempfile.TemporaryDirectory() as scratch:
        job = {"model": str(path), "gguf": path.suffix == ".gguf", "scratch": scratch, "weights": "fp32"}
        model = load_model(job | {"trust_remote_code": False})
    return model.to(getattr(torch, dtype)).eval().requires_grad_(requires_grad=False)


if __name__ == "__main__":
    run()
