"""Checks that the parts of a manifest fit together."""

from collections.abc import Iterable

from outrider.bundle.kinds import RESERVED_NAMES
from outrider.bundle.manifest import (
    ADAPTER_NAMES,
    BYTES_NAME,
    CROSS_NAME,
    MANIFEST_NAME,
    MAP_NAME,
    MODEL_NAMES,
    PROPOSED_NAME,
    DrafterEntry,
    Manifest,
    ModelEntry,
)
from outrider.errors import BundleError

_AGAIN, _PAIR_AGAIN = "Export the bundle again.", "Export the pair again."


def check_fit(manifest: Manifest) -> None:
    """Raise BundleError unless the manifest's parts fit together and name listed files."""
    listed = {entry.path for entry in manifest.files}
    names = [drafter.name for drafter in manifest.drafters]
    if len({*names, *RESERVED_NAMES}) != len(names) + len(RESERVED_NAMES):
        raise BundleError(
            f"{MANIFEST_NAME} names its drafters {', '.join(names)}: names must differ from one another and from "
            f"{', '.join(RESERVED_NAMES)}."
        )
    cut = {drafter.name for drafter in manifest.drafters if drafter.num_proposed_tokens}
    for role, model in [("main", manifest.main), *((d.name, d.model) for d in manifest.drafters)]:
        paths = [f"{model.folder}/{name}" for name in MODEL_NAMES[model.format]]
        _check_listed(listed, paths, f"which the {role} model needs")
        _check_encoder(manifest, role, model, listed)
        if not model.geometry.num_layers:
            raise BundleError(f"{MANIFEST_NAME} gives the {role} model num_layers=0. Export the bundle again.")
        num_kinds = len(model.geometry.layer_states)
        if num_kinds not in (0, model.geometry.num_layers):
            raise BundleError(
                f"{MANIFEST_NAME} gives the {role} model {model.geometry.num_layers} layers, and layer_states of "
                f"{num_kinds}. Export the bundle again."
            )
        if model.vocab_size > model.geometry.logits_width and role not in cut:
            raise BundleError(
                f"The {role} model gives {model.geometry.logits_width:,} logits for {model.vocab_size:,} tokens; "
                f"{MANIFEST_NAME} is damaged. Export the bundle again."
            )
    vision = manifest.main.vision
    if vision is not None:
        _check_listed(listed, [f"{vision.folder}/{MODEL_NAMES['openvino'][0]}"], "which encodes images")
        if manifest.main.format != "openvino" or vision.image_token_id >= manifest.main.vocab_size:
            raise BundleError(
                f"{MANIFEST_NAME} is damaged: a main model that reads images is in OpenVINO's format, and its image "
                f"token {vision.image_token_id} is one of {manifest.main.vocab_size:,}. Export the bundle again."
            )
    for drafter in manifest.drafters:
        _check_vocabulary(manifest, drafter, listed)
        _check_proposed(drafter, listed)
        _check_kind(drafter)
        _check_layers(manifest, drafter)
    _check_adapters(manifest, listed)
    _check_text_encoder(manifest)
    for token_id in manifest.tokenizer.eos_token_ids:
        if token_id >= manifest.main.vocab_size:
            raise BundleError(f"eos_token_id {token_id} is outside the vocabulary of {manifest.main.vocab_size:,}.")


def check_writes(manifest: Manifest, folder: object) -> None:
    """Raise BundleError for a bundle whose model writes no text, where one has to."""
    encoder = manifest.main.text_encoder
    if encoder is not None:
        what, name = ("an embedding model", "Embedder") if encoder.kind == "embedding" else ("a reranker", "Reranker")
        raise BundleError(
            f"{folder} has {what}, which writes no text. Use outrider.{name}, or 'outrider serve' beside a model that "
            "writes."
        )


def _check_listed(listed: set[str], paths: Iterable[str], use: str, remedy: str = _AGAIN) -> None:
    """Check that the manifest lists these files. use: what one is for."""
    if missing := [path for path in paths if path not in listed]:
        raise BundleError(f"{MANIFEST_NAME} lists no {missing[0]}, {use}. {remedy}")


def _check_adapters(manifest: Manifest, listed: set[str]) -> None:
    """Check that adapters have names of their own, and that their files are listed."""
    names = [adapter.name for adapter in manifest.adapters]
    if len({*names}) != len(names):
        raise BundleError(
            f"{MANIFEST_NAME} names its adapters {', '.join(names)}: names must differ. Export the bundle again."
        )
    for adapter in manifest.adapters:
        paths = [f"{adapter.folder}/{name}" for name in ADAPTER_NAMES]
        _check_listed(listed, paths, f"which the adapter '{adapter.name}' needs", "Add it again.")


