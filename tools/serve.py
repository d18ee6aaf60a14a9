"""`ostinato serve PATH`: an OpenAI-compatible server over an artifact, or a model compiled first."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import shlex
import subprocess
import sys
import time
from pathlib import Path

from ostinato import log as logs
from ostinato.errors import CompileError, ModelError, no_such_path
from ostinato.graph.facts import Task
from ostinato.runtime.config import EngineConfig
from ostinato.runtime.engine_process import EngineProcess
from ostinato.runtime.http.serve_app import listen, serve
from ostinato.runtime.http.server import make_app
from ostinato.runtime.request_check import task_of
from ostinato.runtime.sigterm import exits_on_sigterm
from ostinato.runtime.text import TextFrontEnd
from ostinato.tools.flags import add_flags, changed, config_from, user_path

log = logging.getLogger(__name__)

MANIFEST = "manifest.json"  # runtime.artifact has it too, but imports torch
SAME_SIGNAL_S = 0.5  # a signal to the whole group ends a compile within this, unasked
CLEAN_UP_S = 10.0  # that a compile gets to remove what is half made


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", type=user_path, metavar="PATH", help="artifact, model folder or GGUF file")
    add_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    began = time.monotonic()
    config = config_from(arguments)
    logs.setup(config.log_level)
    for path, value in changed(config).items():
        log.info("set: %s = %s", path, value)
    sock = listen(config.server)  # before the model: a port in use is known at once
    folder = find_artifact(arguments.path, config)
    if not config.server.served_name:  # clients get to know the model by the name that the operator typed
        server = config.server.model_copy(update={"served_name": arguments.path.resolve().stem})
        config = config.model_copy(update={"server": server})
    text = TextFrontEnd.load(folder / "tokenizer")
    engine = EngineProcess(folder, config)
    app = make_app(engine, config.server, text, engine_config=config)

    def on_ready(url: str) -> None:
        name = config.server.served_name or engine.info.model
        print(
            f"ready after {time.monotonic() - began:.1f} s; try:\n\n"
            f"{curl_line(url, name, config, task=task_of(engine.info))}\n",
            flush=True,
        )

    try:
        asyncio.run(serve(app, sock, on_ready=on_ready))
    except asyncio.CancelledError:  # a second signal: the operator would not wait for the drain
        log.warning("stopped at once; requests that were running got no end")
        return 130
    return 0


def find_artifact(path: Path, config: EngineConfig) -> Path:
    """`path` if it is an artifact; else the model there compiled into the cache, by a process of its own.

    The server's process never imports torch, let alone a compiler; what it would keep of them is memory.
    """
    if (path / MANIFEST).is_file():
        if config.passes.dump_dir:
            log.warning(
                "passes.dump_dir=%s: %s is compiled already, so no pass runs", config.passes.dump_dir, path
            )
        return path
    if not path.exists():
        raise ModelError(no_such_path(path))
    command = [sys.executable, "-m", "ostinato.tools.main", "compile", str(path)]
    for setting, value in changed(config).items():
        if setting.startswith(("graph.", "passes.")):
            command.append(f"--{setting.replace('_', '-')}={_flag_value(value)}")
    with exits_on_sigterm():
        code, said = _run(command)
    if code != 0:
        raise CompileError(f"{path}: compiling failed (see above); the command was: {shlex.join(command)}")
    return Path(said.strip().splitlines()[-1])


def _run(command: list[str]) -> tuple[int, str]:
    """Exit code and stdout of a child that does not outlive a signal to this process."""
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        said, _ = child.communicate()
    except BaseException:
        _end(child)
        raise
    return child.returncode, said


def _end(child: subprocess.Popen[str]) -> None:
    """Wait for a child that may have got our signal too; else ask it to clean up and end, then make it."""
    for ask, seconds in ((child.poll, SAME_SIGNAL_S), (child.terminate, CLEAN_UP_S), (child.kill, None)):
        ask()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(seconds)
            return


def _flag_value(value: object) -> str:
    return ",".join(value) if isinstance(value, tuple) else str(value)


_QUESTION = "What is the capital of France?"
_TRIES: dict[Task, tuple[str, dict[str, object]]] = {
    "generate": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": _QUESTION}], "temperature": 0, "max_tokens": 64},
    ),
    "embed": ("/v1/embeddings", {"input": _QUESTION}),
    "score": ("/v1/rerank", {"query": _QUESTION, "documents": ["Bananas are yellow.", "It is Paris."]}),
}


def curl_line(url: str, model: str, config: EngineConfig, *, task: Task = "generate") -> str:
    """A request that works when pasted into a shell."""
    path, fields = _TRIES[task]
    body = json.dumps({"model": model, **fields})
    needs_key = config.server.api_key or config.server.api_key_file
    key = " -H 'Authorization: Bearer YOUR_KEY'" if needs_key else ""
    json_header = "-H 'Content-Type: application/json'"
    return f"curl -s {url}{path} {json_header}{key} \\\n  -d {shlex.quote(body)}"
