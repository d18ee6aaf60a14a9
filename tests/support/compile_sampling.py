"""Compile the sampling kernels for sm_90, without a GPU: python -m tests.support.compile_sampling

The launchers run on CPU tensors with kernels that write down their arguments instead of running.  Prints a
line per kernel: name, size of the cubin in bytes.
"""

from typing import Any

import torch

from ostinato.ops import sample, token_scores
from ostinato.ops.launch import triton_function
from ostinato.ops.sample_rows import WORDS
from ostinato.ops.triton_kernels import OPTIONS, TritonKernel, compile_kernel
from tests.support.dependent_launch import broken_waits

KERNELS = (
    (sample, "_best_kernel"),
    (sample, "bins_kernel"),
    (sample, "collect_kernel"),
    (sample, "_finish_kernel"),
    (token_scores, "_kernel"),
    (token_scores, "_combine"),
)


class Recorder:
    """Stands for a kernel: a launch compiles the variant that a GPU would run."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel

    def __getitem__(self, grid: Any) -> Any:
        return self._compile

    def _compile(self, *args: Any, **kwargs: Any) -> None:
        function = triton_function(self._kernel)
        names = function.arg_names
        kernel = TritonKernel(function.fn, [], (), lambda: function)
        values = dict(zip(names, args, strict=False)) | kwargs
        if "PDL" in values:
            values["PDL"] = kwargs["launch_pdl"] = True
        kinds = [kernel._kind(name, values[name]) for name in names]
        compiled, _ = compile_kernel(function, names, kinds, [kwargs.get(o) for o in OPTIONS], 90)
        if "PDL" in values and (found := broken_waits(compiled.asm["ptx"])):
            raise SystemExit(f"{function.fn}: before the kernel ahead has ended: {'; '.join(found)}")
        print(f"{function.fn.__module__}.{function.fn.__name__}", len(compiled.asm["cubin"]), flush=True)


if __name__ == "__main__":
    for module, name in KERNELS:
        setattr(module, name, Recorder(getattr(module, name)))
    logits = torch.zeros(1, 2048, dtype=torch.bfloat16)
    token, status = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int32)
    rows = torch.zeros(WORDS, dtype=torch.int64)
    sample.launch(logits, rows, 2048, token, token, status)
    token_scores._launch(logits, token, torch.zeros(3, 1, dtype=torch.int64), 2048, 2)
