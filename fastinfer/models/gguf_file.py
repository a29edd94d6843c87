"""Reads the GGUF container: metadata and where each tensor lies.

Layout (little endian): magic "GGUF", version u32, number of tensors u64, number of key-value pairs
u64; the pairs (key, type, value); per tensor its name, rank, sizes (fastest first), element type
and offset; padding up to the alignment; data. A string is a u64 length and its bytes. Every length
is checked against the file before it is used, so that a truncated or damaged file gives an error
and never a huge allocation.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastinfer.models.checkpoint import extra

# Value types of the metadata, by their number: struct code of the scalars; then string and array.
_SCALARS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
_STRING, _ARRAY = 8, 9
_MAX_RANK = 4


@dataclass(frozen=True)
class GGUFTensor:
    """A tensor of the file."""

    name: str
    shape: tuple[int, ...]
    """In elements, slowest dimension first, as torch has it."""
    type: Any
    """gguf.GGMLQuantizationType."""
    data: NDArray[np.uint8]
    """[..., bytes of a row], not read yet (memory-mapped)."""


class GGUFFile:
    """The metadata and the tensors of a GGUF file.

    Args:
        path: the file.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: not a GGUF file, or a damaged or truncated one; with the path and what is wrong.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.is_file():
            raise FileNotFoundError(f"GGUF file {path}: no such file")
        if path.stat().st_size < 24:
            raise ValueError(f"GGUF file {path}: truncated, {path.stat().st_size} bytes")
        self._data = np.memmap(path, mode="c")
        self._position = 0
        magic, version, num_tensors, num_pairs = struct.unpack("<4sIQQ", self._take(24, "header"))
        if magic != b"GGUF":
            raise self._error(f"the magic bytes are {magic!r}, expected b'GGUF'")
        if version not in (2, 3):
            raise self._error(f"version 2 or 3 expected, got {version} (or big endian)")
        self._bound(num_tensors, 24, "number of tensors")
        self._bound(num_pairs, 13, "number of key-value pairs")
        self.metadata: dict[str, Any] = {}
        for _ in range(num_pairs):
            key = self._string("metadata key")
            if key in self.metadata:
                raise self._error(f"the key {key} occurs twice")
            self.metadata[key] = self._value(self._int("I", key), key)
        infos = [self._tensor_info() for _ in range(num_tensors)]
        self.tensors = {t.name: t for t in self._tensors(infos)}
        if len(self.tensors) != num_tensors:
            raise self._error("a tensor name occurs twice")

    def _tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string("tensor name")
        rank = self._int("I", name)
        if not 1 <= rank <= _MAX_RANK:
            raise self._error(f"tensor {name}: rank 1..{_MAX_RANK} expected, got {rank}")
        sizes = struct.unpack(f"<{rank}Q", self._take(8 * rank, name))
        return name, sizes[::-1], self._int("I", name), self._int("Q", name)

    def _tensors(
        self, infos: Iterable[tuple[str, tuple[int, ...], int, int]]
    ) -> Iterable[GGUFTensor]:
        gguf = extra("gguf", "reading GGUF files")
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise self._error(f"general.alignment must be a positive integer, got {alignment!r}")
        start = -(-self._position // alignment) * alignment
        for name, shape, type_id, offset in infos:
            try:
                kind = gguf.GGMLQuantizationType(type_id)
            except ValueError:
                raise self._error(f"tensor {name}: unknown element type {type_id}") from None
            block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
            if shape[-1] % block:
                raise self._error(
                    f"tensor {name}: rows of {shape[-1]} elements, expected a multiple of the "
                    f"{kind.name} block, {block}"
                )
            row_bytes = shape[-1] // block * block_bytes
            begin, size = start + offset, math.prod(shape[:-1]) * row_bytes
            if begin + size > len(self._data):
                raise self._error(
                    f"truncated: tensor {name} ends at byte {begin + size}, the file has "
                    f"{len(self._data)}"
                )
            data = self._data[begin : begin + size].reshape(*shape[:-1], row_bytes)
            yield GGUFTensor(name, shape, kind, data)

    def _value(self, kind: int, key: str) -> Any:
        if kind in _SCALARS:
            size = struct.calcsize("<" + _SCALARS[kind])
            return struct.unpack("<" + _SCALARS[kind], self._take(size, key))[0]
        if kind == _STRING:
            return self._string(key)
        if kind != _ARRAY:
            raise self._error(f"{key}: unknown value type {kind}")
        kind, length = self._int("I", key), self._int("Q", key)
        if kind in _SCALARS:
            size = struct.calcsize("<" + _SCALARS[kind])
            self._bound(length, size, key)
            return list(struct.unpack(f"<{length}{_SCALARS[kind]}", self._take(length * size, key)))
        self._bound(length, 8, key)
        return [self._value(kind, key) for _ in range(length)]

    def _string(self, what: str) -> str:
        length = self._int("Q", what)
        self._bound(length, 1, what)
        try:
            return self._take(length, what).decode()
        except UnicodeDecodeError as error:
            raise self._error(f"{what}: not UTF-8 ({error})") from None

    def _int(self, code: str, what: str) -> int:
        value: int = struct.unpack("<" + code, self._take(struct.calcsize("<" + code), what))[0]
        return value

    def _take(self, size: int, what: str) -> bytes:
        end = self._position + size
        if end > len(self._data):
            raise self._error(f"truncated at {what}: {size} bytes at {self._position} expected")
        taken = self._data[self._position : end].tobytes()
        self._position = end
        return taken

    def _bound(self, count: int, least_bytes: int, what: str) -> None:
        """Refuses a count of items that cannot fit in the rest of the file."""
        if count * least_bytes > len(self._data) - self._position:
            raise self._error(f"truncated or damaged: {what} claims {count} items")

    def _error(self, message: str) -> ValueError:
        return ValueError(f"GGUF file {self.path}: {message}")
