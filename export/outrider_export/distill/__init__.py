"""Make a drafter for a main model on the user's own machine: `outrider distill`."""
