"""What a GPU runs of a model that embeds is torch's own kernels; on a CPU they give the same numbers."""

from pathlib import Path

import pytest
import torch

from ostinato.graph.config import GraphConfig
from ostinato.ops import varlen_attention
from ostinato.runtime.artifact import Target
from ostinato.runtime.gpu import pool_target
from ostinato.runtime.gpu.gpu_model import torch_ops
from ostinato.runtime.pooling.pool_inputs import pool_inputs
from ostinato.runtime.program import bind, lower
from tests.support.pool_captured import Captured
from tests.support.tiny_encoders import hidden_states, make_encoder

FUSED = ("rms_norm", "add_rms_norm", "silu_mul", "gelu_tanh_mul", "rope_table")  # by passes that any plan has


def test_a_program_over_torchs_kernels_gives_transformers_vectors(tmp_path: Path):
    model = make_encoder("qwen3", tmp_path, num_hidden_layers=1)
    captured = Captured(tmp_path, GraphConfig(pooling="mean"))
    graph = captured.graph.graph_module
    weights = {n.name: n for n in graph.graph.nodes if n.op == "placeholder" and n.meta["role"] == "weight"}
    program = lower(graph, {name: name for name in weights})
    ours = {step.op.split(".")[1] for step in program.steps if step.op.startswith("ostinato.")}
    assert ours == {"varlen_attention", "mean_rows"}
    native = torch_ops()
    assert {f"ostinato::{name}" for name in (*ours, *FUSED)} <= native.keys()
    assert native["ostinato::varlen_attention"] is varlen_attention._launch
    tensors = {name: captured.weight(node) for name, node in weights.items() if node.users}
    run = bind(program, tensors, native=native, device=torch.device("cpu"))
    sequences = [[5, 6, 7, 8], [9], [10, 11]]
    truth = torch.stack([hidden_states(model, ids).mean(0) for ids in sequences])
    assert (run(pool_inputs(sequences, [], "mean"), ()) - truth).abs().max() < 1e-5


def test_its_artifacts_are_for_gpus_of_a_kind_however_large(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    here = Target(device="cuda", machine="x86_64", features=("sm_90", "132 multiprocessors"))
    monkeypatch.setattr(pool_target, "this_target", lambda device: here)
    target, compiler = pool_target.GpuPoolTarget(tmp_path, torch.device("cuda")).described()
    assert (target.device, target.machine, target.features, compiler) == (
        "cuda",
        "x86_64",
        ("sm_90",),
        "none",
    )
