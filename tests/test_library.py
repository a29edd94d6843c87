"""The ops library speaks torch's stable C ABI alone, and holds what the build promised."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fastinfer import _library

# Itanium-mangled names of torch's C++ namespaces (also inside nested names) and anything of
# CPython.
FORBIDDEN = re.compile(r"^_Z.*(3c10|2at|5torch)|^_?Py[A-Z_]")


def undefined_symbols(path: Path) -> list[str]:
    nm = shutil.which("nm")
    assert nm, "binutils' nm is needed (it comes with every C++ compiler)"
    out = subprocess.run(
        [nm, "--dynamic", "--undefined-only", "--format=posix", str(path)],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    return [line.split()[0].split("@")[0] for line in out.splitlines()]


def test_no_cpp_symbol_of_torch_and_none_of_python() -> None:
    symbols = undefined_symbols(_library.PATH)
    assert any(s.startswith("aoti_torch_") for s in symbols), "the list of symbols was not read"
    assert [s for s in symbols if FORBIDDEN.search(s)] == []


@pytest.mark.parametrize(
    "name",
    [
        "_ZN3c105ErrorC1Ev",
        "_ZNK2at6Tensor4sizeEl",
        "_ZN5torch7LibraryC1Ev",
        "PyErr_SetString",
        "_Py_Dealloc",
    ],
)
def test_the_pattern_catches_forbidden_names(name: str) -> None:
    assert FORBIDDEN.search(name)


def test_cuda_kernels_are_built_where_they_are_required() -> None:
    if os.environ.get("FASTINFER_CUDA") != "1":
        pytest.skip("FASTINFER_CUDA=1 is what promises CUDA kernels")
    assert _library.cuda_archs() == os.environ.get("FASTINFER_CUDA_ARCHS", "90a").split()
    assert b"rms_norm_kernel" in _library.PATH.read_bytes()


def hand_written_ops() -> set[str]:
    """The public ops that the sources of csrc/cuda register."""
    csrc = Path(__file__).parent.parent / "csrc"
    functional = (csrc / "functional.h").read_text()
    names: set[str] = set()
    for path in [*csrc.glob("cuda/**/*.cu"), *csrc.glob("cuda/**/*.cpp")]:
        text = path.read_text()
        for function in re.findall(r"functional::register_(\w+)<", text):
            text += functional.split(f"void register_{function}(")[1].split("\n}\n")[0]
        names |= set(re.findall(r'm\.impl\("([a-z]\w*)"', text))
    return names


def test_ops_with_hand_written_kernels_are_named() -> None:
    if not _library.cuda_archs():
        pytest.skip("built without CUDA kernels")
    assert sorted(_library.cuda_ops()) == sorted(hand_written_ops())


def test_the_library_is_opened_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ctypes.CDLL", None)
    assert _library.cpu_isa() and _library.rows_bucket(9) == 16
    assert isinstance(_library.cuda_ops(), list) and isinstance(_library.cuda_archs(), list)


@pytest.mark.parametrize(
    ("wanted", "expected"), [("generic", {"generic"}), ("", {"generic", "avx2"})]
)
def test_instruction_set_can_be_forced(wanted: str, expected: set[str]) -> None:
    code = "from fastinfer import _library; print(_library.cpu_isa())"
    env = os.environ | {"FASTINFER_CPU_ISA": wanted}
    out = subprocess.run(
        [sys.executable, "-c", code], env=env, check=True, capture_output=True, text=True
    )
    assert out.stdout.strip() in expected


def test_import_starts_no_cuda_context_and_needs_core_packages_only() -> None:
    # A module set to None cannot be imported.
    code = (
        "import sys\n"
        "extras = 'transformers safetensors tokenizers gguf huggingface_hub jinja2 tqdm'\n"
        "for name in extras.split():\n"
        "    sys.modules[name] = None\n"
        "import torch, fastinfer, fastinfer.ops, fastinfer.doctor\n"
        "assert not torch.cuda.is_initialized()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("wanted", "interpreted", "expected"),
    [("", "0", "cpu"), ("triton", "0", "cpu"), ("triton", "1", "triton"), ("", "1", "cpu")],
)
def test_the_backend_of_cpu_tensors(wanted: str, interpreted: str, expected: str) -> None:
    """What `doctor` says, and that an op runs whatever the environment asks for."""
    code = (
        "import torch, fastinfer.ops as ops\n"
        "kernels = {backend for backend, _ in ops.backends('cpu').values()}\n"
        "x = torch.randn(2, 8)\n"
        "expected = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()\n"
        "torch.testing.assert_close(ops.rms_norm(x, torch.ones(8)), expected)\n"
        "print(*kernels)\n"
    )
    env = os.environ | {"FASTINFER_BACKEND": wanted, "TRITON_INTERPRET": interpreted}
    out = subprocess.run(
        [sys.executable, "-c", code], env=env, check=True, capture_output=True, text=True
    )
    assert out.stdout.split() == [expected]


def test_an_unknown_backend_is_refused() -> None:
    env = os.environ | {"FASTINFER_BACKEND": "cuda"}
    run = subprocess.run(
        [sys.executable, "-c", "import fastinfer.ops"], env=env, capture_output=True, text=True
    )
    assert run.returncode != 0 and "FASTINFER_BACKEND: expected 'triton'" in run.stderr


def test_the_reason_why_a_launcher_fails_is_told() -> None:
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch, fastinfer.ops as ops\n"
        "try:\n"
        "    ops.rms_norm(torch.randn(2, 8), torch.ones(8))\n"
        "except RuntimeError as error:\n"
        "    print(error)\n"
    )
    env = os.environ | {"FASTINFER_BACKEND": "triton", "TRITON_INTERPRET": "1"}
    out = subprocess.run(
        [sys.executable, "-c", code], env=env, check=True, capture_output=True, text=True
    )
    assert "fastinfer::_portable_rms_norm: " in out.stdout and "triton" in out.stdout
