"""`FP8Linear` and `Int8W8A8Linear`: linear layers that quantize their activations as well."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from fastinfer import ops
from fastinfer.nn._linear import QuantizedLinear, check_features, plain_weight
from fastinfer.ops._common import check, check_devices
from fastinfer.ops.packed_weights import check_finite

# What shares a scale of the weight, as (features, inputs); -1 is all.
_BLOCKS = {"channel": (1, -1), "tensor": (-1, -1), "block": (128, 128)}
_X_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

_Layer = TypeVar("_Layer", bound="W8A8Linear")


class W8A8Linear(QuantizedLinear):
    """y = x' W^T + bias of 8-bit codes on both sides: what `FP8Linear` and `Int8W8A8Linear` share.

        W = weight * weight_scale,   x' = x rounded to codes of its own scales

    Args:
        in_features: K.
        out_features: N.
        granularity: what shares a scale of the weight: "channel", an output feature; "tensor", all
            of it; with fp8 also "block", 128 features by 128 inputs, the last ones partial.
        activations: "dynamic": each row of x has a scale of its own, or, with blocks, each 128
            inputs of a row; "static": all of x has the scale `input_scale`; with int8 also
            "asymmetric": each row has a scale and a zero point of its own.
        bias: whether there is one.
        device: where the buffers are.

    Raises:
        ValueError: an argument is not as above. No size is refused at the first request.

    Buffers, all in the state_dict, None where there are none: `weight` [N, K], float8_e4m3fn or
    int8; `weight_scale`, fp32, [N, 1], [1, 1] or [ceil(N / 128), ceil(K / 128)]; `input_scale`,
    fp32 [1, 1]; `bias` [N], fp32. Their dtypes never change, and results are NaN until they are
    loaded: see `QuantizedLinear`.

    An infinity or a NaN in x makes all of its row NaN where scales are dynamic. A static scale
    takes infinities for the largest code, and int8 has no code for NaN: it reads as 0.
    """

    weight: Tensor
    weight_scale: Tensor
    input_scale: Tensor | None

    _apart = ("bias", "input_scale")
    _dtype: ClassVar[torch.dtype]
    _granularities: ClassVar[tuple[str, ...]]
    _activations: ClassVar[tuple[str, ...]]
    _quantize: ClassVar[Callable[..., tuple[Tensor, Tensor]]]

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        granularity: str = "channel",
        activations: str = "dynamic",
        bias: bool = True,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        check_features(type(self).__name__, in_features, out_features)
        shape = (out_features, in_features)
        self._check_kind(granularity, activations)

        def unset(rows: int, columns: int) -> Tensor:
            return torch.full((rows, columns), torch.nan, dtype=torch.float32, device=device)

        self._hold(
            torch.zeros(shape, dtype=self._dtype, device=device),
            unset(*_scale_shape(granularity, shape)),
            unset(1, 1) if activations == "static" else None,
            torch.zeros(out_features, dtype=torch.float32, device=device) if bias else None,
            granularity,
            activations,
        )

    @classmethod
    def from_linear(
        cls: type[_Layer],
        linear: nn.Linear,
        *,
        granularity: str = "channel",
        input_scale: Tensor | float | None = None,
        activations: str | None = None,
    ) -> _Layer:
        """The layer with its weight rounded to nearest, by the largest magnitude of each scale.

        Args:
            linear: a `torch.nn.Linear` (a subclass with a forward of its own is refused).
            granularity: as above.
            input_scale: the static scale of x, a finite number above 0, such as the largest |x|
                that was seen over 448 (fp8) or 127 (int8). None: x gets scales of its own.
            activations: as above; None: "static" with an input_scale, else "dynamic".

        Raises:
            TypeError: not a plain linear layer.
            ValueError: a weight with NaN or infinity, or an argument that is not as above.
        """
        weight, bias = plain_weight(cls.__name__, linear)
        activations = _activations(activations, input_scale)
        cls._check_kind(granularity, activations)
        if weight.dtype not in _X_DTYPES:
            weight = weight.float()
        codes, scale = cls._quantize(_dense_rows(weight), block=_BLOCKS[granularity])
        if not scale.isfinite().all():  # so is a weight of this scale not
            check_finite(cls.__name__, weight)
        if input_scale is not None:
            given = torch.as_tensor(input_scale, dtype=torch.float32)
            input_scale = given.detach().clone().to(weight.device)
        layer = cls._around(codes, scale, input_scale, bias, granularity, activations)
        layer._check_buffers()
        return layer

    @classmethod
    def from_quantized(
        cls: type[_Layer],
        weight: Tensor,
        weight_scale: Tensor,
        bias: Tensor | None = None,
        *,
        input_scale: Tensor | None = None,
        activations: str | None = None,
    ) -> _Layer:
        """A layer around a quantized weight, such as a checkpoint's, whose tensors it shares.

        Args:
            weight: [N, K], float8_e4m3fn or int8, as the class has it.
            weight_scale: floats of a shape above, which says what shares a scale; [N], [1] and []
                are taken for [N, 1] and [1, 1]. Kept in fp32.
            bias: [N], floats; kept in fp32.
            input_scale: the static scale of x: one float above 0. None: x gets scales of its own.
            activations: as above; None: "static" with an input_scale, else "dynamic".

        Raises:
            ValueError: an argument is not as above, or not finite.
        """
        op = cls.__name__
        check_devices(
            op, weight=weight, weight_scale=weight_scale, input_scale=input_scale, bias=bias
        )
        check(
            op,
            weight.dtype == cls._dtype and weight.dim() == 2 and weight.numel() > 0,
            f"weight: expected {cls._dtype} [N, K], got {weight.dtype} {tuple(weight.shape)}",
        )
        weight_scale = _as_grid(op, "weight_scale", weight_scale)
        shapes = {name: _scale_shape(name, tuple(weight.shape)) for name in cls._granularities}
        kinds = [name for name, shape in shapes.items() if weight_scale.shape == shape]
        expected = " or ".join(f"{shape} ({name})" for name, shape in shapes.items())
        got = tuple(weight_scale.shape)
        check(op, len(kinds) > 0, f"weight_scale: expected shape {expected}, got {got}")
        activations = _activations(activations, input_scale)
        cls._check_kind(kinds[0], activations)
        layer = cls._around(weight, weight_scale, input_scale, bias, kinds[0], activations)
        layer._check_buffers()
        return layer

    @classmethod
    def _around(cls: type[_Layer], weight: Tensor, *parts: Any) -> _Layer:
        """A layer of what `_hold` takes; scales may be unset still."""
        layer = cls.__new__(cls)
        nn.Module.__init__(layer)
        layer._hold(weight, *parts)
        return layer

    @classmethod
    def _check_kind(cls, granularity: str, activations: str) -> None:
        for name, value, known in (
            ("granularity", granularity, cls._granularities),
            ("activations", activations, cls._activations),
        ):
            check(cls.__name__, value in known, f"{name}: expected one of {known}, got {value!r}")

    def _hold(
        self,
        weight: Tensor,
        weight_scale: Tensor,
        input_scale: Tensor | None,
        bias: Tensor | None,
        granularity: str,
        activations: str,
    ) -> None:
        op = type(self).__name__
        needed = "an input_scale" if activations == "static" else "no input_scale"
        fits = (input_scale is not None) == (activations == "static")
        check(op, fits, f"input_scale: activations {activations!r} take {needed}")
        self.granularity, self.activations = granularity, activations
        if input_scale is not None:
            input_scale = _as_grid(op, "input_scale", input_scale)
            if input_scale.numel() == 1:
                input_scale = input_scale.reshape(1, 1)
        buffers = {
            "weight": _dense_rows(weight.detach()),
            "weight_scale": _as_grid(op, "weight_scale", weight_scale),
            "input_scale": input_scale,
        }
        self._register((weight.shape[0], weight.shape[1]), buffers, bias)

    def extra_repr(self) -> str:
        """What sets this layer apart, for print()."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"granularity={self.granularity}, activations={self.activations}, "
            f"bias={self.bias is not None}"
        )

    def _adopt(self) -> None:
        super()._adopt()
        self.weight, self.weight_scale = _dense_rows(self.weight), self.weight_scale.float()
        if self.input_scale is not None:
            self.input_scale = self.input_scale.float()

    def _check_buffers(self) -> None:
        op, input_scale = type(self).__name__, self.input_scale
        check_devices(
            op,
            weight=self.weight,
            weight_scale=self.weight_scale,
            input_scale=input_scale,
            bias=self.bias,
        )
        if input_scale is not None:
            one = input_scale.numel() == 1
            check(op, one, f"input_scale: expected one number, got {tuple(input_scale.shape)}")
        if self.weight.is_meta:
            return  # it has no scales that could be wrong
        finite = bool(self.weight_scale.isfinite().all())
        check(op, finite, "weight_scale: expected finite values")
        self._check_apart({"input_scale"})

    def _check_apart(self, loaded: set[str]) -> None:
        scale = self.input_scale
        if "input_scale" in loaded and scale is not None and not scale.is_meta:
            value = scale.item()
            usable = 0 < value < float("inf")
            message = f"input_scale: expected a finite number above 0, got {value}"
            check(type(self).__name__, usable, message)


