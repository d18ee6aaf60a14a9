"""The one numeric assert of kernel tests: an error budget against float64."""

import torch
from torch import Tensor


def assert_within_budget(ours: Tensor, truth: Tensor, plain: Tensor) -> None:
    """`ours` is finite and errs at most twice as much as `plain` plus one rounding of the largest value.

    `truth` is the reference in float64, `plain` the reference in the tested type; all on any device.
    """
    assert ours.shape == truth.shape == plain.shape, (ours.shape, truth.shape, plain.shape)
    assert ours.dtype == plain.dtype, (ours.dtype, plain.dtype)
    assert truth.dtype == torch.float64, truth.dtype
    if ours.numel() == 0:
        return
    assert bool(torch.isfinite(ours).all()), "not finite"
    truth = truth.cpu()
    error = (ours.cpu().double() - truth).abs().max().item()
    plain_error = (plain.cpu().double() - truth).abs().max().item()
    budget = 2 * (plain_error + torch.finfo(ours.dtype).eps * truth.abs().max().item())
    assert error <= budget, (
        f"error {error:.3g} is over the budget {budget:.3g} (plain error {plain_error:.3g})"
    )
