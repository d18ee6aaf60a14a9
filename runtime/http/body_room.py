"""Memory for request bodies that are being read."""

from __future__ import annotations

from dataclasses import dataclass

from ostinato.errors import Overloaded


@dataclass
class BodyRoom:
    """Memory for bodies that are being read, of one server."""

    limit_bytes: int
    held_bytes: int = 0

    def take(self, count: int) -> None:
        """Hold so many more bytes. Overloaded when there is no room for them."""
        if self.held_bytes + count > self.limit_bytes:
            raise Overloaded(
                f"{self.held_bytes} bytes of request bodies are being read (server.max_bodies_mib); try later"
            )
        self.held_bytes += count

    def give_back(self, count: int) -> None:
        self.held_bytes -= count
