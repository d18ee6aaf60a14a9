"""Renders a chat template that came with a request: in a process of its own, with little memory and time.

A template is a program. Jinja's sandbox keeps it from files, network and Python's inside, not from loops and
gigabytes; the process does. It runs this very file, and gets no environment but what Python needs to start.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping

from ostinato.errors import InvalidRequest
from ostinato.runtime.chat_template import render_conversation

MEMORY_BYTES = 512 * 2**20
START_S = 10.0  # Python and transformers, on a busy machine
_PARAM = "chat_template"


def render_request_template(arguments: Mapping[str, object], timeout_s: float) -> str:
    """The text that `render_conversation(**arguments)` gives. Blocks; call it off the loop.

    InvalidRequest says what went wrong: the template's own words, too much time, memory or text.
    """
    task = json.dumps({"timeout_s": timeout_s, "arguments": arguments}).encode()
    keep = ("PATH", "PYTHONPATH", "HOME", "LANG", "LD_LIBRARY_PATH")
    environment = {name: os.environ[name] for name in keep if name in os.environ}
    try:
        done = subprocess.run(
            [sys.executable, "-m", __name__],
            input=task,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            timeout=START_S + timeout_s,
            check=False,
        )
        answer = json.loads(done.stdout) if done.returncode == 0 else {}
    except (subprocess.TimeoutExpired, ValueError):
        answer = {}
    if isinstance(text := answer.get("text"), str):
        return text
    said = answer.get("error") or f"it took over {timeout_s:g} s or {MEMORY_BYTES >> 20} MiB"
    raise InvalidRequest(f"{_PARAM}: {said}"[:600], param=_PARAM)


def _child() -> None:
    import resource
    import signal

    task = json.load(sys.stdin)
    from transformers.utils.chat_template_utils import render_jinja_template  # noqa: F401  # not on its time

    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, task["timeout_s"])
    resource.setrlimit(resource.RLIMIT_AS, (_address_space() + MEMORY_BYTES,) * 2)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    answer: dict[str, str]
    try:
        answer = {"text": render_conversation(**task["arguments"])}
    except MemoryError:
        answer = {"error": f"it needs over {MEMORY_BYTES >> 20} MiB"}
    except Exception as error:  # a border: the template may object in any way
        answer = {"error": (str(error) or type(error).__name__).removeprefix("messages: ")[:500]}
    json.dump(answer, sys.stdout)


def _address_space() -> int:
    """Bytes that this process has mapped."""
    import resource

    with open("/proc/self/statm", encoding="ascii") as statm:
        return int(statm.read().split()[0]) * resource.getpagesize()


if __name__ == "__main__":
    _child()
