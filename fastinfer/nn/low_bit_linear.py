"""`LowBitLinear`: a linear layer whose weight is stored in 2, 3, 4 or 8 bits."""

from __future__ import annotations

import functools
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fastinfer import ops
from fastinfer.nn._linear import QuantizedLinear, check_features, plain_weight
from fastinfer.ops._common import check
from fastinfer.ops._outliers import Outliers
from fastinfer.ops.packed_weights import (
    BITS,
    SCALE_DTYPES,
    PackedWeight,
    checked_group_size,
    packed_shape,
    quantize_weight,
    quantize_weight_with_outliers,
)

# The wrappers hold the handles of their ops. They, and not the ops themselves, refuse gradients and
# let torch allocate the result, so that running out of memory is torch's own error.
_GEMM = {2: ops.int2_gemm, 3: ops.int3_gemm, 4: ops.int4_gemm, 8: ops.int8_gemm}
_ALIGNMENT = 16  # bytes, of qweight


class LowBitLinear(QuantizedLinear):
    """y = x W^T + bias with a weight of low-bit codes; activations stay floats ("weight-only").

        W[n, k] = scales[g, n] * (q[n, k] - zeros[g, n]),   g = k // group_size

    Args:
        in_features: K.
        out_features: N.
        bits: 2, 3, 4 or 8.
        group_size: input features that share a scale: 16, 32, 64, 128, or K or -1 for all of them.
            The last group may be partial.
        bias: whether there is one.
        zeros: whether there are zero points; without, they are 2^(bits - 1).
        perm: whether columns are in an order of their own (act-order).
        scale_dtype: fp16, bf16 or fp32; of scales and zeros.
        outliers: how many weights stand beside the codes, in fp32; None: there is no place for any.
        device: where the buffers are.

    Raises:
        ValueError: an argument is not as above. No size or group is refused at the first request.

    Buffers, all in the state_dict, None where there are none: `qweight`, `scales`, `zeros`, `perm`
    as in `fastinfer.ops.PackedWeight`, `outlier_offsets`, `outlier_columns` and `outlier_values` as
    in `fastinfer.ops.Outliers`, and `bias` [N], fp32. Their dtypes never change, and results are
    NaN until they are loaded: see `QuantizedLinear`.
    """

    qweight: Tensor
    scales: Tensor
    zeros: Tensor | None
    perm: Tensor | None
    outlier_offsets: Tensor | None
    outlier_columns: Tensor | None
    outlier_values: Tensor | None

    _only_bits: ClassVar[int | None] = None  # of a subclass that has no others

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bits: int,
        group_size: int = 128,
        *,
        bias: bool = True,
        zeros: bool = True,
        perm: bool = False,
        scale_dtype: torch.dtype = torch.float32,
        outliers: int | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        op, n, k = type(self).__name__, out_features, in_features
        check_features(op, k, n)
        check(op, bits in BITS, f"bits: expected one of {BITS}, got {bits}")
        group_size = checked_group_size(op, group_size, k)
        check(
            op,
            scale_dtype in SCALE_DTYPES,
            f"scale_dtype: expected one of {SCALE_DTYPES}, got {scale_dtype}",
        )
        enough = outliers is None or outliers >= 0
        check(op, enough, f"outliers: expected None or at least 0, got {outliers}")
        qweight = torch.zeros(packed_shape(n, k, bits), dtype=torch.int32, device=device)
        scales = torch.full((-(-k // group_size), n), torch.nan, dtype=scale_dtype, device=device)
        order = torch.arange(k, dtype=torch.int32, device=device) if perm else None
        self._hold(
            PackedWeight(
                qweight,
                scales,
                torch.zeros_like(scales) if zeros else None,
                order,
                bits,
                group_size,
                (n, k),
                None if outliers is None else _unknown_outliers(n, outliers, device),
            ),
            torch.zeros(n, device=device, dtype=torch.float32) if bias else None,
        )

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        *,
        bits: int | None = None,
        group_size: int = 128,
        symmetric: bool = False,
        scale_dtype: torch.dtype | None = None,
        outliers: float = 0.0,
    ) -> LowBitLinear:
        """The layer with its weight rounded to nearest; see `fastinfer.ops.quantize_weight`.

        Args:
            linear: a `torch.nn.Linear` (a subclass with a forward of its own is refused).
            bits: None: those of the class, or 4.
            group_size, symmetric, scale_dtype: as in `quantize_weight`. The default dtype of
                scales, that of the weight, is best for 2 to 4 bits; with 8, bf16 scales cost up to
                half a step at the ends of a group's range, and fp32 ones nothing.

        Raises:
            TypeError: not a plain linear layer.
            ValueError: as `quantize_weight`, for instance for a weight with NaN.
        """
        matrix, bias = plain_weight(cls.__name__, linear)
        options: dict[str, Any] = {"symmetric": symmetric, "scale_dtype": scale_dtype}
        quantize = quantize_weight
        if outliers != 0:
            quantize = functools.partial(quantize_weight_with_outliers, fraction=outliers)
        bits = bits if bits is not None else cls._only_bits or 4
        weight = quantize(matrix, bits, group_size, **options)
        return cls.from_packed(weight, bias)

    @classmethod
    def from_packed(cls, weight: PackedWeight, bias: Tensor | None = None) -> LowBitLinear:
        """A layer around a packed weight, whose tensors it shares.

        Args:
            weight: whatever made it: `fastinfer.ops.quantize_weight`, or the repacking of a
                checkpoint's.
            bias: [N], a float dtype; kept in fp32.

        Raises:
            ValueError: bias does not fit, or the class is for another number of bits.
        """
        module = cls.__new__(cls)
        nn.Module.__init__(module)
        module._hold(weight, bias)
        return module

    def _hold(self, weight: PackedWeight, bias: Tensor | None) -> None:
        op, bits = type(self).__name__, self._only_bits
        fits = bits in (None, weight.bits)
        check(op, fits, f"bits: expected {bits}, got {weight.bits}")
        self.bits, self.group_size = weight.bits, weight.group_size
        # Contiguous already, unless they came as a transposed view, which PackedWeight allows.
        outliers = weight.outliers
        buffers = {
            "qweight": _aligned(weight.qweight),
            "scales": weight.scales.contiguous(),
            "zeros": None if weight.zeros is None else weight.zeros.contiguous(),
            "perm": None if weight.perm is None else weight.perm.contiguous(),
            "outlier_offsets": None if outliers is None else outliers.offsets,
            "outlier_columns": None if outliers is None else outliers.columns,
            "outlier_values": None if outliers is None else outliers.values,
        }
        self._register(weight.shape, buffers, bias)

    def _product(self, rows: Tensor) -> Tensor:
        return _GEMM[self.bits](
            rows,
            self.qweight,
            self.scales,
            self.zeros,
            group_size=self.group_size,
            perm=self.perm,
            bias=self.bias,
            outlier_offsets=self.outlier_offsets,
            outlier_columns=self.outlier_columns,
            outlier_values=self.outlier_values,
        )

    def packed_weight(self) -> PackedWeight:
        """The weight, sharing this module's buffers; `.dequantize()` is the matrix it stands for.

        Raises:
            ValueError: buffers do not fit together, which only assigning them can bring about; or
                only some were loaded.
        """
        self._check_whole()
        outliers = None
        if (
            self.outlier_offsets is not None
            and self.outlier_columns is not None
            and self.outlier_values is not None
        ):
            outliers = Outliers(self.outlier_offsets, self.outlier_columns, self.outlier_values)
        return PackedWeight(
            self.qweight,
            self.scales,
            self.zeros,
            self.perm,
            self.bits,
            self.group_size,
            (self.out_features, self.in_features),
            outliers,
        )

    def extra_repr(self) -> str:
        """What sets this layer apart, for print()."""
        values = self.outlier_values
        outliers = "" if values is None else f", outliers={len(values)}"
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bits={self.bits}, "
            f"group_size={self.group_size}, bias={self.bias is not None}, "
            f"zeros={self.zeros is not None}, perm={self.perm is not None}, "
            f"scale_dtype={self.scales.dtype}{outliers}"
        )

    def _adopt(self) -> None:
        super()._adopt()
        self.qweight = _aligned(self.qweight)

    def _check_buffers(self) -> None:
        self.packed_weight()


class Int4Linear(LowBitLinear):
    """`LowBitLinear` of 4 bits: W4A16, or A32 with activations in fp32."""

    _only_bits = 4

    def __init__(
        self, in_features: int, out_features: int, group_size: int = 128, **options: Any
    ) -> None:
        super().__init__(in_features, out_features, 4, group_size, **options)


class Int8Linear(LowBitLinear):
    """`LowBitLinear` of 8 bits: weight-only (W8A16). `Int8W8A8Linear` quantizes activations too."""

    _only_bits = 8

    def __init__(
        self, in_features: int, out_features: int, group_size: int = 128, **options: Any
    ) -> None:
        super().__init__(in_features, out_features, 8, group_size, **options)


def _unknown_outliers(n: int, count: int, device: torch.device | str | None) -> Outliers:
    """Places for so many of n features, until they are loaded all of the last one."""
    offsets = torch.zeros(n + 1, dtype=torch.int32, device=device)
    offsets[n] = count
    columns = torch.zeros(count, dtype=torch.int32, device=device)
    return Outliers(offsets, columns, torch.full((count,), torch.nan, device=device))


def _aligned(qweight: Tensor) -> Tensor:
    """A copy where it must be one: a view into a file or a larger tensor may lie at any address."""
    if qweight.is_contiguous() and (qweight.is_meta or qweight.data_ptr() % _ALIGNMENT == 0):
        return qweight
    return qweight.clone(memory_format=torch.contiguous_format)
