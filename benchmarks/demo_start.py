"""How long the demo model takes from file to artifact, and from artifact to first token, each in fresh
processes.

    python -m benchmarks.demo_start MODEL.gguf [--rounds 3]

demo_compile_s: `compile-model` from process start to exit. demo_load_to_first_token_s: a process that imports
ostinato, loads the artifact, answers one chat message with one token; the baseline is transformers doing the
same from the GGUF file. Both are whole processes, interpreter start and imports included. Page cache warm.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.record import Row, write_record

OURS = """
from ostinato import LLM, SamplingParams
with LLM({path!r}, log_level="ERROR") as llm:
    out = llm.chat([{{"role": "user", "content": "Say hello."}}], SamplingParams(temperature=0, max_tokens=1))
    assert len(out[0].outputs[0].token_ids) == 1
"""
THEIRS = """
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
folder, name = {folder!r}, {name!r}
tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
model = AutoModelForCausalLM.from_pretrained(
    folder, gguf_file=name, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32)
text = tokenizer.apply_chat_template(
    [{{"role": "user", "content": "Say hello."}}], add_generation_prompt=True, tokenize=False)
ids = tokenizer(text, return_tensors="pt")
assert model.generate(**ids, max_new_tokens=1, do_sample=False).shape[1] == ids["input_ids"].shape[1] + 1
"""


def seconds(command: list[str]) -> float:
    """Wall time of a whole process; a failing one raises."""
    began = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    python = sys.executable
    samples: dict[str, list[float]] = {"compile": [], "ours": [], "theirs": []}
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(arguments.rounds):
            out = f"{folder}/artifact{turn}"
            compile_model = [python, "-m", "ostinato.tools.compile_model", str(arguments.model), "-o", out]
            samples["compile"].append(seconds(compile_model))
            samples["ours"].append(seconds([python, "-c", OURS.format(path=out)]))
            script = THEIRS.format(folder=str(arguments.model.parent.absolute()), name=arguments.model.name)
            samples["theirs"].append(seconds([python, "-c", script]))
    baseline = statistics.median(samples["theirs"])
    write_record(
        "demo_start",
        [
            Row.of(
                "demo_compile_s", samples["compile"], "s", None, "none: no engine here compiles ahead of time"
            ),
            Row.of(
                "demo_load_to_first_token_s",
                samples["ours"],
                "s",
                baseline,
                "transformers from the GGUF file",
            ),
        ],
    )


if __name__ == "__main__":
    main()
