"""Other runtimes, as modes to compare with. Each needs its package.

openvino-genai calculates in the device's default, or in the precision after a slash: genai/f32, genai-draft:3/bf16.

A peer's module has `load(names, setup)`, which makes the modes of one worker. `known` is the table of all peers,
`check` has the checks before loading.
"""
