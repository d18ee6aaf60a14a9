"""ostinato: compile a language model once, ahead of time, and replay it."""

__version__ = "0.1.0"
