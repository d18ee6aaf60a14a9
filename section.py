"""Base class of every configuration section: frozen, strict about unknown keys."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """One group of settings, each declared once; flags, file, server and Python calls are views of it."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())
