"""`ostinato batch -i in.jsonl -o out.jsonl PATH_OR_URL`: answer a file of requests (OpenAI's batch format).

With a model folder, GGUF file or artifact a server runs inside this process for as long as it takes; with a
URL the requests go there.  A run that was interrupted goes on where it ended.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import secrets
import sys
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

import aiohttp

from ostinato import log as logs
from ostinato.errors import ConfigError, EngineDead
from ostinato.runtime.batch_lines import (
    PASSING,
    BadLine,
    BatchLine,
    check_ids,
    read_lines,
    resume,
    write_answer,
    write_error,
)
from ostinato.runtime.engine_process import EngineProcess
from ostinato.runtime.http.serve_app import listen, serve
from ostinato.runtime.http.server import make_app
from ostinato.runtime.text import TextFrontEnd
from ostinato.tools.flags import add_flags, config_from, user_path
from ostinato.tools.serve import find_artifact

log = logging.getLogger(__name__)

LONGEST_WAIT_S = 30.0
TELL_EVERY_S = 10.0
CONNECT_S = 30.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", metavar="PATH_OR_URL", help="artifact, model, or address of a server")
    parser.add_argument("-i", "--input", type=user_path, required=True, metavar="FILE", help="requests")
    parser.add_argument("-o", "--output", type=user_path, required=True, metavar="FILE", help="answers")
    parser.add_argument("--model", metavar="NAME", help="take the place of `model` in every request")
    parser.add_argument(
        "--concurrency", type=_positive, default=64, metavar="N", help="requests at once (default: 64)"
    )
    parser.add_argument(
        "--retries", type=_not_negative, default=5, metavar="N",
        help="more tries of a request that failed in passing (default: 5)",
    )  # fmt: skip
    add_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    config = config_from(arguments)
    logs.setup(config.log_level)
    if arguments.output.exists() and arguments.input.exists() and arguments.output.samefile(arguments.input):
        raise ConfigError(f"{arguments.output}: is the input, too; give the answers a file of their own")
    known = check_ids(arguments.input)
    done = resume(arguments.output, known)
    if done:
        log.info("%s has %d answers already; the rest is asked", arguments.output, len(done))
    try:
        out = arguments.output.open("a", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{arguments.output}: {error.strerror}") from None
    batch = Batch(arguments, out, done)
    try:
        asyncio.run(_run(arguments, batch))
    except BaseExceptionGroup as group:  # of the requests' tasks: the first that failed has ended the others
        raise group.exceptions[0] from None
    finally:
        with suppress(OSError):  # each line was flushed; what could not be is told by now
            out.close()
    said = f"{batch.answered} answered, {batch.failed} failed, {len(done)} had their answer already"
    print(f"{said}: {arguments.output}", file=sys.stderr)
    return 1 if batch.failed else 0


async def _run(arguments: argparse.Namespace, batch: Batch) -> None:
    lines = read_lines(arguments.input)
    if not any(isinstance(line, BatchLine) and line.custom_id not in batch.done for line in lines):
        await batch.run("", "")  # nothing to ask; lines that are no requests are told
        return
    if arguments.target.startswith(("http://", "https://")):
        url = arguments.target.rstrip("/").removesuffix("/v1")
        key = os.environ.get("OPENAI_API_KEY", "")
        await batch.run(url, key)
        return
    async with _local_server(arguments) as (url, key, ended):
        work = asyncio.create_task(batch.run(url, key))
        await asyncio.wait([work, ended], return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
            await ended  # raises what ended it
            raise KeyboardInterrupt
        await work


@asynccontextmanager
async def _local_server(
    arguments: argparse.Namespace,
) -> AsyncIterator[tuple[str, str, asyncio.Task[None]]]:
    """A server of this process on a port that nobody else has the key to."""
    config, path = config_from(arguments), user_path(arguments.target)
    key = secrets.token_hex(16)
    own = {"host": "127.0.0.1", "port": 0, "api_key": (key,), "api_key_file": "", "drain_s": 0.0}
    name = config.server.served_name or path.resolve().stem
    server = config.server.model_copy(update={**own, "served_name": name})
    config = config.model_copy(update={"server": server})
    folder = await asyncio.to_thread(find_artifact, path, config)
    app = make_app(
        EngineProcess(folder, config),
        server,
        TextFrontEnd.load(folder / "tokenizer"),
        engine_config=config,
    )
    ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    stop = asyncio.Event()
    task = asyncio.create_task(serve(app, listen(server), on_ready=ready.set_result, stop=stop))
    either: list[asyncio.Future[Any]] = [task, ready]  # Any: a task of nothing and an address
    await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
    if task.done():
        await task
        raise EngineDead("the server ended before it was ready")
    try:
        yield ready.result(), key, task
    finally:
        stop.set()
        await task


class Batch:
    """One run over the input; answers are written as they come."""

    def __init__(self, arguments: argparse.Namespace, out: TextIO, done: set[str]) -> None:
        self.answered = 0
        self.failed = 0
        self._input: Path = arguments.input
        self._out = out
        self.done = done
        self._model: str | None = arguments.model
        self._retries: int = arguments.retries
        self._concurrency: int = arguments.concurrency
        self._told = time.monotonic()

    async def run(self, url: str, key: str) -> None:
        """Ask everything that has no answer yet."""
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)
        connector = aiohttp.TCPConnector(limit=0)
        room = asyncio.Semaphore(self._concurrency)
        async with (
            aiohttp.ClientSession(headers=headers, timeout=timeout, connector=connector) as http,
            asyncio.TaskGroup() as tasks,
        ):
            for line in read_lines(self._input):
                if line.custom_id in self.done:
                    continue
                if isinstance(line, BadLine):
                    self._error(line.custom_id, "invalid_line", line.problem)
                    continue
                await room.acquire()
                tasks.create_task(self._ask(http, url, line)).add_done_callback(lambda _: room.release())

    async def _ask(self, http: aiohttp.ClientSession, url: str, line: BatchLine) -> None:
        body = line.body if self._model is None else {**line.body, "model": self._model}
        raw = json.dumps(body).encode()
        for attempt in range(self._retries + 1):
            wait_s = min(LONGEST_WAIT_S, 2.0**attempt)
            try:
                async with http.post(url + line.url, data=raw, headers=_JSON) as response:
                    raw_answer = await response.read()
                    if response.status in PASSING and attempt < self._retries:
                        wait_s = _retry_after_s(response.headers, wait_s)
                    else:
                        self._answer(line.custom_id, response, raw_answer)
                        return
            except (aiohttp.ClientError, TimeoutError, ConnectionError) as error:
                if attempt == self._retries:
                    said = f"{url}: {error or type(error).__name__}"
                    self._error(line.custom_id, "connection_error", said)
                    return
            await asyncio.sleep(wait_s)

    def _answer(self, custom_id: str, response: aiohttp.ClientResponse, raw: bytes) -> None:
        request_id = response.headers.get("X-Request-Id", "")
        try:
            body = json.loads(raw, parse_constant=_not_json)
            write_answer(self._out, custom_id, response.status, request_id, body)
        except (ValueError, RecursionError):
            shown = raw[:200].decode("utf-8", "replace")
            self._error(custom_id, "invalid_answer", f"status {response.status}, and no JSON: {shown}")
            return
        self._count(is_good=response.status == 200)

    def _error(self, custom_id: str | None, code: str, message: str) -> None:
        write_error(self._out, custom_id, code, message)
        self._count(is_good=False)

    def _count(self, *, is_good: bool) -> None:
        self.answered += is_good
        self.failed += not is_good
        if time.monotonic() - self._told > TELL_EVERY_S:
            self._told = time.monotonic()
            log.info("%d answered, %d failed so far", self.answered, self.failed)


_JSON: Mapping[str, str] = {"Content-Type": "application/json"}


def _retry_after_s(headers: Mapping[str, str], default_s: float) -> float:
    given = headers.get("Retry-After", "")
    return min(LONGEST_WAIT_S, float(given)) if given.isascii() and given.isdigit() else default_s


def _not_json(name: str) -> object:
    raise ValueError(f"{name} is not JSON")


def _not_negative(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError("must be 0 or more")
    return value


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be 1 or more")
    return value
