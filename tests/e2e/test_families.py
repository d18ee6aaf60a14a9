"""Each family compiled with all passes and native kernels gives transformers' own greedy tokens.

Through the whole path: artifact, program, paged KV, scheduler, sampler; in every way a batch can be cut.
"""

import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from transformers import GenerationConfig, PreTrainedModel

from ostinato.ops import native
from ostinato.runtime.artifact import read_manifest
from ostinato.runtime.compile import compile_model
from ostinato.runtime.config import EngineConfig
from ostinato.runtime.llm import LLM
from ostinato.runtime.messages import SamplingParams
from ostinato.runtime.request_output import RequestOutput
from tests.support.tiny_models import FAMILIES, IM_START_ID, VOCAB, make_tiny, tiny_model

LENGTHS = (1, 7, 16, 33, 50)  # around the block of 16 tokens and past the window of 9
NEW_TOKENS = 20
NEAR_TIE = 1e-4  # logits closer than this may change places in float32: the comparison ends in front of them
CLOSE = 2e-4  # of two log-probabilities: two float32 computations, each within NEAR_TIE
PENALTY = 1.3  # on repetition: without it random models fall into loops of one token
GREEDY = SamplingParams(
    temperature=0, repetition_penalty=PENALTY, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=0
)


class Answer(NamedTuple):
    """Greedy tokens in front of the first near-tie, with the model's log-probability of each."""

    tokens: list[int]
    logprobs: list[float]


@pytest.fixture(scope="module", autouse=True)
def _kernels_are_built_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The library is the same for every model; a build takes seconds."""
    made = tmp_path_factory.mktemp("kernels") / "kernels.so"
    info = native.build(made)

    def copy(out: Path) -> native.BuildInfo:
        shutil.copy(made, out)
        return info

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "build", copy)
        yield


def prompts() -> list[list[int]]:
    draw = torch.Generator().manual_seed(7)
    return [torch.randint(IM_START_ID + 1, VOCAB - 10, (n,), generator=draw).tolist() for n in LENGTHS]


@torch.no_grad()
def expected(model: PreTrainedModel, prompt: list[int]) -> Answer:
    """What transformers' own `generate` says."""
    plan = GenerationConfig(
        max_new_tokens=NEW_TOKENS, do_sample=False, repetition_penalty=PENALTY, eos_token_id=None,
        pad_token_id=0, output_scores=True, output_logits=True, return_dict_in_generate=True,
    )  # fmt: skip
    model.generation_config.eos_token_id = None
    ids = torch.tensor([prompt])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=plan)
    new = out.sequences[0, len(prompt) :]
    best = torch.cat(out.scores).topk(2, dim=-1).values
    ties = (best[:, 0] - best[:, 1] < NEAR_TIE).nonzero()
    certain = int(ties[0]) if len(ties) else NEW_TOKENS
    logprobs = torch.cat(out.logits).log_softmax(-1).gather(1, new[:, None])[:, 0]
    return Answer(new[:certain].tolist(), logprobs[:certain].tolist())


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_equal_transformers_however_the_batch_is_cut(family, tmp_path):
    source, artifact = make_tiny(family, tmp_path / "model"), tmp_path / "artifact"
    compile_model(source, artifact)
    model = tiny_model(family)
    asked = prompts()
    wants = [expected(model, prompt) for prompt in asked]
    assert sum(len(want.tokens) for want in wants) > 0.8 * NEW_TOKENS * len(asked)
    assert len({tuple(want.tokens) for want in wants}) == len(asked)  # the prompt matters

    def check(outputs: list[RequestOutput], way: str) -> None:
        for prompt, want, output in zip(asked, wants, outputs, strict=True):
            (answer,) = output.outputs
            where, certain = f"{way}, prompt of {len(prompt)} tokens", len(want.tokens)
            assert len(answer.token_ids) == NEW_TOKENS
            assert list(answer.token_ids)[:certain] == want.tokens, where
            logprobs = [record.logprob for record in answer.logprobs[:certain]]
            assert logprobs == pytest.approx(want.logprobs, abs=CLOSE), where

    with LLM(artifact) as llm:
        check([llm.generate(prompt, GREEDY)[0] for prompt in asked], "one at a time")
        again = llm.generate(asked, GREEDY)
        assert [output.num_cached_tokens for output in again] == [0, 0, 0, 32, 48]
        check(again, "prefix hits")
    with LLM(artifact, kv={"prefix_cache": False}) as llm:
        check(llm.generate(asked, GREEDY), "all at once")
    with LLM(artifact, scheduler={"max_step_tokens": 7}) as llm:
        check(llm.generate(asked, GREEDY), "chunks of seven tokens")


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_bfloat16_is_proved_against_float64_and_runs(family, tmp_path):
    source, artifact = make_tiny(family, tmp_path / "model", dtype=torch.bfloat16), tmp_path / "artifact"
    compile_model(source, artifact, EngineConfig.model_validate({"graph": {"dtype": "bfloat16"}}))
    manifest = read_manifest(artifact)
    assert manifest.facts.dtype == "bfloat16"
    assert 0 < manifest.proof.max_error <= manifest.proof.budget
    assert manifest.proof.kv_max_error <= manifest.proof.kv_budget
    with LLM(artifact) as llm:
        for output in llm.generate(prompts(), GREEDY):
            assert len(output.outputs[0].token_ids) == NEW_TOKENS
            assert all(math.isfinite(record.logprob) for record in output.outputs[0].logprobs)
