"""The package's version. It imports nothing, so that every module may read it."""

__version__ = "0.1.0"
