"""Builds the two native parts of fastinfer with ninja.

1. `fastinfer/_ops.so`, the ops library: C++ (and CUDA where a compiler is found) against torch's
   stable C ABI. It contains no Python and no C++ symbol of torch, so one file serves every CPython
   and every torch >= 2.10.
2. `fastinfer/_host.*.so`, the host module: pybind11, one per CPython.

Environment: FASTINFER_CUDA=0|1 (default: 1 if a CUDA compiler is found; 1 fails without one),
FASTINFER_CUDA_ARCHS (default "90a"), CUDA_HOME, CXX, MAX_JOBS.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import ClassVar

from setuptools import Command, Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent.resolve()
TORCH_TARGET_VERSION = "0x020a000000000000"  # 2.10: the oldest torch whose stable ABI we call

# ---- sources, by role

OPS_COMMON = [
    "csrc/schema.cpp",
    "csrc/build_info.cpp",
    "csrc/cpu/isa.cpp",
    "csrc/cuda/gemm/tuned_configs.cpp",
    "csrc/cuda/gemm/tuned_configs_op.cpp",
    "csrc/portable/portable.cpp",
]
# Checks, choice and threading: compiled once, for the baseline instruction set.
CPU_OPS = [
    "csrc/cpu/activation.cpp",
    "csrc/cpu/attention.cpp",
    "csrc/cpu/attention_plan.cpp",
    "csrc/cpu/kv_cache.cpp",
    "csrc/cpu/low_bit_gemm.cpp",
    "csrc/cpu/merge.cpp",
    "csrc/cpu/norm.cpp",
    "csrc/cpu/paged_attention.cpp",
    "csrc/cpu/qk_norm_rope_append.cpp",
    "csrc/cpu/quantize.cpp",
    "csrc/cpu/rotary.cpp",
    "csrc/cpu/sampling.cpp",
    "csrc/cpu/scaled_mm.cpp",
]
# Inner loops: compiled once per instruction set and chosen at run time.
CPU_KERNELS = [
    "csrc/cpu/activation_kernels.cpp",
    "csrc/cpu/attention_kernels.cpp",
    "csrc/cpu/kv_cache_kernels.cpp",
    "csrc/cpu/low_bit_gemm_kernels.cpp",
    "csrc/cpu/merge_kernels.cpp",
    "csrc/cpu/norm_kernels.cpp",
    "csrc/cpu/qk_norm_rope_append_kernels.cpp",
    "csrc/cpu/quantize_kernels.cpp",
    "csrc/cpu/rotary_kernels.cpp",
    "csrc/cpu/sampling_kernels.cpp",
    "csrc/cpu/scaled_mm_kernels.cpp",
]
CUDA_SOURCES = [
    "csrc/cuda/attention/attention.cu",
    "csrc/cuda/attention/decode.cu",
    "csrc/cuda/attention/decode_bf16.cu",
    "csrc/cuda/attention/decode_fp16.cu",
    "csrc/cuda/attention/decode_fp8.cu",
    "csrc/cuda/attention/decode_int8.cu",
    "csrc/cuda/attention/merge.cu",
    "csrc/cuda/attention/plan.cu",
    "csrc/cuda/attention/prefill.cu",
    "csrc/cuda/attention/prefill_d64.cu",
    "csrc/cuda/attention/prefill_d96.cu",
    "csrc/cuda/attention/prefill_d128.cu",
    "csrc/cuda/attention/prefill_d192.cu",
    "csrc/cuda/attention/prefill_d256.cu",
    "csrc/cuda/attention/prefill_fp8.cu",
    "csrc/cuda/attention/split_merge.cu",
    "csrc/cuda/gemm/low_bit_gemm.cu",
    "csrc/cuda/gemm/low_bit_gemm_2.cu",
    "csrc/cuda/gemm/low_bit_gemm_3.cu",
    "csrc/cuda/gemm/low_bit_gemm_4.cu",
    "csrc/cuda/gemm/low_bit_gemm_8.cu",
    "csrc/cuda/gemm/low_bit_parts.cu",
    "csrc/cuda/gemm/scaled_mm.cu",
    "csrc/cuda/gemm/scaled_mm_fp8.cu",
    "csrc/cuda/gemm/scaled_mm_int8.cu",
    "csrc/cuda/kv_cache/append_paged_kv_cache.cu",
    "csrc/cuda/kv_cache/qk_norm_rope_append.cu",
    "csrc/cuda/norm/rms_norm.cu",
    "csrc/cuda/tensor_map.cu",
]
HOST_SOURCES = [
    "csrc/host/block_manager.cpp",
    "csrc/host/module.cpp",
    "csrc/host/prefix_index.cpp",
    "csrc/host/step_pack.cpp",
]

IS_X86 = platform.machine() in ("x86_64", "AMD64")
CXX_FLAGS = [
    "-O3",
    "-std=c++20",
    "-fPIC",
    "-fvisibility=hidden",
    "-Wall",
    "-Wno-psabi",
    "-Wno-unknown-pragmas",
]
KERNEL_FLAGS = ["-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math"]
ISA_FLAGS = {"generic": []}
if IS_X86:
    ISA_FLAGS["avx2"] = ["-mavx2", "-mfma", "-mf16c"]


def find_nvcc() -> str | None:
    """CUDA_HOME, PATH, the pip package nvidia-cuda-nvcc; never asks whether a GPU is present."""
    home = os.environ.get("CUDA_HOME")
    if home and (Path(home) / "bin/nvcc").is_file():
        return str(Path(home) / "bin/nvcc")
    on_path = shutil.which("nvcc")
    if on_path:
        return on_path
    for site in sys.path:
        for candidate in Path(site or ".").glob("nvidia/*/bin/nvcc"):
            return str(candidate)
    return None


def choose_nvcc() -> str | None:
    wanted = os.environ.get("FASTINFER_CUDA")
    if wanted not in (None, "", "0", "1"):
        raise SystemExit(f"FASTINFER_CUDA: expected 0 or 1, got {wanted!r}")
    if wanted == "0":
        return None
    nvcc = find_nvcc()
    if nvcc is None and wanted == "1":
        raise SystemExit(
            "FASTINFER_CUDA=1 but no CUDA compiler was found "
            "(CUDA_HOME, PATH, pip package nvidia-cuda-nvcc)"
        )
    return nvcc


def find_ninja() -> str:
    try:
        from ninja import BIN_DIR
    except ImportError:
        found = shutil.which("ninja")
        if found is None:
            raise SystemExit("ninja is needed to build fastinfer (pip install ninja)") from None
        return found
    return str(Path(BIN_DIR) / "ninja")


def quote(path: str | Path) -> str:
    return str(path).replace("$", "$$").replace(" ", "$ ").replace(":", "$:")


class NinjaFile:
    """Collects rules and edges and writes build.ninja."""

    def __init__(self) -> None:
        self.lines: list[str] = ["ninja_required_version = 1.8"]

    def rule(self, name: str, command: str, deps: bool) -> None:
        self.lines += [f"rule {name}", f"  command = {command}", f"  description = {name} $out"]
        if deps:
            self.lines += ["  depfile = $out.d", "  deps = gcc"]

    def edge(self, rule: str, out: Path, inputs: list[Path], flags: list[str]) -> Path:
        self.lines.append(f"build {quote(out)}: {rule} {' '.join(quote(i) for i in inputs)}")
        self.lines.append(f"  flags = {' '.join(flags)}")
        return out

    def write(self, path: Path) -> None:
        text = "\n".join(self.lines) + "\n"
        if not path.exists() or path.read_text() != text:
            path.write_text(text)


def write_ninja(build_dir: Path, ops_so: Path, host_so: Path, nvcc: str | None) -> None:
    cxx = os.environ.get("CXX", "c++")
    ninja = NinjaFile()
    ninja.rule("cxx", f"{cxx} -MMD -MF $out.d $flags -c $in -o $out", deps=True)
    ninja.rule("link", f"{cxx} -shared $in -o $out $flags", deps=False)
    add_ops_library(ninja, build_dir, ops_so, nvcc, cxx)
    add_host_module(ninja, build_dir, host_so)
    ninja.write(build_dir / "build.ninja")


def add_ops_library(
    ninja: NinjaFile, build_dir: Path, ops_so: Path, nvcc: str | None, cxx: str
) -> None:
    import torch

    torch_dir = Path(torch.__file__).parent
    torch_flags = [
        f"-DTORCH_TARGET_VERSION={TORCH_TARGET_VERSION}",
        f"-isystem {quote(torch_dir / 'include')}",
    ]
    ops_flags = CXX_FLAGS + torch_flags + (["-DFI_HAVE_AVX2"] if "avx2" in ISA_FLAGS else [])
    archs = os.environ.get("FASTINFER_CUDA_ARCHS", "90a").replace(",", " ").split() if nvcc else []
    if archs:
        ops_flags.append(f"-DFI_CUDA_ARCHS='\"{' '.join(archs)}\"'")
    objects: list[Path] = []
    for source in OPS_COMMON + CPU_OPS:
        out = build_dir / "ops" / (source + ".o")
        objects.append(ninja.edge("cxx", out, [ROOT / source], ops_flags))
    for source in CPU_KERNELS:
        for isa, flags in ISA_FLAGS.items():
            out = build_dir / "ops" / f"{source}.{isa}.o"
            isa_flags = [
                *CXX_FLAGS,
                *KERNEL_FLAGS,
                *flags,
                f"-DFI_ISA={isa}",
                "-DFI_HAVE_AVX2" if IS_X86 else "",
            ]
            objects.append(ninja.edge("cxx", out, [ROOT / source], isa_flags))

    link_flags = [
        "-Wl,--no-as-needed",
        f"-L{quote(torch_dir / 'lib')}",
        "-ltorch -ltorch_cpu",
        "-Wl,-z,defs",
        "-Wl,--gc-sections",
    ]
    if nvcc:
        cuda_root = cuda_root_of(nvcc)
        gencode = [f"-gencode=arch=compute_{a},code=sm_{a}" for a in archs]
        nvcc_flags = [
            "-O3",
            "-std=c++20",
            *gencode,
            "--cudart static",
            "--compress-mode=size",  # kernels take a quarter of the space
            "-Xptxas -v",
            "-DUSE_CUDA",
            *torch_flags,
        ]
        nvcc_flags += [
            "-Xcompiler -fPIC,-fvisibility=hidden",
            "--expt-relaxed-constexpr",
            f"-ccbin {quote(cxx)}",
        ]
        ninja.rule(
            "nvcc",
            f"{sys.executable} {quote(ROOT / 'tools/nvcc_log.py')} {quote(nvcc)} "
            "-MD -MF $out.d $flags -c $in -o $out",
            deps=True,
        )
        for source in CUDA_SOURCES:
            out = build_dir / "ops" / (source + ".o")
            objects.append(ninja.edge("nvcc", out, [ROOT / source], nvcc_flags))
        link_flags += [f"-L{quote(d)}" for d in cuda_library_dirs(cuda_root)] + [
            "-lcudart_static -ldl -lrt -lpthread"
        ]
    ninja.edge("link", ops_so, objects, link_flags)


def add_host_module(ninja: NinjaFile, build_dir: Path, host_so: Path) -> None:
    includes = [pybind11_include(), Path(sysconfig.get_paths()["include"])]
    flags = CXX_FLAGS + [f"-isystem {quote(i)}" for i in includes]
    objects = [
        ninja.edge("cxx", build_dir / "host" / (s + ".o"), [ROOT / s], flags) for s in HOST_SOURCES
    ]
    ninja.edge("link", host_so, objects, [])


def pybind11_include() -> Path:
    """The pybind11 package, or the copy of its headers that torch carries."""
    try:
        import pybind11
    except ImportError:
        import torch

        return Path(torch.__file__).parent / "include"
    return Path(pybind11.get_include())


def cuda_root_of(nvcc: str) -> Path:
    """The toolkit's folder as nvcc itself reports it (nvcc on PATH may be a wrapper script)."""
    dry = subprocess.run(
        [nvcc, "--dryrun", "-x", "cu", "-c", os.devnull, "-o", os.devnull],
        capture_output=True,
        text=True,
    )
    for line in (dry.stdout + dry.stderr).splitlines():
        if line.startswith("#$ TOP="):
            return Path(line.removeprefix("#$ TOP=").strip()).resolve()
    return Path(nvcc).resolve().parent.parent


