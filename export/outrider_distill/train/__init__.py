"""Train drafter heads for a frozen main model, in PyTorch, and write them in the formats that others publish.

    head, config = fit.start_head(teacher, data)
    files.save(head, config, Path("my-eagle3"), fit.fit(head, data, num_steps=4000))
    head = files.load(Path("my-eagle3"), main_embedding)     # a torch module

`outrider distill` makes the data and does all of this, for draft models, too (`outrider_distill.draft`).
"""
