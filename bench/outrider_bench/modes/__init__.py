"""Modes: ways to decode that are compared, our own and those of other runtimes, on the same prompts.

A mode is written KIND[:N][/PRECISION][@NAME]. Our own, with N draft tokens per round, or the drafter's default::

    plain   auto   draft:3   ngram:5   suffix:8   shuffled:8   and any drafter that the engine knows

shuffled is for tests of identity: every round it chooses at random one of the drafters or none, and up to N tokens.
`auto@NAME` is our own on another bundle, given as a peer's model. `outrider_bench.modes.peers.known` lists other
runtimes' modes, and those that may name a precision.

`mode`: the protocol. `name`: parses names. `setup`: what engines are made of. `make`: makes modes.
"""
