"""Measured configurations of low-bit products: the files that hold them, and their way into the
ops library.

How the Hopper kernels of `int2_gemm` to `int8_gemm` cut a product is the choice of a pure function
of its shape (csrc/cuda/gemm/low_bit_config.h). `fastinfer tune` measures what is faster on a device
and writes a file for it; when fastinfer is imported the files are handed to the library, which asks
them first. An entry holds for all row counts of its bucket, of which it names the largest. Of
entries that stand for the same products the one that gained most holds. What the kernels do not
have is left out there: a wrong file costs time at most.

The files are in the folder $FASTINFER_TUNED, or else in fastinfer/tuned of the user's cache
($XDG_CACHE_HOME, ~/.cache), one for each name of a device:

    {"device": "NVIDIA H200", "version": "0.1.0", "torch": "2.11.0", "entries": [
      {"op": "int4_gemm", "kernel": "few_rows", "n": 4096, "k": 4096, "group_size": 128, "m": 8,
       "config": {"rows": 4, "warps": 16, "cluster": 4}, "us": 5.1, "default_us": 5.9}]}
"""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import fastinfer
import fastinfer._library

BITS = (2, 3, 4, 8)
_OPS = {f"int{bits}_gemm": bits for bits in BITS}
_SETTINGS = {
    "few_rows": ("rows", "warps", "cluster"),
    "many_rows": ("tokens", "splits", "shared", "cluster"),
}
_KERNELS = tuple(_SETTINGS)  # by their number in the library
_NUMBERS = 5  # of a configuration: its kernel and its settings, the rest 0
_MOST = 2**31 - 1  # rows, features and columns: the kernels count them in 32 bits
_MOST_INT64 = 2**63 - 1


@dataclass(frozen=True)
class Problem:
    """A product of x [m, k] and a weight [n, k], by what its configuration depends on."""

    bits: int
    m: int
    n: int
    k: int
    group_size: int

    @property
    def op(self) -> str:
        """The op that computes it."""
        return f"int{self.bits}_gemm"

    @property
    def numbers(self) -> list[int]:
        """As the library takes it."""
        return [self.bits, self.m, self.n, self.k, self.group_size]


@dataclass(frozen=True)
class Config:
    """How a kernel cuts a product."""

    numbers: tuple[int, ...]
    """As the library has it: the kernel's number and its settings, filled up with 0."""

    @property
    def kernel(self) -> str:
        """Either "few_rows" or "many_rows"."""
        return _KERNELS[self.numbers[0]]

    @property
    def settings(self) -> dict[str, int]:
        """The kernel's settings by name."""
        names = _SETTINGS[self.kernel]
        return dict(zip(names, self.numbers[1 : 1 + len(names)], strict=True))

    @classmethod
    def of(cls, kernel: str, settings: Mapping[str, int]) -> Config:
        """From what `kernel` and `settings` say."""
        numbers = [_KERNELS.index(kernel), *(settings[name] for name in _SETTINGS[kernel])]
        return cls(tuple(numbers + [0] * (_NUMBERS - len(numbers))))

    def __str__(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in self.settings.items())


@dataclass(frozen=True)
class Entry:
    """A configuration that was faster than the default one; `problem.m` is that of a bucket."""

    problem: Problem
    config: Config
    us: float
    default_us: float

    @property
    def gain(self) -> float:
        """Over the default configuration."""
        return self.default_us / self.us


@dataclass(frozen=True)
class Table:
    """What a file holds."""

    device: str
    version: str
    torch: str
    entries: tuple[Entry, ...]


@dataclass(frozen=True)
class InUse:
    """A file whose entries the library has."""

    path: Path
    entries: int
    """Those that are usable, also where another one stands for the same products."""
    unusable: int
    """Entries that the kernels of this build do not have."""


in_use: dict[str, InUse] = {}
"""By the device's name."""


def folder() -> Path:
    """Where the files are."""
    chosen = os.environ.get("FASTINFER_TUNED")
    if chosen:
        return Path(chosen)
    cache = os.environ.get("XDG_CACHE_HOME", "")
    # The specification has relative paths ignored.
    base = Path(cache) if os.path.isabs(cache) else Path(os.path.expanduser("~/.cache"))
    return base / "fastinfer" / "tuned"


def path_of(device: str, where: Path) -> Path:
    """The file of a device in a folder."""
    return where / (re.sub(r"\W+", "-", device.lower()).strip("-") + ".json")


def load() -> None:
    """Hands the files of the folder to the library; starts no CUDA context.

    A file that cannot be used is ignored with a warning that names it.
    """
    for device in in_use:
        set_table(device, ())
    in_use.clear()
    for path in _files(folder()):
        try:
            table = read(path)
            count = set_table(table.device, table.entries)
        except (OSError, ValueError) as error:
            _warn(f"{path} is ignored: {error}; fastinfer tune writes it anew")
            continue
        in_use[table.device] = InUse(path, count, len(table.entries) - count)


def set_table(device: str, entries: Iterable[Entry]) -> int:
    """Replaces the entries of a device in the library; returns how many are usable.

    Where several stand for the same products (sizes that make equal tiles, row counts of a bucket)
    the one that gained most over the default configuration holds.
    """
    by_gain = sorted(entries, key=lambda entry: entry.gain)  # in the library the last one holds
    rows = [[*entry.problem.numbers, *entry.config.numbers] for entry in by_gain]
    columns = len(Problem.__dataclass_fields__) + _NUMBERS
    tensor = torch.tensor(rows, dtype=torch.int64, device="cpu").reshape(len(rows), columns)
    usable: int = torch.ops.fastinfer._set_gemm_configs.default(device, tensor)
    return usable


