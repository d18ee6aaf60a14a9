"""GET /status: what the engine does now and what the artifact is, as one JSON object for the web page.

The manifest is read as JSON: this process has no torch, which runtime/artifact.py needs.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path

from aiohttp import web
from pydantic import BaseModel, ConfigDict, ValidationError

import ostinato
from ostinato.runtime.http.server_state import STATE
from ostinato.runtime.messages import EngineInfo, EngineStats
from ostinato.section import Section

log = logging.getLogger(__name__)

_MANIFEST = "manifest.json"


class _Part(BaseModel):
    """Some fields of a larger object."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class PassLine(_Part):
    """What one pass did to the graph; `expected` null: nothing in the graph calls for it."""

    name: str
    matched: int
    expected: int | None
    refused: dict[str, int]
    milliseconds: float


class AttentionLine(_Part):
    """One attention layer; `window` 0: it sees everything."""

    heads: int
    kv_heads: int
    head_size: int
    window: int


class Facts(_Part):
    """The model, as numbers."""

    architecture: str
    dtype: str
    hidden_size: int
    vocab_size: int
    attention: tuple[AttentionLine, ...]


class ProofLine(_Part):
    """The largest error of the compiled program against float64, and what it may be."""

    max_error: float
    budget: float
    argmax_equal: bool


class TargetLine(_Part):
    """The machine that the artifact is for."""

    device: str
    machine: str


class Compiled(_Part):
    """What the manifest of the artifact says, without hashes and options."""

    source: str
    created: str
    ostinato: str
    torch: str
    transformers: str
    target: TargetLine
    facts: Facts
    weights_bytes: int
    compile_seconds: dict[str, float]
    passes: tuple[PassLine, ...]
    proof: ProofLine


class Served(Section):
    """Facts of the running engine that do not change."""

    max_model_len: int
    block_tokens: int
    vocab_size: int
    dtype: str
    load_seconds: float
    graph_tokens: int | None  # steps of up to so many tokens are captured on a GPU; null: not known here


class Status(Section):
    """The whole answer."""

    model: str
    version: str
    uptime_s: float
    stalled_s: float
    draining: bool
    engine: EngineStats
    info: Served
    compiled: Compiled | None  # null: there is no manifest that can be read


class LiveStatus:
    """The route. The manifest is read at the first request."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._read: dict[str, Compiled | None] = {}

    async def answer(self, request: web.Request) -> web.Response:
        """What the engine does now, and what the artifact is."""
        state = request.app[STATE]
        settings = state.engine_config
        folder = state.engine.info.artifact
        if folder not in self._read:
            self._read[folder] = read_compiled(Path(folder))
        status = Status(
            model=state.model,
            version=ostinato.__version__,
            uptime_s=round(time.monotonic() - self._started, 1),
            stalled_s=round(state.engine.stalled_seconds, 3),
            draining=state.draining,
            engine=state.engine.stats,
            info=_served(state.engine.info, None if settings is None else settings.gpu.graph_tokens),
            compiled=self._read[folder],
        )
        return web.Response(
            text=status.model_dump_json(),
            content_type="application/json",
            headers={"Cache-Control": "no-store"},
        )


def _served(info: EngineInfo, graph_tokens: int | None) -> Served:
    return Served(
        max_model_len=info.max_model_len,
        block_tokens=info.block_tokens,
        vocab_size=info.vocab_size,
        dtype=info.dtype,
        load_seconds=info.load_seconds,
        graph_tokens=graph_tokens,
    )


def read_compiled(folder: Path) -> Compiled | None:
    """The manifest of an artifact; None (and a warning) where there is none that is understood."""
    try:
        return Compiled.model_validate_json((folder / _MANIFEST).read_bytes())
    except (OSError, ValidationError) as error:
        log.warning("%s: /status leaves the artifact's facts out: %s", folder / _MANIFEST, error)
        return None