class FP8Linear(W8A8Linear):
    """`W8A8Linear` in float8_e4m3fn: `quantize_fp8` of x, then `fp8_scaled_mm`.

    Micikevicius et al., "FP8 Formats for Deep Learning", 2022; blocks: DeepSeek-AI, "DeepSeek-V3
    Technical Report", 2024.
    """

    _dtype = torch.float8_e4m3fn
    _granularities = ("channel", "tensor", "block")
    _activations = ("dynamic", "static")
    _quantize = staticmethod(ops.quantize_fp8)

    def _product(self, rows: Tensor) -> Tensor:
        block = (1, 128) if self.granularity == "block" else (1, -1)
        if self.input_scale is not None:
            block = (-1, -1)
        codes, scale = ops.quantize_fp8(rows, scale=self.input_scale, block=block)
        return ops.fp8_scaled_mm(
            codes, self.weight, scale, self.weight_scale, self.bias, out_dtype=rows.dtype
        )

    def __getstate__(self) -> dict[str, Any]:
        """For pickle, codes as bytes: torch cannot unpickle tensors of fp8 (as of 2.13)."""
        codes = self.weight.view(torch.uint8)
        return {**self.__dict__, "_buffers": {**self._buffers, "weight": codes}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.weight = self.weight.view(self._dtype)


class Int8W8A8Linear(W8A8Linear):
    """`W8A8Linear` in int8: `quantize_int8` of x, or its asymmetric kind, then `int8_scaled_mm`.

    (`Int8Linear` has int8 weights alone, W8A16.) Codes of the weight are symmetric. Asymmetric ones
    of x use all 256 levels where x has mostly one sign, as after an activation.

    Dettmers et al., "LLM.int8(): 8-bit Matrix Multiplication for Transformers at Scale", 2022; Xiao
    et al., "SmoothQuant: Accurate and Efficient Post-Training Quantization for Large Language
    Models", 2023.
    """

    _dtype = torch.int8
    _granularities = ("channel", "tensor")
    _activations = ("dynamic", "static", "asymmetric")
    _quantize = staticmethod(ops.quantize_int8)

    def _product(self, rows: Tensor) -> Tensor:
        zero: Tensor | None = None
        if self.activations == "asymmetric":
            codes, scale, zero = ops.quantize_int8_asymmetric(rows)
        else:
            block = (1, -1) if self.input_scale is None else (-1, -1)
            codes, scale = ops.quantize_int8(rows, scale=self.input_scale, block=block)
        return ops.int8_scaled_mm(
            codes, self.weight, scale, self.weight_scale, zero, self.bias, out_dtype=rows.dtype
        )


def _activations(given: str | None, input_scale: object) -> str:
    if given is not None:
        return given
    return "dynamic" if input_scale is None else "static"


def _scale_shape(granularity: str, shape: tuple[int, ...]) -> tuple[int, int]:
    """Of the scales of a weight [N, K]."""
    rows, columns = (
        1 if block == -1 else -(-size // block)
        for size, block in zip(shape, _BLOCKS[granularity], strict=True)
    )
    return rows, columns


def _as_grid(op: str, name: str, scale: Tensor) -> Tensor:
    """A matrix in fp32 of a scale, or of some in a row."""
    check(op, scale.dtype in _X_DTYPES, f"{name}: expected one of {_X_DTYPES}, got {scale.dtype}")
    scale = scale.detach().float()
    return scale if scale.dim() > 1 else scale.reshape(-1, 1)


def _dense_rows(weight: Tensor) -> Tensor:
    return weight if weight.stride(-1) == 1 else weight.contiguous()
