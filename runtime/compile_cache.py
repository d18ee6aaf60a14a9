"""Where compiled models live when the user names a model instead of an artifact."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from ostinato.runtime.artifact_names import MANIFEST
from ostinato.runtime.compile_stages import Progress
from ostinato.runtime.config import EngineConfig

log = logging.getLogger(__name__)


def cache_root() -> Path:
    """`$XDG_CACHE_HOME/ostinato`, as the XDG base directory specification says."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ostinato"


def resolve_artifact(path: str | Path, config: EngineConfig, *, progress: Progress | None = None) -> Path:
    """An artifact folder for `path`: itself if it is one, else the model there compiled into the cache.

    A model is compiled once for each set of settings that matter; a damaged or outdated entry is made anew.
    For an artifact, settings of a compile come too late; `load_artifact` warns of those that change a result.
    """
    path = Path(path).expanduser()
    if (path / MANIFEST).is_file():
        if config.passes.dump_dir:
            log.warning(
                "passes.dump_dir=%s: %s is compiled already, so no pass runs", config.passes.dump_dir, path
            )
        return path
    # Imported here: with them comes transformers, which a finished artifact needs nothing of.
    from ostinato.graph.source import open_source
    from ostinato.runtime.compile import compile_key, compile_model

    source = open_source(path)
    out = cache_root() / f"{source.path.stem}-{compile_key(source, config)[:16]}"
    compile_model(path, out, config, progress=progress)
    return out
