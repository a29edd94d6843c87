"""`LowBitLinear`: a linear layer whose weight is stored in 2, 3, 4 or 8 bits."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fastinfer import ops
from fastinfer.nn._linear import is_plain_linear
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


class LowBitLinear(nn.Module):
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
    in `fastinfer.ops.Outliers`, and `bias` [N], fp32. Results are NaN until they are loaded.

    The dtypes of buffers never change: `half()`, `bfloat16()`, `to(dtype)` and the like move the
    module at most, and a state_dict whose scales would have to be rounded is refused. x may be of
    any dtype whatever theirs are, so nothing is gained by rounding them; and bias is fp32 because
    this is what the product takes beside an x of every dtype.
    """

    qweight: Tensor
    scales: Tensor
    zeros: Tensor | None
    perm: Tensor | None
    outlier_offsets: Tensor | None
    outlier_columns: Tensor | None
    outlier_values: Tensor | None
    bias: Tensor | None

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
        check(op, k >= 1, f"in_features: expected at least 1, got {k}")
        check(op, n >= 1, f"out_features: expected at least 1, got {n}")
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
        if not is_plain_linear(linear):
            raise TypeError(
                f"{cls.__name__}.from_linear: expected a torch.nn.Linear, got {type(linear)}"
            )
        options: dict[str, Any] = {"symmetric": symmetric, "scale_dtype": scale_dtype}
        quantize = quantize_weight
        if outliers != 0:
            quantize = functools.partial(quantize_weight_with_outliers, fraction=outliers)
        bits = bits if bits is not None else cls._only_bits or 4
        weight = quantize(linear.weight.detach(), bits, group_size, **options)
        return cls.from_packed(weight, None if linear.bias is None else linear.bias.clone())

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
        self.out_features, self.in_features = weight.shape
        self.bits, self.group_size = weight.bits, weight.group_size
        if bias is not None:
            check(
                op,
                bias.is_floating_point() and bias.shape == weight.shape[:1],
                f"bias: expected floats of shape {weight.shape[:1]}, got {bias.dtype} "
                f"{tuple(bias.shape)}",
            )
            device = weight.qweight.device
            check(op, bias.device == device, f"bias: expected on {device}, got {bias.device}")
            bias = bias.detach().float().contiguous()
        self.register_buffer("qweight", _aligned(weight.qweight))
        # Contiguous already, unless they came as a transposed view, which PackedWeight allows.
        self.register_buffer("scales", weight.scales.contiguous())
        self.register_buffer("zeros", None if weight.zeros is None else weight.zeros.contiguous())
        self.register_buffer("perm", None if weight.perm is None else weight.perm.contiguous())
        outliers = weight.outliers
        for name in ("offsets", "columns", "values"):
            part = None if outliers is None else getattr(outliers, name)
            self.register_buffer(f"outlier_{name}", part)
        self.register_buffer("bias", bias)

    def forward(self, x: Tensor) -> Tensor:
        """y [..., N] in x's dtype.

        Args:
            x: [..., K], fp32, bf16 or fp16. Rows a constant distance apart, each dense, are read
                where they are (a part of a fused projection); others are copied first.

        Raises:
            NotImplementedError: x requires grad, outside of `torch.no_grad()`.
            ValueError: another width, dtype or device.
        """
        if not x.dim() or x.shape[-1] != self.in_features:
            raise ValueError(
                f"{type(self).__name__}: x: expected shape [..., {self.in_features}], "
                f"got {tuple(x.shape)}"
            )
        rows = x if x.dim() == 2 else x.reshape(-1, self.in_features)
        if rows.stride(1) != 1:
            rows = rows.contiguous()
        y = _GEMM[self.bits](
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
        return y if x.dim() == 2 else y.view(*x.shape[:-1], self.out_features)

    def packed_weight(self) -> PackedWeight:
        """The weight, sharing this module's buffers; `.dequantize()` is the matrix it stands for.

        Raises:
            ValueError: buffers do not fit together, which only assigning them can bring about.
        """
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

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> LowBitLinear:
        """What `to`, `cuda`, `half` … come down to: only the device may change."""

        def move(buffer: Tensor) -> Tensor:
            moved = fn(buffer)
            return moved if moved.dtype == buffer.dtype else buffer.to(moved.device)

        super()._apply(move, recurse)  # type: ignore[no-untyped-call]
        return self

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        given = {
            name: state_dict[prefix + name]
            for name, _ in self.named_buffers(recurse=False)
            if isinstance(state_dict.get(prefix + name), Tensor)
        }
        rounded = [
            f"{prefix}{name}: expected {buffer.dtype}, or a dtype that it holds, got "
            f"{given[name].dtype}"
            for name, buffer in self.named_buffers(recurse=False)
            if name in given
            and torch.promote_types(given[name].dtype, buffer.dtype) != buffer.dtype
        ]
        error_msgs.extend(rounded)
        if rounded:
            return
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        # With assign=True the buffers are the tensors given, whatever these are.
        self.qweight = _aligned(self.qweight)
        if self.bias is not None:
            self.bias = self.bias.float()
        if len(given) == len(list(self.named_buffers(recurse=False))) and not error_msgs:
            try:
                self.packed_weight()
            except ValueError as error:
                error_msgs.append(f"{prefix.removesuffix('.')}: {error}")


class Int4Linear(LowBitLinear):
    """`LowBitLinear` of 4 bits: W4A16, or A32 with activations in fp32."""

    _only_bits = 4

    def __init__(
        self, in_features: int, out_features: int, group_size: int = 128, **options: Any
    ) -> None:
        super().__init__(in_features, out_features, 4, group_size, **options)


class Int8Linear(LowBitLinear):
    """`LowBitLinear` of 8 bits: weight-only (W8A16), for now; activations are not quantized."""

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
