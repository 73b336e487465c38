"""A small draft model made of a larger one: fewer layers, fewer proposed tokens, healed on the main model's answers.

    source = open_source("Qwen/Qwen2.5-Coder-0.5B-Instruct", main_vocabulary, "my-main")
    head, cut = start_draft(source, counts, batches, num_layers=8, num_tokens=32_768, progress=progress)
    ...                                       # training, as of other heads
    save_draft(head, source, Path("drafter"), {"layers": cut.kept, ...})

The folder that comes of it is a checkpoint like any other: `outrider export MAIN --draft drafter`.
"""
