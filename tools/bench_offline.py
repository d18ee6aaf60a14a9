"""`ostinato bench offline PATH`: throughput of `LLM.generate` over a batch of prompts, in this process."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from ostinato.bench.confidence import over_runs
from ostinato.bench.data_settings import DataSettings
from ostinato.bench.datasets import make_items
from ostinato.bench.load_item import LoadItem
from ostinato.bench.results import OutputSettings, make_result, save_result
from ostinato.errors import ConfigError
from ostinato.runtime.llm import LLM
from ostinato.runtime.messages import SamplingParams
from ostinato.tools.bench_flags import add_section, read_section
from ostinato.tools.bench_report import print_points
from ostinato.tools.flags import add_flags, changed, config_from, user_path

_NOT_OURS = ("multi_turn", "rerank")  # they need a server's answers, or another kind of model


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", type=user_path, metavar="PATH", help="artifact, model folder or GGUF file")
    parser.add_argument("--runs", type=int, default=1, metavar="N", help="measured runs (default: 1)")
    parser.add_argument(
        "--warm-ups", type=int, default=1, metavar="N", help="requests before the first run (default: 1)"
    )
    add_section(parser, DataSettings)
    add_section(parser, OutputSettings, leave_out=("save_requests", "plot"))
    add_flags(parser, leave_out=("server",))


def run(arguments: argparse.Namespace) -> int:
    output = read_section(arguments, OutputSettings)
    data = read_section(arguments, DataSettings)
    config = config_from(arguments)
    if data.dataset in _NOT_OURS:
        raise ConfigError(f"--dataset {data.dataset}: bench offline takes single prompts; use bench serve")
    if arguments.runs < 1:
        raise ConfigError(f"--runs {arguments.runs}: must be at least 1")
    began = time.monotonic()
    with LLM(arguments.path, config=config, progress=output.progress) as llm:
        load_s = time.monotonic() - began
        if not data.tokenizer:  # the model's own: lengths are exact
            data = data.model_copy(update={"tokenizer": str(Path(llm.info.artifact) / "tokenizer")})
        if arguments.warm_ups > 0:
            generate(llm, make_items(data, arguments.warm_ups, draw=0), show=False)
        summaries = [
            generate(llm, make_items(data, draw=draw), show=output.progress)
            for draw in range(1, arguments.runs + 1)
        ]
        settings = {
            "model": llm.info.model,
            "data": {**data.model_dump(), "tokenizer": ""},
            "engine": {name: str(value) for name, value in changed(config).items()},
        }
    load = {"load_s": {"mean": load_s, "ci95": None}}  # loaded once
    points = [{"runs": summaries, "over_runs": {**over_runs(summaries), **load}}]
    save_result(make_result("offline", settings, points, output), output)
    print_points(points)
    return 0


def generate(llm: LLM, items: list[LoadItem], *, show: bool | None) -> dict[str, Any]:
    """Numbers of one call of `llm.generate` with all prompts at once, greedy and of full length."""
    sampling = [
        SamplingParams(
            temperature=0.0, max_tokens=item.output_tokens, ignore_eos=item.output_tokens is not None
        )
        for item in items
    ]
    began = time.monotonic()
    answers = llm.generate([item.turns[0] for item in items], sampling, progress=show)
    duration = time.monotonic() - began
    ends = [answer.outputs[0] for answer in answers]
    failed = [end.error or "no reason given" for end in ends if end.finish_reason in ("error", "abort")]
    prompt = sum(len(answer.prompt_token_ids) for answer in answers)
    cached = sum(answer.num_cached_tokens for answer in answers)
    output = sum(len(end.token_ids) for end in ends)
    return {
        "completed": len(answers) - len(failed),
        "failed": len(failed),
        "errors": {error: failed.count(error) for error in set(failed)},
        "duration_s": duration,
        "request_per_s": (len(answers) - len(failed)) / duration,
        "prompt_tokens": prompt,
        "cached_tokens": cached,
        "cached_fraction": cached / prompt if prompt else None,
        "output_tokens": output,
        "output_tok_s": output / duration,
        "total_tok_s": (prompt + output) / duration,
    }
