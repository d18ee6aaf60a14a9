"""The stages of a compile, for whoever shows its progress. Kept apart: compile.py imports transformers."""

from collections.abc import Callable

STAGES = ("read", "trace", "passes", "weights", "kernels", "proof", "write")
Progress = Callable[[str, float], None]  # stage of STAGES, share of it that is done (0 to 1)
