"""A timeline of what the devices and the host do, for a viewer.

    with engine.trace("out.json"):
        engine.generate("Why is the sky blue?")

https://ui.perfetto.dev opens the file; `outrider trace out.json` sums it up. Its lanes::

    outrider   main: CPU    the device's calls, from when they began to when they were done: check, or read a prompt
               draft: CPU   draft, or read: a prompt, or what was not drafted by this model
               host         choose a drafter, and copy; propose, with submit, wait and draw of each draft token in it;
                            submit, wait, verify, commit; draft ahead, as propose, while the main model checks
    requests   request      what became of one request: queued, prompt, then a round after the other

and counters: the draft tokens of a round and how many were accepted, the accepted share so far, tokens per second. A
trace has no text and no token ids.

A `Trace` is an `outrider.observer.Observer`: the loop calls it during a round, and it takes the times. Without a trace
nothing is timed.
"""

from outrider.trace.recorder import Trace

__all__ = ["Trace"]
