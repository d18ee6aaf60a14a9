"""What all handlers of one server share."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from functools import cached_property

from aiohttp import web

from ostinato.errors import ModelNotFound
from ostinato.runtime.client import EngineClient
from ostinato.runtime.config import EngineConfig, ServerConfig
from ostinato.runtime.http.access_log import AccessLog
from ostinato.runtime.http.api_errors import Draining
from ostinato.runtime.http.api_keys import KeyRing
from ostinato.runtime.http.body_room import BodyRoom
from ostinato.runtime.http.http_connection import Connections
from ostinato.runtime.http.metrics import ServerMetrics
from ostinato.runtime.http.tracing import Tracing
from ostinato.runtime.http.web_origins import WebOrigins
from ostinato.runtime.output.registry import OutputFormats, choose_formats
from ostinato.runtime.text import TextFrontEnd
from ostinato.runtime.thinking.thought_marks import ThoughtMarks, thought_marks


@dataclass
class ServerState:
    """One engine behind one HTTP front end."""

    engine: EngineClient
    config: ServerConfig
    text: TextFrontEnd
    metrics: ServerMetrics
    engine_config: EngineConfig | None
    keys: KeyRing
    origins: WebOrigins
    bodies: BodyRoom
    access_log: AccessLog
    tracing: Tracing | None
    connections: Connections = field(default_factory=Connections)
    created: int = field(default_factory=lambda: int(time.time()))
    live: dict[str, str] = field(default_factory=dict)  # engine request ids being generated: X-Request-Id
    draining: bool = False
    hurries: bool = False  # a second signal came: the drain ends now

    @property
    def model(self) -> str:
        """The name that clients use."""
        return self.config.served_name or self.engine.info.model

    @cached_property
    def formats(self) -> OutputFormats:
        """How the model writes thoughts and tool calls. ConfigError for an unknown name in the settings."""
        config = self.config
        return choose_formats(config.reasoning_parser, config.tool_parser, self.text.chat_template)

    @cached_property
    def thought_marks(self) -> ThoughtMarks | None:
        """The same in tokens, for thinking budgets. ConfigError for settings that cannot be used."""
        config = self.config
        return thought_marks(
            self.formats, self.text, start=config.reasoning_start_str, end=config.reasoning_end_str
        )

    @cached_property
    def shown_special(self) -> frozenset[int]:
        """Special tokens that `formats` read."""
        return self.text.codec.special_ids_of(self.formats.markers)

    def check_model(self, name: str | None) -> None:
        """A request may leave the model out; a name must be ours."""
        if name is not None and name != self.model:
            raise ModelNotFound(
                f"model {name[:200]!r} is not served here; this server has {self.model!r}", param="model"
            )

    def sequences_of(self, name: str) -> list[str]:
        """Those being generated for the answer or HTTP request of this name."""
        return [
            sequence
            for sequence, http_id in self.live.items()
            if name in (answer := answer_of(sequence), answer.partition("-")[2], http_id, sequence)
        ]

    def check_open(self) -> None:
        """Refuse new work while shutting down."""
        if self.draining:
            raise Draining("the server is shutting down; try another one, or again later")


def answer_of(sequence: str) -> str:
    """Id of the answer that a sequence belongs to: `make_choices` adds its number."""
    return sequence.rpartition("-")[0]


STATE: web.AppKey[ServerState] = web.AppKey("ostinato_state", ServerState)
REQUEST_ID: web.RequestKey[str] = web.RequestKey("ostinato_request_id", str)
