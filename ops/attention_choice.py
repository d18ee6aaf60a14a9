"""Which kernels attend in a step on a GPU, as measured when the model was compiled: a table by class of step.

Ways: our Triton kernels, our CUDA prefill (wgmma_prefill), FlashAttention-3 (fa3_attention). The table lies
in the artifact; a class that it does not have gets what paged_attention's own rule says. Steps of few tokens
are in no class: there is one way for them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from torch import Tensor

from ostinato.errors import ArtifactError
from ostinato.ops import fa3_attention, wgmma_prefill

FILE = "attention.json"
OPS = ("paged_attention", "rope_attention")  # those that take choices
Way = Literal["triton", "wgmma", "fa3"]
WAYS: tuple[Way, ...] = ("triton", "wgmma", "fa3")

# Tokens that are measured; a step between two is served by the next, one above the last by the last.
PREFILL = (512, 2048, 8192)
DECODE = (64, 128, 256)
FEWEST_PREFILL = wgmma_prefill.MIN_TOKENS
FEWEST_DECODE = 33  # fewer are one launch with the rope


class Attention(NamedTuple):
    """What the layers of a model differ in."""

    heads: int
    kv_heads: int
    k_size: int
    v_size: int
    block_tokens: int
    dtype: str
    window: int
    softcap: float
    has_sinks: bool


class StepClass(NamedTuple):
    """Steps that are served alike: a lone prompt, several sequences, or one token for each sequence."""

    attention: Attention
    kind: Literal["lone", "mixed", "decode"]
    tokens: int


Choices = Mapping[StepClass, Way]


class Asked(dict[StepClass, Way]):
    """Choices that can be made while they are in use, and what was asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.attentions: set[Attention] = set()

    def get(self, key: StepClass, default: Any = None) -> Any:
        self.attentions.add(key.attention)
        return super().get(key, default)


class Measured(NamedTuple):
    """A class, what each way took, in microseconds, and which was chosen."""

    step: StepClass
    way: Way
    us: dict[Way, float]


def chosen(
    choices: Choices | None,
    q_THD: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    num_seqs: int,
    window: int,
    softcap: float,
    sinks_H: Tensor | None,
) -> Way | None:
    """The way that a step goes; None: by the rule."""
    if choices is None:
        return None
    num_tokens = q_THD.shape[0]
    kind: Literal["lone", "mixed", "decode"]
    kind = "decode" if num_tokens <= num_seqs else "lone" if num_seqs == 1 else "mixed"
    fewest, classes = (FEWEST_DECODE, DECODE) if kind == "decode" else (FEWEST_PREFILL, PREFILL)
    if num_tokens < fewest:
        return None
    most = next((tokens for tokens in classes if tokens >= num_tokens), classes[-1])
    return choices.get(
        StepClass(attention(q_THD, k_cache, v_cache, window, softcap, sinks_H is not None), kind, most)
    )


def attention(
    q_THD: Tensor, k_cache: Tensor, v_cache: Tensor, window: int, softcap: float, has_sinks: bool
) -> Attention:
    """Of operands of paged_attention."""
    _, block_tokens, kv_heads, k_size = k_cache.shape
    dtype = str(q_THD.dtype).removeprefix("torch.")
    return Attention(
        q_THD.shape[1],
        kv_heads,
        k_size,
        v_cache.shape[3],
        block_tokens,
        dtype,
        window,
        float(softcap),
        has_sinks,
    )


def write(folder: Path, measured: Sequence[Measured]) -> None:
    """Put the choices into an artifact, with the version of the library if one of them needs it."""
    rows = [
        {**one.step.attention._asdict(), "kind": one.step.kind, "tokens": one.step.tokens}
        | {"way": one.way, "us": one.us}
        for one in measured
    ]
    needs = any(one.way == "fa3" for one in measured)
    told = {"fa3": fa3_attention.installed_version() if needs else "", "choices": rows}
    (folder / FILE).write_text(json.dumps(told, indent=1) + "\n")


def read(folder: Path) -> Choices:
    """The choices of an artifact that has a table. A choice of the library loads it.

    Raises ArtifactError: the table cannot be read, or the library is not here in the version that was
    measured.
    """
    path = folder / FILE
    try:
        told = json.loads(path.read_text())
        choices = {_step(row): _way(row["way"]) for row in told["choices"]}
        version = str(told["fa3"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ArtifactError(f"{path}: {error!r}; compile the model again") from None
    if "fa3" in choices.values():
        _need_library(folder, version)
    return choices


def _step(row: Mapping[str, Any]) -> StepClass:
    return StepClass(Attention(*[row[name] for name in Attention._fields]), row["kind"], row["tokens"])


def _way(name: str) -> Way:
    if name not in WAYS:
        raise ValueError(f"way {name!r} is none of {', '.join(WAYS)}")
    return name


def _need_library(folder: Path, version: str) -> None:
    package, here = fa3_attention.PACKAGE, fa3_attention.installed_version()
    if here != version:
        found = f"{here} is installed" if here else "is not installed"
        raise ArtifactError(
            f"{folder}: attention runs by {package} {version}, which was fastest when it was compiled, and "
            f"{package} {found}; pip install {package}=={version}, or compile the model again"
        )
    if (reason := fa3_attention.unavailable_reason()) is not None:
        raise ArtifactError(f"{folder}: attention runs by {package}, and {reason}; compile the model again")
