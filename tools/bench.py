"""`ostinato bench serve | offline | startup | compare`: one file per kind of measurement."""

from __future__ import annotations

import argparse
import importlib
import sys

# kind -> (module, one line of help); a module has add_arguments(parser) and run(arguments) -> exit code
KINDS = {
    "serve": ("bench_serve", "load a server and measure latency and throughput"),
    "offline": ("bench_offline", "measure the throughput of LLM in this process"),
    "startup": ("bench_startup", "measure from the start of `ostinato serve` to the first token"),
    "compare": ("bench_compare", "put two results side by side"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="KIND")
    words = [word for word in sys.argv[1:] if not word.startswith("-")]
    for kind, (module, text) in KINDS.items():
        sub = kinds.add_parser(kind, help=text, description=text)
        if kind in words:  # the others may need torch; a kind's name elsewhere in the line costs an import
            importlib.import_module(f"ostinato.tools.{module}").add_arguments(sub)


def run(arguments: argparse.Namespace) -> int:
    module = importlib.import_module(f"ostinato.tools.{KINDS[arguments.kind][0]}")
    return int(module.run(arguments))
