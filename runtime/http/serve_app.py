"""Listen, serve until told to stop, stop without breaking answers."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import resource
import signal
import socket
from collections.abc import Callable

from aiohttp import web

from ostinato.errors import ConfigError
from ostinato.runtime.config import ServerConfig
from ostinato.runtime.http.client_watch import WatchedConnection
from ostinato.runtime.http.http_connection import HttpConnection
from ostinato.runtime.http.server_state import STATE

log = logging.getLogger(__name__)

HANDLER_WAIT_S = 0.5  # after the drain only clients that do not read are left
_OTHER_FILES = 128  # that are no connections
_BACKLOG = 1024  # connections that wait for accept; a load tester opens hundreds at once


def listen(config: ServerConfig) -> socket.socket:
    """Bind `host:port` now, so that a port in use is known before a model is loaded. ConfigError says so."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((config.host, config.port))
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            raise _in_use(config.host, config.port) from None
        raise ConfigError(
            f"server.host={config.host} server.port={config.port}: cannot listen: {error.strerror or error}"
        ) from None
    return sock


async def serve(
    app: web.Application,
    sock: socket.socket,
    *,
    on_ready: Callable[[str], None] | None = None,
    stop: asyncio.Event | None = None,
) -> None:
    """Serve on a socket of `listen` until SIGTERM, SIGINT or `stop`; drain (`server.drain_s`), return.

    A second signal aborts what still runs at once.  `on_ready` gets the base URL when requests can be
    answered; what `EngineClient.start` raises goes to the caller.
    """
    stop = stop or asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        app[STATE].hurries = stop.is_set()
        stop.set()

    handled = [number for number in (signal.SIGTERM, signal.SIGINT) if _try_handle(loop, number, on_signal)]
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=HANDLER_WAIT_S)
    try:
        await runner.setup()
        manager = runner.server
        assert manager is not None  # set up just now
        host, port = sock.getsockname()[:2]
        state = app[STATE]
        raise_file_limit(state.config.max_connections)

        def make_watched() -> asyncio.Protocol:
            return WatchedConnection(HttpConnection(manager, loop, state.config, state.connections))

        try:
            server = await loop.create_server(make_watched, sock=sock, backlog=_BACKLOG)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            raise _in_use(host, port) from None  # two servers started at once, and the other was faster
        try:
            url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
            log.info("serving on %s", url)
            if on_ready is not None:
                on_ready(url)
            await stop.wait()
        finally:
            server.close()
    finally:
        sock.close()
        await runner.cleanup()
        for number in handled:
            loop.remove_signal_handler(number)


def raise_file_limit(connections: int) -> None:
    """Let this process have a file for each connection; a warning says when the system does not allow it."""
    wanted = connections + _OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed < wanted:
        log.warning(
            "server.max_connections=%d: this process may have %d open files; `ulimit -Hn %d` allows more",
            connections, allowed, wanted,
        )  # fmt: skip


def _in_use(host: str, port: int) -> ConfigError:
    return ConfigError(
        f"server.port={port}: in use on {host}; "
        "stop the other program or choose another port (0: any free one)"
    )


def _try_handle(loop: asyncio.AbstractEventLoop, number: signal.Signals, handler: Callable[[], None]) -> bool:
    """Signals can be handled in the main thread only; elsewhere the caller has `stop`."""
    with contextlib.suppress(ValueError, RuntimeError, NotImplementedError):
        loop.add_signal_handler(number, handler)
        return True
    return False
