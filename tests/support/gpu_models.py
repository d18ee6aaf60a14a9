"""Models for the tests on a GPU, and what `transformers` says to their prompts, in float32."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.random_model import SMOL_135M, RandomSource
from ostinato.graph.source import ModelSource
from tests.support.server_process import ROOT

LENGTHS = (5, 16, 17, 64, 190, 513, 900)
NEW_TOKENS = 32
MIN_MARGIN = 1e-3  # of a logit: float32 errs by about 1e-5 here, so no token within an answer is a near tie
DEMO = ROOT / ".cache" / "SmolLM2-135M-Instruct.Q4_1.gguf"
GOLDEN = ROOT / "tests" / "e2e" / "golden_smollm2.json"


class Answer(NamedTuple):
    """A prompt and its greedy continuation; `logprobs[i]` is that of token i + 1 of both together."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...] | None


def random_source(*, layers: int, dtype: str) -> RandomSource:
    """The demo model's shape with random weights. Its head is a matrix of its own, not the embedding."""
    config = SMOL_135M | {"num_hidden_layers": layers, "dtype": dtype, "tie_word_embeddings": False}
    return RandomSource(config, f"random-{layers}-{dtype}")


def judged() -> tuple[ModelSource | Path, list[Answer]]:
    """The demo model with its golden answers; without its file one of that shape, asked here."""
    if DEMO.is_file():
        cases = json.loads(GOLDEN.read_text())["cases"]
        return DEMO, [Answer(tuple(case["prompt"]), tuple(case["new"]), None) for case in cases]
    source = random_source(layers=30, dtype="float32")
    return source, reference(source, LENGTHS)


def reference(source: RandomSource, lengths: tuple[int, ...]) -> list[Answer]:
    """What `transformers` answers on the GPU in float32, each answer cut before its first near tie."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    config = CONFIG_MAPPING["llama"](**source.config, attn_implementation="eager")
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    state = {name: source.read(name).float() for name in source.tensor_names()}
    model.load_state_dict(state, strict=True)
    model.eval()
    return [_ask(model, prompt_ids(length)) for length in lengths]


def prompt_ids(length: int, seed: int = 0) -> tuple[int, ...]:
    """Token ids from 3 on: no special ones, and not the 0 that pads a step."""
    draw = torch.Generator().manual_seed(1000 * seed + length)
    return tuple(torch.randint(3, 49152, (length,), generator=draw).tolist())


@torch.no_grad()
def _ask(model: torch.nn.Module, prompt: tuple[int, ...]) -> Answer:
    ids = torch.tensor([prompt], device="cuda")
    for _ in range(NEW_TOKENS):
        logits = model(ids, use_cache=False).logits[0]
        best = logits[-1].topk(2)
        if best.values[0] - best.values[1] < MIN_MARGIN:
            break
        ids = torch.cat([ids, best.indices[:1, None]], 1)
    every = ids[0].tolist()
    scored = model(ids, use_cache=False).logits[0, : len(every) - 1].double().log_softmax(-1)
    logprobs = scored.gather(1, ids[0, 1:, None])[:, 0].tolist()
    return Answer(prompt, tuple(every[len(prompt) :]), tuple(logprobs))
