"""`outrider simulate`: predicts a pair's speed on another machine."""
