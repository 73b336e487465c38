"""Measures decoding in several modes, within one run, on the same prompts.

`benchmark` is a whole comparison, `concurrency` one with several requests at a time. Their parts::

    modes/         ways to decode: our own, and those of other runtimes
    prompts/       what they decode
    runs/          engines in processes of their own, the order of runs, and the folder for the results
    report/        figures and tables
    setting.py     the setting of a measurement

Besides::

    layers.py      layers that a drafter made of the main model's own can do without
    timeline.py    where the time of a trace went
    verify/        the certificate: whether the promises hold on this device
"""