def configs(problem: Problem, sms: int) -> list[Config]:
    """What the kernels have for a product on a device of so many multiprocessors, the default one
    first; nothing if they do not take it.
    """
    shape = torch.tensor(problem.numbers, dtype=torch.int64, device="cpu")
    rows = torch.ops.fastinfer._gemm_configs.default(shape, sms).tolist()
    return [Config(tuple(row)) for row in rows]


def read(path: Path) -> Table:
    """What a file holds.

    Raises:
        OSError: it cannot be read.
        ValueError: it is damaged, or of another version of fastinfer or another device than its
            name says.
    """
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"not valid JSON ({error})") from error
    device, version, torch_version = (
        _field(fields, name, str, "the file") for name in ("device", "version", "torch")
    )
    if not device.isprintable():
        raise ValueError(f"device: expected a printable name, got {device!r}")
    if version != fastinfer.__version__:
        raise ValueError(
            f"version: expected that of this fastinfer, {fastinfer.__version__}, got {version}"
        )
    if path.name != path_of(device, path.parent).name:
        raise ValueError(
            f"expected the name {path_of(device, path.parent).name} for the device {device!r}"
        )
    entries = _field(fields, "entries", list, "the file")
    return Table(
        device,
        version,
        torch_version,
        tuple(_entry(fields, f"entry {i}") for i, fields in enumerate(entries)),
    )


def write(path: Path, device: str, entries: Sequence[Entry]) -> None:
    """Writes a device's file in one step, so that nobody reads half of it; OSError if it cannot be
    written.
    """
    header = {"device": device, "version": fastinfer.__version__, "torch": torch.__version__}
    lines = ",\n  ".join(json.dumps(_json(entry)) for entry in entries)
    fields = "".join(f' "{name}": {json.dumps(value)},\n' for name, value in header.items())
    path.parent.mkdir(parents=True, exist_ok=True)
    staged = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        staged.write_text(f'{{\n{fields} "entries": [\n  {lines}\n ]\n}}\n', encoding="utf-8")
        staged.replace(path)
    finally:
        staged.unlink(missing_ok=True)


def _json(entry: Entry) -> dict[str, Any]:
    problem, config = entry.problem, entry.config
    settings: dict[str, int | bool] = {**config.settings}
    if "shared" in settings:
        settings["shared"] = bool(settings["shared"])
    return {
        "op": problem.op,
        "kernel": config.kernel,
        "n": problem.n,
        "k": problem.k,
        "group_size": problem.group_size,
        "m": problem.m,
        "config": settings,
        "us": round(entry.us, 3),
        "default_us": round(entry.default_us, 3),
    }


def _entry(fields: Any, where: str) -> Entry:
    op = _choice(fields, "op", _OPS, where)
    kernel = _choice(fields, "kernel", _SETTINGS, where)
    m, n, k = (_integer(fields, name, where, 1, _MOST) for name in ("m", "n", "k"))
    group_size = _integer(fields, "group_size", where, 1, _MOST_INT64)
    given = _field(fields, "config", dict, where)
    settings = {
        name: int(_field(given, name, bool, f"{where}: config"))
        if name == "shared"
        else _integer(given, name, f"{where}: config", 0, _MOST_INT64)
        for name in _SETTINGS[kernel]
    }
    us, default_us = (_microseconds(fields, name, where) for name in ("us", "default_us"))
    problem = Problem(_OPS[op], m, n, k, group_size)
    return Entry(problem, Config.of(kernel, settings), us, default_us)


def _field(fields: Any, name: str, kind: Any, where: str) -> Any:
    if not isinstance(fields, dict):
        raise ValueError(f"{where}: expected a JSON object, got {type(fields).__name__}")
    if name not in fields:
        raise ValueError(f"{where}: {name!r} is missing")
    value = fields[name]
    # JSON's true is an int in Python.
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        kinds = kind if isinstance(kind, tuple) else (kind,)
        expected = " or ".join(k.__name__ for k in kinds)
        raise ValueError(f"{where}: {name}: expected {expected}, got {value!r}")
    return value


def _integer(fields: Any, name: str, where: str, least: int, most: int) -> int:
    value: int = _field(fields, name, int, where)
    if not least <= value <= most:
        raise ValueError(f"{where}: {name}: expected a number of {least}..{most}, got {value}")
    return value


def _microseconds(fields: Any, name: str, where: str) -> float:
    value: float = _field(fields, name, (int, float), where)
    if not 0 < value < 1e12:
        raise ValueError(f"{where}: {name}: expected microseconds, got {value}")
    return float(value)


def _choice(fields: Any, name: str, choices: Iterable[str], where: str) -> str:
    value: str = _field(fields, name, str, where)
    if value not in choices:
        raise ValueError(f"{where}: {name}: expected one of {list(choices)}, got {value!r}")
    return value


def _files(where: Path) -> list[Path]:
    try:
        names = [name for name in os.listdir(where) if name.endswith(".json")]
        return sorted(where / name for name in names if (where / name).is_file())
    except FileNotFoundError:  # nothing was measured yet
        return []
    except OSError as error:
        _warn(f"{where} is ignored: expected a folder of measured configurations: {error}")
        return []


def _warn(text: str) -> None:
    warnings.warn(f"fastinfer: {text}", RuntimeWarning, stacklevel=3)
