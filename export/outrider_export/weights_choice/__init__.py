"""The form of a model's weights that is fastest on this machine, by the table of processors, or measured."""
