"""Converts Llama-like decoders to OpenVINO IR without PyTorch: GGUF files and checkpoint folders, in seconds.

    decoder = describe(config)                                 # config.json, or the same of a GGUF file
    weights = CheckpointWeights(folder, decoder)               # or GGUFWeights(header, decoder)
    packed = pack(weights, "int8", scratch / "weights", advance)
    model = build(decoder, weights, packed)                    # an ov.Model, stateful, as optimum-intel writes it

The differences of an architecture from Llama are one entry of `archs.toml`. Other architectures go through
optimum-intel; see `outrider_export.with_torch.convert`.
"""
