"""The draft diet: a draft model's output matrix, cut to the tokens that it is likely to propose."""
