"""Settings of the pass pipeline."""

from pydantic import Field

from ostinato.section import Section


class PassesConfig(Section):
    """Which rewrites run and what they leave behind."""

    off: tuple[str, ...] = Field((), description="names of passes to leave out; an unknown name is an error")
    fuel: int = Field(-1, ge=-1, description="stop all rewriting after this many matches; -1: no limit")
    dump_dir: str = Field(
        "", description="folder for readable graphs before and after each pass; empty: none"
    )
