"""Measures decoding in several modes, within one run, on the same prompts.

`benchmark` is a whole comparison, `concurrency` one with several requests at a time. Their parts::

    modes/         ways to decode: our own, and those of other runtimes
    prompts/       what they decode
    runs/          engines in processes of their own, the order of runs, and the folder that keeps them
    report/        figures, tables and plots
    setting.py     what a figure was measured on

Besides::

    cache/         what the cache does for conversations, and what it takes
    simulation/    what a pair would do on another machine
    traces/        where the time of a trace went
"""
