"""Weights that stand beside the codes of a packed weight, in full precision."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fastinfer.ops._common import check, check_devices


@dataclass(frozen=True, eq=False)
class Outliers:
    """A sparse matrix [N, K], by rows (CSR), that is added to what the codes stand for.

    Args:
        offsets: int32 [N + 1], ascending from 0: row n has the entries offsets[n] to
            offsets[n + 1] (without).
        columns: int32 [entries], in [0, K): packed columns, which `perm` orders.
        values: [entries], fp32, bf16 or fp16.
    """

    offsets: Tensor
    columns: Tensor
    values: Tensor

    def check(self, op: str, n: int, k: int, qweight: Tensor) -> None:
        """ValueError unless it fits a weight [n, k]."""
        check_devices(op, qweight=qweight, **self._named())
        entries = self.columns.numel()
        for name, tensor, shape in (
            ("offsets", self.offsets, (n + 1,)),
            ("columns", self.columns, (entries,)),
            ("values", self.values, (entries,)),
        ):
            wanted = (
                (torch.float32, torch.bfloat16, torch.float16)
                if name == "values"
                else (torch.int32,)
            )
            known = tensor.dtype in wanted
            check(op, known, f"outliers.{name}: expected one of {wanted}, got {tensor.dtype}")
            fits = tensor.shape == shape
            check(op, fits, f"outliers.{name}: expected shape {shape}, got {tuple(tensor.shape)}")
            check(op, tensor.is_contiguous(), f"outliers.{name}: expected a contiguous tensor")
        if self.offsets.is_meta:
            return  # it has no entries that could be wrong
        ascending = bool((self.offsets.diff() >= 0).all())
        ends = int(self.offsets[0]), int(self.offsets[-1])
        check(
            op,
            ascending and ends == (0, entries),
            f"outliers.offsets: expected ascending numbers from 0 to {entries}, got "
            f"{'' if ascending else 'descending ones '}from {ends[0]} to {ends[1]}",
        )
        if entries:
            least, greatest = (int(x) for x in self.columns.aminmax())
            check(
                op,
                least >= 0 and greatest < k,
                f"outliers.columns: expected values in [0, {k}), got {least} to {greatest}",
            )

    def to(self, device: torch.device | str) -> Outliers:
        """The same on another device."""
        return Outliers(*(tensor.to(device) for tensor in self._named().values()))

    def add_to(self, rows: Tensor, first: int, perm: Tensor | None) -> None:
        """Adds the entries of the rows from `first` on to `rows`, whose columns are in the order
        before `perm`.
        """
        offsets = self.offsets[first : first + len(rows) + 1].long()
        begin, end = int(offsets[0]), int(offsets[-1])
        index = torch.arange(len(rows), device=rows.device).repeat_interleave(offsets.diff())
        columns = self.columns[begin:end].long()
        if perm is not None:
            columns = perm.long()[columns]
        rows.index_put_((index, columns), self.values[begin:end].to(rows.dtype), accumulate=True)

    def _named(self) -> dict[str, Tensor]:
        return {"offsets": self.offsets, "columns": self.columns, "values": self.values}


def concatenate_outliers(
    parts: Sequence[tuple[int, Outliers | None]], device: torch.device
) -> Outliers | None:
    """Of weights whose rows follow one another.

    Args:
        parts: rows of each weight, and its outliers.
    """
    given = [outliers for _, outliers in parts if outliers is not None]
    if not given:
        return None
    counts = [
        torch.zeros(n, dtype=torch.int32, device=device) if part is None else part.offsets.diff()
        for n, part in parts
    ]
    return Outliers(
        offsets_of(torch.cat(counts)),
        torch.cat([part.columns for part in given]),
        torch.cat([part.values for part in given]),
    )


def offsets_of(counts: Tensor) -> Tensor:
    """int32 [N + 1] of the numbers of entries of N rows."""
    return torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()
