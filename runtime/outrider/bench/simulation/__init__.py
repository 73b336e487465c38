"""`outrider simulate`: what a pair of models would do on another machine."""