def cuda_library_dirs(root: Path) -> list[Path]:
    found = [
        root / name
        for name in ("lib64", "targets/x86_64-linux/lib", "targets/sbsa-linux/lib", "lib")
    ]
    return [d for d in found if (d / "libcudart_static.a").is_file()]


class BuildNative(build_ext):
    """Builds both libraries with one ninja run; build/ keeps the objects for the next one."""

    host_only = False

    def get_ext_filename(self, fullname: str) -> str:
        # The ops library has no Python ABI in it, so its name carries none.
        if fullname.endswith("_ops"):
            return str(Path(*fullname.split("."))) + ".so"
        return super().get_ext_filename(fullname)

    def build_extensions(self) -> None:
        nvcc = choose_nvcc()
        if nvcc is None:
            print(
                "fastinfer: building without CUDA kernels (no CUDA compiler, or FASTINFER_CUDA=0)",
                file=sys.stderr,
            )
        ops_so = Path(self.build_lib).resolve() / self.get_ext_filename("fastinfer._ops")
        host_so = Path(self.build_lib).resolve() / self.get_ext_filename("fastinfer._host")
        build_dir = ROOT / "build" / f"ninja-{sysconfig.get_config_var('SOABI')}"
        build_dir.mkdir(parents=True, exist_ok=True)
        built_ops, built_host = build_dir / ops_so.name, build_dir / host_so.name
        write_ninja(build_dir, built_ops, built_host, nvcc)
        outputs = (
            {built_host: host_so} if self.host_only else {built_ops: ops_so, built_host: host_so}
        )
        jobs = os.environ.get("MAX_JOBS") or str(os.cpu_count() or 1)
        subprocess.run(
            [find_ninja(), "-C", str(build_dir), "-j", jobs, *map(str, outputs)], check=True
        )
        for built, wanted in outputs.items():
            wanted.parent.mkdir(parents=True, exist_ok=True)
            staged = wanted.with_name(wanted.name + ".new")
            shutil.copyfile(built, staged)
            staged.replace(wanted)  # a process that has the old file mapped keeps it


class DevelopInPlace(Command):
    """`python setup.py develop_inplace`: build the libraries into the source tree."""

    user_options: ClassVar = [
        ("host-only", None, "keep the ops library that is there and build the host module alone")
    ]
    boolean_options: ClassVar = ["host-only"]

    def initialize_options(self) -> None:
        self.host_only = False

    def finalize_options(self) -> None: ...

    def run(self) -> None:
        build = self.get_finalized_command("build_ext")
        build.host_only = self.host_only
        if self.host_only:
            build.extensions = [e for e in build.extensions if e.name == "fastinfer._host"]
        build.inplace = True
        build.run()


setup(
    ext_modules=[Extension("fastinfer._ops", sources=[]), Extension("fastinfer._host", sources=[])],
    cmdclass={"build_ext": BuildNative, "develop_inplace": DevelopInPlace},
)
