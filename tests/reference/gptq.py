"""GPTQ by its definition, in float64: a least-squares problem is solved after every column."""

import torch
from torch import Tensor


def grid(columns: Tensor, bits: int, symmetric: bool) -> tuple[Tensor, Tensor]:
    """Scale (rounded to fp32) and zero point [N] of weights [N, size] in one group."""
    top = 2**bits - 1
    low, high = columns.amin(1).clamp(max=0), columns.amax(1).clamp(min=0)
    span = 2 * torch.maximum(-low, high) if symmetric else high - low
    scale = (span / top).float().double()
    scale[scale == 0] = 1.0
    zero = torch.full_like(scale, 2 ** (bits - 1)) if symmetric else (-low / scale).round()
    return scale, zero


def gptq_reference(
    weight: Tensor,
    hessian: Tensor,
    columns: list[int],
    groups: list[list[int]],
    bits: int,
    symmetric: bool,
    static: bool,
) -> Tensor:
    """The dequantized weight [N, K].

    Args:
        weight: [N, K].
        hessian: [K, K], positive definite.
        columns: all of them, in the order in which they are rounded.
        groups: the columns of each group.
        bits, symmetric: of the grid.
        static: ranges are those of the weights given, and not those when a group is reached.
    """
    weight, h = weight.double(), hessian.double()
    rounded = torch.zeros_like(weight)
    grids = {g: grid(weight[:, of], bits, symmetric) for g, of in enumerate(groups) if static}
    group_of = {column: g for g, of in enumerate(groups) for column in of}
    done: list[int] = []
    for i, column in enumerate(columns):
        left = columns[i:]
        current = weight.clone()
        if done:
            # min over the columns left of tr(D H D^T), with D = current - weight, and D given
            # where columns are rounded: D[left] H[left, left] = -D[done] H[done, left].
            fixed = rounded[:, done] - weight[:, done]
            change = torch.linalg.solve(h[left][:, left], -(fixed @ h[done][:, left]).t()).t()
            current[:, left] += change
        g = group_of[column]
        if g not in grids:
            grids[g] = grid(current[:, groups[g]], bits, symmetric)
        scale, zero = grids[g]
        code = ((current[:, column] / scale).round() + zero).clamp(0, 2**bits - 1)
        rounded[:, column] = scale * (code - zero)
        done.append(column)
    return rounded