def _check_encoder(manifest: Manifest, role: str, model: ModelEntry, listed: set[str]) -> None:
    """Check that an encoder-decoder model has its files, and that a drafter is one where the main model is."""
    encoder, main = model.encoder, manifest.main.encoder
    if (encoder is None) != (main is None) or (encoder and main and encoder.kind != main.kind):
        raise BundleError(
            f"The {role} model and the main model must be of the same kind: both decoders, or both encoder-decoder "
            f"models for {main.kind if main else 'text'}. Export the pair again."
        )
    if encoder is None:
        return
    paths = f"{model.folder}/{CROSS_NAME}", *(f"{encoder.folder}/{name}" for name in MODEL_NAMES[model.format])
    _check_listed(listed, paths, f"which the {role} model needs")
    ids = (*encoder.begin_token_ids, *encoder.suppress_token_ids, *encoder.begin_suppress_token_ids)
    if (encoder.kind == "audio") != (encoder.audio is not None) or max(ids) >= model.vocab_size:
        raise BundleError(f"{MANIFEST_NAME} is damaged: the encoder of the {role} model. Export the bundle again.")


def _check_text_encoder(manifest: Manifest) -> None:
    """Check that a model that writes nothing stands alone, and has a way to pool exactly if it makes embeddings."""
    main = manifest.main
    if main.text_encoder is None:
        return
    pools = (main.text_encoder.kind == "embedding") == (main.text_encoder.pooling is not None)
    alone = not (manifest.drafters or manifest.adapters or main.encoder or main.vision) and main.format == "openvino"
    if not (pools and alone and manifest.tokenizer.folder == main.folder):
        raise BundleError(f"{MANIFEST_NAME} is damaged: the main model's text_encoder. {_AGAIN}")


def _check_kind(drafter: DrafterEntry) -> None:
    """Check that a drafter that reads hidden states says which, and how many tokens it drafts in a call."""
    traits = drafter.traits
    # A draft model may draft in one call, if it says both.
    says_both = traits.design == "model" and None not in (drafter.num_places, drafter.mask_token_id)
    in_one_call = traits.design == "block" or says_both
    for name, value, needed in (
        ("features", drafter.features, traits.reads_states),
        ("num_places", drafter.num_places, in_one_call),
        ("mask_token_id", drafter.mask_token_id is not None, in_one_call),
        ("layers", drafter.layers, traits.design == "layers"),
    ):
        if bool(value) != needed:
            raise BundleError(
                f"{MANIFEST_NAME} is damaged: drafter '{drafter.name}' of kind {drafter.kind} has "
                f"{'no' if needed else 'a value for'} {name}. Export the bundle again."
            )


def _check_layers(manifest: Manifest, drafter: DrafterEntry) -> None:
    """Check that a drafter that uses the main model's cache can, and that one of its layers names such layers."""
    layers, main = drafter.layers, manifest.main
    if drafter.traits.design == "reader" and main.format != "openvino":
        raise BundleError(
            f"{MANIFEST_NAME} is damaged: drafter '{drafter.name}' of kind {drafter.kind} reads the cache of a main "
            f"model in OpenVINO's format, and this one is in {main.format}. {_AGAIN}"
        )
    if drafter.traits.design != "layers":
        return
    known = [*sorted({*layers})] == [*layers] and max(layers) < main.geometry.num_layers
    if not known or len(layers) == main.geometry.num_layers or drafter.model != main or main.format != "openvino":
        raise BundleError(
            f"{MANIFEST_NAME} is damaged: drafter '{drafter.name}' has to be some of the {main.geometry.num_layers} "
            "layers of a main model in OpenVINO's format, ascending. Find them again with 'outrider tune-layers'."
        )


def _check_vocabulary(manifest: Manifest, drafter: DrafterEntry, listed: set[str]) -> None:
    """Check that the files for the drafter's vocabulary are listed."""
    main, model, tokenizer = manifest.main, drafter.model, drafter.tokenizer
    if drafter.vocabulary == "same":
        if model.vocab_sha256 != main.vocab_sha256 or model.vocab_size != main.vocab_size:
            raise BundleError(
                f"The vocabulary of drafter '{drafter.name}' is not the main model's, so it cannot draft for it. "
                "Export the pair again."
            )
        return
    if tokenizer is None:
        raise BundleError(
            f"{MANIFEST_NAME} has no tokenizer for drafter '{drafter.name}', whose vocabulary is not the main model's. "
            "Export the pair again."
        )
    own = f"{model.folder}/{MAP_NAME}" if drafter.vocabulary == "intersection" else f"{tokenizer.folder}/{BYTES_NAME}"
    paths = sorted({own, f"{manifest.tokenizer.folder}/{BYTES_NAME}"})
    _check_listed(listed, paths, f"which drafter '{drafter.name}' needs", _PAIR_AGAIN)


def _check_proposed(drafter: DrafterEntry, listed: set[str]) -> None:
    """Check that a drafter with a cut output matrix lists the file of its tokens."""
    model, count = drafter.model, drafter.num_proposed_tokens
    if count is None:
        return
    if count != model.geometry.logits_width:
        raise BundleError(
            f"Drafter '{drafter.name}' proposes {count:,} tokens and gives {model.geometry.logits_width:,} logits; "
            f"{MANIFEST_NAME} is damaged. Export the pair again."
        )
    _check_listed(listed, [f"{model.folder}/{PROPOSED_NAME}"], f"which drafter '{drafter.name}' needs", _PAIR_AGAIN)
