"""Child process: a checkpoint that reads images to two models in OpenVINO's format, its decoder and its vision encoder.

Job: as `outrider_export.with_torch.convert`, for a checkpoint folder, `vision`, the folder for the encoder, and
`layout`, of images.

The decoder is exported as a model of text, as optimum-intel does it: it reads token ids, and the runtime adds the input
for embeddings (`outrider.models.backends.embeds`). optimum-intel 2.2 exports the encoder with transformers before 4.58
only, so it is traced here: whole square tiles, without the mask for padding that it would have, too.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import openvino

from outrider.bundle.vision import ImageLayout
from outrider_export.progress import Progress
from outrider_export.with_torch.convert import convert_loaded, load


def convert(job: dict[str, Any], progress: Progress) -> dict[str, Any]:
    """Convert the model that `job` describes. All files are written when this returns."""
    progress.phase("read")
    Path(job["scratch"]).mkdir(parents=True, exist_ok=True)
    whole = load_whole(Path(job["model"]), job["weights"])
    make, text_model = _LAYOUTS[job["layout"]]
    write_encoder(whole, Path(job["vision"]), job["weights"], make)
    return convert_loaded(decoder_of(whole, text_model), job, progress)


def load_whole(folder: Path, weights: str) -> Any:
    """The torch model with its vision encoder, in the precision in which it is converted."""
    import torch
    from transformers import AutoModelForImageTextToText

    dtype: Any = {"fp32": torch.float32, "fp16": torch.float16}.get(weights, "auto")
    return load(AutoModelForImageTextToText, folder, dtype=dtype)


def decoder_of(whole: Any, text_model: str) -> Any:
    """The language model, with the weights of the whole. text_model: its name there."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):  # no memory for weights that are replaced
        made = AutoModelForCausalLM.from_config(whole.config.text_config, dtype=whole.dtype)
    made.model, made.lm_head = getattr(whole.model, text_model), whole.lm_head
    if whole.generation_config is not None:
        made.generation_config = whole.generation_config
    return made.eval()


def write_encoder(whole: Any, folder: Path, weights: str, make: Callable[[Any, Any], Any]) -> None:
    """Write the vision encoder: pixel_values float32 [tiles, 3, size, size] → image_embeds [tiles, tokens, hidden].

    make: the encoder's module, of the whole model and a tile.
    """
    import nncf
    import torch

    config = whole.config.vision_config
    size = config.image_size if isinstance(config.image_size, int) else config.image_size[0]
    tile = torch.zeros(1, config.num_channels, size, size)
    encoder = make(whole, tile).eval()
    with torch.no_grad():
        model = openvino.convert_model(encoder, example_input=tile, input=[-1, *tile.shape[1:]])
    model.inputs[0].set_names({"pixel_values"})
    model.outputs[0].set_names({"image_embeds"})
    if weights in ("int8", "int4"):
        model = nncf.compress_weights(model, mode=nncf.CompressWeightsMode.INT8_ASYM)
    folder.mkdir(parents=True)
    openvino.save_model(model, folder / "openvino_model.xml", compress_to_fp16=weights == "fp16")


def _of_idefics3(whole: Any, tile: Any) -> Any:
    """A module of the vision model and the connector, in single precision.

    The positions of a whole tile's patches are those that the checkpoint's own code finds: they are rounded, and not in
    every version of transformers alike.
    """
    import torch

    vision, connector = whole.model.vision_model.float(), whole.model.connector.float()
    seen: list[Any] = []
    hook = vision.embeddings.position_embedding.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    side = tile.shape[-1] // vision.patch_size
    vision.embeddings(pixel_values=tile, patch_attention_mask=torch.ones(1, side, side, dtype=torch.bool))
    hook.remove()

    def forward(pixel_values: Any) -> Any:
        patches = vision.embeddings.patch_embedding(pixel_values).flatten(2).transpose(1, 2)
        states = patches + vision.embeddings.position_embedding(encoder.positions)
        states = vision.encoder(inputs_embeds=states, attention_mask=None).last_hidden_state
        return connector(vision.post_layernorm(states))

    encoder: Any = torch.nn.Module()
    encoder.vision, encoder.connector, encoder.forward = vision, connector, forward
    encoder.register_buffer("positions", seen[0])
    return encoder


def _of_internvl(whole: Any, tile: Any) -> Any:
    """A module of the vision model, the pixel shuffle and the projector, in single precision."""
    import torch

    vision, projector = whole.model.vision_tower.float(), whole.model.multi_modal_projector.float()
    ratio, shuffle, width = whole.config.downsample_ratio, whole.model.pixel_shuffle, vision.config.hidden_size
    side = tile.shape[-1] // vision.config.patch_size[0]
    embeddings = vision.embeddings
    # Tiles have the size of the learned positions, which are resampled in a trace otherwise.
    embeddings.interpolate_pos_encoding = lambda *_: embeddings.position_embeddings

    def forward(pixel_values: Any) -> Any:
        states = vision(pixel_values=pixel_values).last_hidden_state[:, 1:]  # without the class token
        shuffled = shuffle(states.reshape(-1, side, side, width), scale_factor=ratio)
        return projector(shuffled.flatten(1, 2))

    encoder: Any = torch.nn.Module()
    encoder.vision, encoder.projector, encoder.forward = vision, projector, forward
    return encoder


# By layout: what makes the encoder's module, and the name of the language model in the whole.
_LAYOUTS: dict[ImageLayout, tuple[Callable[[Any, Any], Any], str]] = {
    "idefics3": (_of_idefics3, "text_model"),
    "internvl": (_of_internvl, "language_model"),
}
