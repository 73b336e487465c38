"""`outrider trace`: where the time of a trace went, in figures and as a picture."""
