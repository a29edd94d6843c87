"""Recording what a launcher would launch, and compiling it without a GPU."""

import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.language import target_info

from fastinfer.triton_kernels.launch import Device

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
FP8, INT8 = torch.float8_e4m3fn, torch.int8


@dataclass(frozen=True)
class Launch:
    """One recorded launch."""

    kernel: Any
    args: tuple[Any, ...]
    options: dict[str, Any]

    def compile(self, capability: int) -> Any:
        """To a cubin."""
        compiler_options = {
            name: value for name, value in self.options.items() if name not in self._names
        }
        target = GPUTarget("cuda", capability, 32)

        def current_target() -> GPUTarget:
            return target

        # Kernels ask what they are compiled for, and Triton answers with the GPU that is there.
        current_target.__triton_builtin__ = True  # type: ignore[attr-defined]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(target_info, "current_target", current_target)
            return triton.compile(self._source(), target=target, options=compiler_options)

    @property
    def _names(self) -> list[str]:
        return [p.name for p in self.kernel.params]

    def _source(self) -> ASTSource:
        """The types, constants and divisibility that Triton's launcher finds in the arguments."""
        given = {**dict(zip(self._names, self.args, strict=False)), **self.options}
        signature: dict[str, str] = {}
        constants: dict[str, Any] = {}
        hints: dict[tuple[int, ...], list[Any]] = {}
        for index, parameter in enumerate(self.kernel.params):
            value = given[parameter.name]
            if parameter.is_constexpr or value is None:
                signature[parameter.name] = "constexpr"
                constants[parameter.name] = getattr(value, "value", value)
            elif isinstance(value, Tensor):
                signature[parameter.name] = "*" + _TYPES[value.dtype]
                if value.data_ptr() % 16 == 0:
                    hints[(index,)] = [["tt.divisibility", 16]]
            elif isinstance(value, int):
                if value == 1 and not parameter.do_not_specialize:
                    signature[parameter.name] = "constexpr"
                    constants[parameter.name] = 1
                    continue
                signature[parameter.name] = "i32" if -(2**31) <= value < 2**31 else "i64"
                if value % 16 == 0 and not parameter.do_not_specialize:
                    hints[(index,)] = [["tt.divisibility", 16]]
            else:
                assert isinstance(value, float), (parameter.name, value)
                signature[parameter.name] = "fp32"
        return ASTSource(self.kernel, signature, constants, hints)


_TYPES = {
    FP32: "fp32", BF16: "bf16", FP16: "fp16", torch.float64: "fp64", torch.int8: "i8",
    torch.uint8: "u8", torch.int32: "i32", torch.int64: "i64", torch.bool: "i1",
}  # fmt: skip


@contextmanager
def recorded(module: Any, device: Device) -> Iterator[list[Launch]]:
    """Within, the launches of a module's launchers are recorded and not carried out."""
    launches: list[Launch] = []

    def record(kernel: Any, grid: Any, like: Tensor, *args: Any, **options: Any) -> None:
        assert all(size >= 1 for size in grid), grid
        launches.append(Launch(kernel, args, options))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "launch", record)
        if hasattr(module, "device_of"):
            patch.setattr(module, "device_of", lambda index: device)
        yield launches


def resources(compiled: Any, folder: Path) -> dict[str, int]:
    """Registers, stack and local memory of a cubin's kernel, as cuobjdump tells."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    found = str(tool) if tool.is_file() else shutil.which("cuobjdump")
    assert found is not None, "Triton comes with cuobjdump"
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(compiled.asm["cubin"])
    command = [found, "--dump-resource-usage", str(cubin)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}
