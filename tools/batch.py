"""`ostinato batch -i in.jsonl -o out.jsonl PATH_OR_URL`: answer a file of requests (OpenAI's batch format).

With a model folder, GGUF file or artifact a server runs inside this process for as long as it takes; with a
URL the requests go there.  A run that was interrupted goes on where it ended.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import secrets
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

from ostinato import log as logs
from ostinato.errors import ConfigError, EngineDead
from ostinato.runtime.batch_lines import BatchLine, check_ids, read_lines, resume
from ostinato.runtime.batch_run import BatchRun
from ostinato.runtime.engine_process import EngineProcess
from ostinato.runtime.http.serve_app import listen, serve
from ostinato.runtime.http.server import make_app
from ostinato.runtime.text import TextFrontEnd
from ostinato.tools.flags import add_flags, config_from, user_path
from ostinato.tools.serve import find_artifact

log = logging.getLogger(__name__)


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
    batch = BatchRun(
        arguments.input,
        out,
        done,
        model=arguments.model,
        retries=arguments.retries,
        concurrency=arguments.concurrency,
    )
    try:
        asyncio.run(_run(arguments, batch, done))
    except BaseExceptionGroup as group:  # of the requests' tasks: the first that failed has ended the others
        raise group.exceptions[0] from None
    finally:
        with suppress(OSError):  # each line was flushed; what could not be is told by now
            out.close()
    said = f"{batch.answered} answered, {batch.failed} failed, {len(done)} had their answer already"
    print(f"{said}: {arguments.output}", file=sys.stderr)
    return 1 if batch.failed else 0


async def _run(arguments: argparse.Namespace, batch: BatchRun, done: set[str]) -> None:
    lines = read_lines(arguments.input)
    if not any(isinstance(line, BatchLine) and line.custom_id not in done for line in lines):
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
