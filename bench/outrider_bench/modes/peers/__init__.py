"""Other runtimes, as modes to compare with. Each needs its package.

::

    genai  genai-ngram:N  genai-draft:N  genai-dynamic:T   openvino-genai on the bundle's own files: plain, prompt
                                                           lookup, a draft model with N tokens a round, or as many as
                                                           its confidence stays above T
    genai-eagle3:N  genai-dflash:N                         EAGLE-3 and DFlash, which `outrider peer-draft`
                                                           writes; DFlash decodes greedily only
    transformers  transformers-draft:N                     Transformers with PyTorch, plain and assisted
    llamacpp  llamacpp-ngram:N                             llama.cpp, plain and with prompt lookup, on a GGUF file
    llamaserver  llamaserver-ngram:N                       llama-server, several requests at a time
    ortgenai  ortgenai-ngram:N  ortgenai-draft:N           onnxruntime-genai on the bundle's own files, or on folders of
                                                           its own: plain, prompt lookup, a draft model

openvino-genai calculates in the device's default, or in the precision behind a slash: genai/f32, genai-draft:3/bf16.
genai/fastest times all of the device's precisions when it is loaded, and uses the fastest.

A peer's module has `load(names, setup)`, which makes the modes of one worker. `known` is the table of all peers,
`check` has the checks before loading.
"""
