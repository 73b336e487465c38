"""Measures decoding in several modes, within one run, on the same prompts.

`benchmark` is a whole comparison, `concurrency` one with several requests at a time. Their parts::

    modes/         ways to decode: our own, and those of other runtimes
    prompts/       what they decode
    runs/          engines in processes of their own, the order of runs, and the folder for the results
    report/        figures, tables and plots
    setting.py     the setting of a measurement

Besides::

    conversations.py  the prefix cache in conversations, and its memory
    simulation/    predictions for a pair on another machine
    traces/        pictures and summaries of traces
    verify/        the certificate: whether the promises hold on this device
"""
