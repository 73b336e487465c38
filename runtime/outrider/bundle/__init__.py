"""The bundle: a folder with a main model, its drafters, a tokenizer and `outrider.json`, which describes them.

::

    my-pair/
      outrider.json        the manifest, as `Manifest` below
      main/                openvino_model.xml and .bin, or model.onnx and model.onnx.data: each model has its format
      draft/               the same; further drafters have folders of their own
      tokenizer/           openvino_tokenizer and openvino_detokenizer (.xml, .bin), tokenizer.json

A model in ONNX is a decoder as onnxruntime-genai's model builder writes it, with more optional inputs, int64 [1] each:
`rows_begin` and `rows_end`, the range of rows with logits, and perhaps `extra_rows`, zeros after the tokens that only
the attention sees. For drafters that read hidden states, it has outputs float32 [1, tokens, hidden size], too:
`hidden_states.{i}`, after i layers, and `last_hidden_state`, after the final norm.

For a drafter with another vocabulary, `DrafterEntry.vocabulary` says how its tokens are converted, and there are::

      draft/to_main.npy                      int32 [draft vocab]: the main id of the same token, or −1
      draft-tokenizer/                       the draft model's own, as tokenizer/
      tokenizer/token_bytes.msgpack          the bytes of each token id; the same in draft-tokenizer/

For a drafter with a cut output matrix, which proposes only some of its tokens, there is::

      draft/proposed.npy                     int32 [logits width], ascending: the draft id of each of its logits

A main model that reads images has its vision encoder beside it (`ModelEntry.vision`)::

      vision/openvino_model.xml and .bin     pixel_values float32 [tiles, 3, size, size] → image_embeds float32
                                             [tiles, tokens, hidden]; others: `inputs.vision.processor`

`read_bundle` refuses a folder whose parts are missing, damaged, cut short or do not fit, and says which. For the
models' weights it checks sizes only; `Bundle.check_hashes` reads every byte.

`manifest`: the content of `outrider.json`. `hashes`: of files and vocabularies. `folder`: a bundle on disk. `fit`:
checks that its parts fit together.

Internal: apps import what docs/api.md lists.
"""

from outrider.bundle.folder import Bundle, draft_models_of, read_bundle
from outrider.bundle.hashes import list_files, sha256_of, vocabulary_sha256
from outrider.bundle.kinds import RESERVED_NAMES
from outrider.bundle.manifest import (
    BYTES_NAME,
    MANIFEST_NAME,
    MAP_NAME,
    MODEL_NAMES,
    PROPOSED_NAME,
    SCHEMA_VERSION,
    WEIGHTS_NAMES,
    DrafterEntry,
    FileEntry,
    Format,
    Geometry,
    Manifest,
    ModelEntry,
    Source,
    TokenizerEntry,
    write_manifest,
)
from outrider.bundle.vision import VisionEntry

__all__ = [
    "BYTES_NAME", "MANIFEST_NAME", "MAP_NAME", "MODEL_NAMES", "PROPOSED_NAME", "RESERVED_NAMES", "SCHEMA_VERSION",
    "WEIGHTS_NAMES", "Bundle", "DrafterEntry", "FileEntry", "Format", "Geometry", "Manifest", "ModelEntry", "Source",
    "TokenizerEntry", "VisionEntry", "draft_models_of", "list_files", "read_bundle", "sha256_of", "vocabulary_sha256",
    "write_manifest",
]  # fmt: skip
