"""Attention by a library that need not be there: what it is asked, what it is not, its kernels on a GPU."""

import sys
from collections.abc import Callable, Iterator
from functools import partial
from importlib import metadata
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from ostinato.ops import fa3_attention, paged_attention
from ostinato.ops.attention_choice import StepClass, Way
from ostinato.ops.paged_attention import paged_attention_reference
from tests.support.budget import assert_within_budget
from tests.support.op_cases import Heads, PagedCase, paged_case
from tests.support.op_routes import assert_graph_replays, on_gpu

STEP = [9, 5, 1, 0, 17, 4], [9, 2, 1, 0, 1, 6]  # lengths, new tokens: the last has two that are not covered


class Always(dict[StepClass, Way]):
    """A table with one way for every step."""

    def __init__(self, way: Way) -> None:
        super().__init__()
        self.way = way

    def get(self, key: StepClass, default: Any = None) -> Any:
        return self.way


class Library:
    """Stands for the library: it fills the rows of sequences, and keeps what it was asked for."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, **asked: Any) -> None:
        self.asked = asked
        starts = asked["cu_seqlens_q"]
        rows = int(starts[-1])
        inputs = q[:rows], k, v, asked["page_table"], asked["seqused_k"], starts
        asked["out"][:rows] = paged_attention_reference(*inputs, asked["softmax_scale"], 0, 0.0)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    stands_in = Library()
    monkeypatch.setattr(fa3_attention, "_forward", lambda: stands_in)
    return stands_in


@pytest.fixture
def uncached() -> Iterator[None]:
    cached = fa3_attention.installed_version, fa3_attention.unavailable_reason
    for function in cached:
        function.cache_clear()
    yield
    for function in cached:
        function.cache_clear()


def launched(case: PagedCase, **changed: Tensor) -> Tensor:
    """Into memory that held NaN."""
    args = case._replace(**changed)[:6]
    out = torch.full((*args[0].shape[:2], args[2].shape[3]), float("nan"), dtype=args[0].dtype)
    out = out.to(args[0].device)
    fa3_attention.launch(*args, out, 0.3)
    return out


@pytest.mark.parametrize("num_padding", [0, 1, 40])
def test_rows_past_the_last_sequence_are_zero_and_the_others_are_the_library_s(
    library: Library, num_padding: int
) -> None:
    case = paged_case(*STEP, Heads(6, 2, 8, 8), num_padding=num_padding)
    ours = launched(case)
    assert torch.equal(ours, paged_attention_reference(*case.args()))
    assert not ours[19:].any()


def test_a_launch_asks_for_causal_attention_over_the_planes_as_they_are(library: Library) -> None:
    case = paged_case(*STEP, Heads(6, 2, 8, 8))
    wide = case.block_tables.long().t().contiguous().t(), case.seq_lens.long(), case.query_start.long()
    launched(case, block_tables=wide[0], seq_lens=wide[1], query_start=wide[2])
    asked = library.asked
    for name, index in zip(("page_table", "seqused_k", "cu_seqlens_q"), case[3:6], strict=True):
        assert torch.equal(asked[name], index)
        assert asked[name].dtype == torch.int32
        assert asked[name].is_contiguous()
    assert (asked["is_causal"], asked["softmax_scale"], asked["num_splits"]) == (True, 0.3, 1)
    assert asked["max_seqlen_q"] == len(case.q)


def test_a_decode_step_never_promises_one_token_per_sequence(library: Library) -> None:
    """With that promise the library drops the mask for some head sizes."""
    launched(paged_case([7, 7, 0], [2, 1, 0], Heads(2, 1, 8, 8)))
    assert library.asked["max_seqlen_q"] == 2


def test_what_it_does_not_take_is_refused_with_the_reason() -> None:
    def why(heads: Heads, block: int = 16, *rest: Any) -> str:
        case = paged_case([3], [3], heads, block_tokens=block, dtype=torch.bfloat16)
        return str(fa3_attention.refusal(*case[:3], *(rest or (0, 0.0, None))))

    usual = Heads(8, 2, 64, 64)
    assert why(usual) == why(Heads(4, 4, 256, 256), 64) == "None"
    for rest in ((128, 0.0, None), (0, 30.0, None), (0, 0.0, torch.zeros(8))):
        assert why(usual, 16, *rest) == "a window, softcap or sinks"
    assert "heads of 64 and 32 values" in why(Heads(8, 2, 64, 32))
    assert "heads of 20 and 20 values" in why(Heads(8, 2, 20, 20))
    assert "heads of 512 and 512 values" in why(Heads(8, 2, 512, 512))
    assert "blocks of 128 tokens" in why(usual, 128)
    case = paged_case([3], [3], usual, block_tokens=16)
    assert fa3_attention.refusal(*case[:3], 0, 0.0, None) == "torch.float32 is neither float16 nor bfloat16"
    _, k, v = (x.bfloat16() for x in case[:3])
    unaligned = torch.zeros(2 * 8 * 64 + 4, dtype=torch.bfloat16)[4:].view(2, 8, 64)
    assert "16 bytes" in str(fa3_attention.refusal(unaligned, k, v, 0, 0.0, None))


def installed(monkeypatch: pytest.MonkeyPatch, load: Callable[[str], object]) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: {"tokenspeed-fa3": "3.1"}[name])
    monkeypatch.setattr(fa3_attention, "capability_here", lambda: 90)
    monkeypatch.setattr(fa3_attention, "import_module", load)


@pytest.mark.usefixtures("uncached")
def test_without_the_package_the_reason_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    assert fa3_attention.installed_version() == ""
    reason = fa3_attention.unavailable_reason()
    assert reason == "tokenspeed-fa3 is not installed; pip install 'ostinato[fa3]'"


@pytest.mark.usefixtures("uncached")
def test_a_library_that_cannot_be_loaded_says_which_versions_did_not_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def load(name: str) -> object:
        raise ImportError("undefined symbol: aoti_torch_abi_version")

    installed(monkeypatch, load)
    reason = str(fa3_attention.unavailable_reason())
    assert reason.startswith(f"tokenspeed-fa3 3.1 cannot be loaded with torch {torch.__version__}")
    assert "undefined symbol" in reason


@pytest.mark.usefixtures("uncached")
def test_it_is_for_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, pytest.fail)
    monkeypatch.setattr(fa3_attention, "capability_here", lambda: 100)
    assert "for compute capability 90, this GPU has 100" in str(fa3_attention.unavailable_reason())


@pytest.mark.usefixtures("uncached", "library")
def test_an_installed_library_is_loaded_when_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[str] = []
    installed(monkeypatch, loaded.append)
    assert (fa3_attention.installed_version(), loaded) == ("3.1", [])
    assert fa3_attention.unavailable_reason() is None
    assert loaded == ["flash_attn_3._C"]
    assert not any(name.startswith("flash_attn") for name in sys.modules)


HEADS = [
    (Heads(32, 8, 128, 128), 16, torch.bfloat16),
    (Heads(9, 3, 64, 64), 32, torch.float16),
    (Heads(4, 4, 80, 80), 64, torch.bfloat16),
    (Heads(8, 4, 256, 256), 64, torch.bfloat16),
    (Heads(16, 2, 192, 192), 16, torch.bfloat16),
]
STEPS = {
    "mixed": ([513, 900, 1, 100, 0, 700, 64, 30], [513, 1, 1, 0, 0, 130, 64, 240]),
    "decode": ([*range(1, 480, 10)], [1] * 48),
    "lone": ([700], [300]),
}


def needs_library() -> None:
    if (reason := fa3_attention.unavailable_reason()) is not None:
        pytest.skip(reason)


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "block_tokens", "dtype"), HEADS)
def test_on_a_gpu_it_matches_float64_within_the_budget(
    heads: Heads, block_tokens: int, dtype: torch.dtype
) -> None:
    needs_library()
    for lengths, new in STEPS.values():
        case = paged_case(lengths, new, heads, block_tokens=block_tokens, num_padding=37, dtype=dtype)
        on_device = case._replace(**{name: on_gpu(getattr(case, name)) for name in case._fields[:6]})
        assert fa3_attention.refusal(*on_device[:3], 0, 0.0, None) is None
        ours = launched(on_device)
        args = on_device.args()
        wide = [arg.double() if isinstance(arg, Tensor) and arg.is_floating_point() else arg for arg in args]
        assert_within_budget(ours, paged_attention_reference(*wide), paged_attention_reference(*args))
        assert not ours[-37:].any()
        assert torch.equal(ours, launched(on_device)), "the same bits again"


@pytest.mark.gpu
def test_on_a_gpu_a_captured_launch_replays_with_other_tables_and_lengths() -> None:
    needs_library()
    chosen: Any = SimpleNamespace(OP=partial(paged_attention._launch, choices=Always("fa3")))
    heads, lengths = Heads(8, 2, 128, 128), [300, 40, 77, 500]
    for new in ([300, 1, 1, 9], [1, 1, 1, 1] * 12):
        many = (lengths * 12)[: len(new)]
        first = paged_case(many, new, heads, block_tokens=16, dtype=torch.bfloat16)
        shorter = [max(length - 20, fresh) for length, fresh in zip(many, new, strict=True)]
        other = paged_case(shorter, new, heads, block_tokens=16, dtype=torch.bfloat16, seed=1)
        planes = [getattr(first, name).clone() for name in ("k_cache", "v_cache")]
        width = first.block_tables.shape[1]
        tables = torch.full_like(first.block_tables, 10**6)
        tables[:, : other.block_tables.shape[1]] = other.block_tables[:, :width]
        for plane, fresh in zip(planes, (other.k_cache, other.v_cache), strict=True):
            plane[: len(fresh)] = fresh
        args = [other.q, *planes, tables, other.seq_lens, other.query_start, 0.3, 0, 0.0]
        assert_graph_replays(chosen, first.args(), args)
