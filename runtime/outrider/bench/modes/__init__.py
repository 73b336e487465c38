"""Ways to decode that can be compared: our own, and those of other runtimes on the same prompts.

A mode is written KIND[:N][/PRECISION][@NAME]. Our own, with N draft tokens a round, or as many as the drafter takes by
itself::

    plain   auto   draft:3   ngram:5   suffix:8   shuffled:8   and any drafter that the engine knows

shuffled is for tests of identity: at random every round, one of the drafters or none, and up to N tokens. `auto@NAME`
is our own on another bundle, given as a peer's model. Those of other runtimes are listed in
`outrider.bench.modes.peers`, and so is what of them may name a precision.

`mode` says what a mode is, `name` reads its name, `setup` holds what engines are made of, `make` makes modes.
"""
