"""Sampling on a GPU: one token per row of bf16 logits, against torch's argmax and a draw by sorting.

    python -m benchmarks.gpu_sampling [--vocabs 128256 49152] [--rows 1 32 256] [--tune | --kernels]

`greedy`: every row greedy.  `top_p`, `top_k_p`, `plain`: every row random, with top_p 0.9, with top_k 50 and
top_p 0.9, with neither; on logits of deviation 3 (a nucleus of hundreds of tokens) and, `flat`, of 1 (more
than half of the vocabulary).  `scores`: log-probabilities of the sampled token and of 5 alternatives.
Calls are captured in chains under one CUDA graph, which take turns; a step's logits are in L2 when it samples
them, as far as they fit, so a chain goes over two sets of logits only.

`--tune` times the candidate grids instead; `--kernels` prints the time of each kernel.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu_graphs import RUN_MS, captured, race
from benchmarks.record import Row, write_record
from ostinato.ops import sample, token_scores
from ostinato.runtime.messages import SamplingParams
from ostinato.runtime.sampling.device_sampler import DeviceSampler, ScoredRow

CHAIN = 10  # calls of ours in one graph; a sort takes long enough alone
REPLAYS = {1: 20, 32: 4}  # of a graph in one sample, by rows
KINDS: dict[str, tuple[float, SamplingParams]] = {
    "greedy": (3.0, SamplingParams(temperature=0)),
    "plain": (3.0, SamplingParams()),
    "top_p": (3.0, SamplingParams(top_p=0.9)),
    "top_k_p": (3.0, SamplingParams(top_k=50, top_p=0.9)),
    "flat_top_p": (1.0, SamplingParams(top_p=0.9)),
    "mixed": (3.0, SamplingParams(top_p=0.9)),  # one row in eight; the others are greedy
}


class Case:
    """R rows that are sampled alike, and where the results go."""

    def __init__(self, kind: str, num_rows: int, vocab: int) -> None:
        spread, params = KINDS[kind]
        self.kind, self.vocab = kind, vocab
        self.logits = [(torch.randn(num_rows, vocab, device="cuda") * spread).bfloat16() for _ in range(2)]
        self.sampler = DeviceSampler(vocab, frozenset(), num_rows, torch.device("cuda"))
        greedy = KINDS["greedy"][1]
        slots = [
            self.sampler.open(f"r{row}", greedy if kind == "mixed" and row % 8 else params, row, ())
            for row in range(num_rows)
        ]
        chosen = self.sampler.choose(num_rows, range(num_rows), slots)
        words = np.empty(self.sampler.staged_words(num_rows), np.int64)
        self.sampler.stage(words, chosen, [0] * num_rows)
        self.rows = torch.from_numpy(words).cuda()
        self.last_tokens, self.tokens = torch.zeros(2, num_rows, dtype=torch.int64, device="cuda")
        self.status = torch.zeros(num_rows, dtype=torch.int32, device="cuda")
        self.uniforms = torch.rand(num_rows, 1, device="cuda")

    def ours(self, config: sample.Config | None = None) -> None:
        for turn in range(CHAIN):
            results = self.last_tokens, self.tokens, self.status
            sample.launch(self.logits[turn % 2], self.rows, self.vocab, *results, config=config)

    def theirs(self) -> None:
        params = KINDS[self.kind][1]
        if self.kind == "greedy":
            for turn in range(CHAIN):
                self.logits[turn % 2].argmax(-1)
        elif self.kind == "mixed":
            self.logits[0].argmax(-1)
            draw_by_sorting(self.logits[0][::8], params, self.uniforms[::8])
        else:
            draw_by_sorting(self.logits[0], params, self.uniforms)

    def check(self) -> None:
        """Raise RuntimeError for tokens that such a row cannot give."""
        self.ours()
        best = self.logits[1].float().amax(-1)
        chosen = self.logits[1].float().gather(1, self.tokens[:, None])[:, 0]
        wrong = {
            "a row was not sampled": self.status.any(),
            "a greedy row did not take its best token": self.kind == "greedy" and (chosen != best).any(),
            "a token was drawn that has no share": (best - chosen >= 31).any(),
        }
        if said := [what for what, is_wrong in wrong.items() if is_wrong]:
            raise RuntimeError(f"{self.kind}, {len(best)} rows of {self.vocab}: {', '.join(said)}")


def draw_by_sorting(logits_RV: Tensor, params: SamplingParams, uniforms_R1: Tensor) -> Tensor:
    """What one writes with torch: sort, softmax, cumulative sum, mask, draw."""
    values_RV, ids_RV = logits_RV.float().sort(-1, descending=True)
    probs_RV = (values_RV / params.temperature).softmax(-1)
    if params.top_k:
        probs_RV[:, params.top_k :] = 0
    sums_RV = probs_RV.cumsum(-1)
    if params.top_p < 1:
        probs_RV.masked_fill_(sums_RV - probs_RV > params.top_p * sums_RV[:, -1:], 0)
        sums_RV = probs_RV.cumsum(-1)
    return ids_RV.gather(1, torch.searchsorted(sums_RV, uniforms_R1 * sums_RV[:, -1:], right=True))


def per_call(
    graphs: list[torch.cuda.CUDAGraph], calls: list[int], num_rows: int, rounds: int
) -> list[list[float]]:
    """Milliseconds of a call, of which each graph has `calls`."""
    num_bytes = round(RUN_MS * 4e9 / REPLAYS.get(num_rows, 2))  # what `race` makes that many replays of
    samples = race(graphs, num_bytes, rounds)
    return [[ms / count for ms in times] for times, count in zip(samples, calls, strict=True)]


def score_row(case: Case, num_rows: int, rounds: int) -> Row:
    """Not captured in service; here it is, without the copies between host and device."""
    asked = [ScoredRow(row, None, 5) for row in range(num_rows)]
    question = torch.tensor([[r.place for r in asked], [-1] * num_rows, [5] * num_rows], device="cuda")

    def run(score: Callable[..., Tensor]) -> Callable[[], None]:
        def calls() -> None:
            for turn in range(CHAIN):
                score(case.logits[turn % 2], case.tokens, question, case.vocab, 5)

        return calls

    graphs = [captured(run(token_scores._launch)), captured(run(scores_by_topk))]
    ours, theirs = per_call(graphs, [CHAIN, CHAIN], num_rows, rounds)
    metric = f"sample_scores_r{num_rows}_v{case.vocab}_ms"
    return Row.of(metric, ours, "ms", statistics.median(theirs), "torch log_softmax and topk")


def scores_by_topk(logits_RV: Tensor, tokens_R: Tensor, asked: Tensor, vocab: int, most: int) -> Tensor:
    logprobs_RV = logits_RV.float().log_softmax(-1)
    chosen_R1 = logprobs_RV.gather(1, tokens_R[:, None])
    rank_R1 = (logprobs_RV > chosen_R1).sum(1, keepdim=True)
    return torch.cat([rank_R1, logprobs_RV.topk(most).indices], 1)


def measured(num_rows: int, vocab: int, rounds: int) -> list[Row]:
    made, num_bytes = [], num_rows * vocab * 2
    for kind in KINDS:
        case = Case(kind, num_rows, vocab)
        case.check()
        graphs = [captured(case.ours), captured(case.theirs)]
        samples = per_call(graphs, [CHAIN, CHAIN if kind == "greedy" else 1], num_rows, rounds)
        what = "torch.argmax" if kind == "greedy" else "torch, by sorting"
        metric = f"sample_{kind}_r{num_rows}_v{vocab}"
        made.append(Row.of(f"{metric}_ms", samples[0], "ms", statistics.median(samples[1]), what))
        if kind == "greedy":
            speeds = [num_bytes / ms / 1e9 for ms in samples[0]]
            made.append(Row.of(f"{metric}_tb_s", speeds, "TB/s", None, "logits read once"))
    made.append(score_row(case, num_rows, rounds))
    return made


def tune(num_rows: int, vocab: int, rounds: int) -> None:
    for kind in ("greedy", "top_p", "flat_top_p"):
        case = Case(kind, num_rows, vocab)
        graphs = [captured(lambda: case.ours(config)) for config in sample.CANDIDATES]  # noqa: B023  # called at once
        times = per_call(graphs, [CHAIN] * len(graphs), num_rows, rounds)
        for config, ms in zip(sample.CANDIDATES, times, strict=True):
            print(f"{kind:12} r{num_rows:<4} v{vocab:<7} {statistics.median(ms) * 1e3:9.2f} us  {config}")


def print_kernels(num_rows: int, vocab: int) -> None:
    for kind in KINDS:
        case = Case(kind, num_rows, vocab)
        case.ours()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            case.ours()
            torch.cuda.synchronize()
        for event in profile.key_averages():
            each = event.device_time_total / max(event.count, 1)
            print(f"{kind:12} r{num_rows:<4} v{vocab:<7} {each:9.2f} us  {event.key[:60]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vocabs", type=int, nargs="+", default=[128256, 49152])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--kernels", action="store_true")
    arguments = parser.parse_args()
    made: list[Row] = []
    with torch.inference_mode():
        for vocab in arguments.vocabs:
            for num_rows in arguments.rows:
                if arguments.tune:
                    tune(num_rows, vocab, arguments.rounds)
                elif arguments.kernels:
                    print_kernels(num_rows, vocab)
                else:
                    made += measured(num_rows, vocab, arguments.rounds)
    if made:
        write_record("gpu_sampling", made)


if __name__ == "__main__":
    main()
