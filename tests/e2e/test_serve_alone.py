"""Serving needs no compiler, no tracer, no model definition: they are out of reach here, and it answers."""

import json
import os
from pathlib import Path

from tests.support.server_process import eventually, serving

# Runs first in every Python process of the server. What serving must do without raises when it is imported or
# started; at its end, each process writes down which modules it has.
POISON = """
import atexit, json, os, subprocess, sys

FOLDER = os.path.dirname(__file__)
FORBIDDEN = ("torch._inductor", "torch._dynamo", "transformers.models", "gguf")
# cuda-bindings, which torch imports where it is installed, asks these where libdl lies, and does without.
LOOKS_FOR_LIBRARY = (["/sbin/ldconfig", "-p"], ["ld", "-t", "-o", "/dev/null", "-ldl"])


def note(what):
    with open(os.path.join(FOLDER, "refused.txt"), "a") as out:
        out.write(f"{os.getpid()} {what}\\n")


class Refuse:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if any(name == bad or name.startswith(bad + ".") for bad in FORBIDDEN):
            note(f"import of {name}")
            raise ImportError(f"{name} is out of reach in this test")


class Popen(subprocess.Popen):
    def __init__(self, args, *more, **settings):
        if args[0] != sys.executable or "ostinato.runtime.engine_worker" not in args:
            if args not in LOOKS_FOR_LIBRARY:
                note(f"command {args}")
            raise FileNotFoundError(args[0])
        super().__init__(args, *more, **settings)


def write_modules():
    with open(os.path.join(FOLDER, f"{os.getpid()}.modules"), "w") as out:
        json.dump(sorted(sys.modules), out)


sys.meta_path.insert(0, Refuse)
subprocess.Popen = Popen
atexit.register(write_modules)
"""


def test_serves_with_no_compiler_tracer_or_model_code_in_reach(tiny_artifact: Path, tmp_path: Path):
    poison, empty = tmp_path / "poison", tmp_path / "bin"
    poison.mkdir()
    empty.mkdir()
    (poison / "sitecustomize.py").write_text(POISON)
    path = os.pathsep.join([str(poison), os.environ.get("PYTHONPATH", "")])
    with serving(tmp_path, tiny_artifact, env={"PATH": str(empty), "PYTHONPATH": path}) as server:
        status, answer = server.post("/v1/completions", {"prompt": "hello", "max_tokens": 8})
        assert (status, answer["usage"]["completion_tokens"]) == (200, 8)
        chat = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 8}
        assert server.post("/v1/chat/completions", chat)[0] == 200
        pids = {"server": server.pid, "engine": server.engine_pid}
        server.terminate()
        assert server.wait_end() == 0
    refused = poison / "refused.txt"
    assert not refused.exists(), refused.read_text()
    eventually((poison / f"{pids['engine']}.modules").exists, 10)
    modules = {name: set(json.loads((poison / f"{pid}.modules").read_text())) for name, pid in pids.items()}
    assert "torch" in modules["engine"]  # the hook was there, and the list is whole
    assert "torch" not in modules["server"]
    for name in modules["engine"] | modules["server"]:
        assert not name.startswith(("torch._inductor", "torch._dynamo", "transformers.models.")), name
