"""A timeline of devices, host and requests, for a trace viewer.

    with engine.trace("out.json"):
        engine.generate("Why is the sky blue?")

https://ui.perfetto.dev opens the file; `outrider trace out.json` sums it up. Its lanes::

    outrider   main: CPU    the device's calls: check (a target pass), or read (a piece of a prompt)
               draft: CPU   draft, or read (a prompt, or tokens that this model did not draft)
               host         choose (drafters, and copies); propose, which contains submit, wait and draw of each draft
                            token; submit, wait, verify, commit; draft ahead, like propose, during the target pass
    requests   request      the stages of one request: queued, prompt, then its rounds

Counters: draft tokens and accepted tokens of a round, the acceptance rate so far, tokens per second. A trace has no
text and no token ids.

A `Trace` is an `outrider.decoding.observer.Observer`: the loop calls it during a round, and it records the
times. Without a trace nothing is timed.
"""

from outrider.decoding.trace.recorder import Trace

__all__ = ["Trace"]
