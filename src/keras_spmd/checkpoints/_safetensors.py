"""Files in the safetensors format, with checksums that are made while they are written.

A file says of each tensor where it begins in the variable it is a part of, in the words of
torch.distributed.checkpoint, whose `HuggingFaceStorageReader` reads a folder of such files.
"""

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from keras_spmd.checkpoints._errors import CheckpointError

SUFFIX = ".safetensors"
_CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
DTYPES = {code: dtype for dtype, code in _CODES.items()}


class Part(NamedTuple):
    """A part of a variable, and where in it the part begins."""

    tensor: torch.Tensor
    start: tuple[int, ...]


def code_of(dtype: torch.dtype, name: str) -> str:
    if dtype not in _CODES:
        raise TypeError(f"'{name}' has the dtype {dtype}, which safetensors files can't hold.")
    return _CODES[dtype]


def write(
    path: Path, parts: Mapping[str, Part], advance: Callable[[int], object] = lambda count: None
) -> dict[str, Any]:
    """Write a file, and say how far it is; what an index has to know about it."""
    # The largest items first: what follows lies at a multiple of its size.
    names = sorted(parts, key=lambda name: (-parts[name].tensor.element_size(), name))
    header: dict[str, Any] = {"__metadata__": _metadata(parts)}
    position = 0
    for name in names:
        tensor = parts[name].tensor
        end = position + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": code_of(tensor.dtype, name),
            "shape": list(tensor.shape),
            "data_offsets": [position, end],
        }
        position = end
    head = _padded(json.dumps(header).encode())
    tensors = {}
    with path.open("wb") as file:
        file.write(head)
        for name in names:
            begin, data = file.tell(), _bytes_of(parts[name].tensor)
            file.write(data)
            tensors[name] = {
                "start": list(parts[name].start),
                "shape": header[name]["shape"],
                "dtype": header[name]["dtype"],
                "bytes": [begin, file.tell()],
                "sha256": hashlib.sha256(data).hexdigest(),
            }
            advance(len(data))
        file.flush()
        os.fsync(file.fileno())
        size = file.tell()
    return {
        "file": path.name,
        "bytes": size,
        "header": {"bytes": len(head), "sha256": hashlib.sha256(head).hexdigest()},
        "tensors": tensors,
    }


def _metadata(parts: Mapping[str, Part]) -> dict[str, str]:
    offsets = {name: {"saved_offsets": list(part.start)} for name, part in parts.items()}
    return {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(offsets)}


def _padded(text: bytes) -> bytes:
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _bytes_of(x: torch.Tensor) -> Any:
    flat = x.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy()


class File:
    """A file that was written here: parts of it are checked when they are first read."""

    def __init__(self, path: Path, size: int, header: Mapping[str, Any]) -> None:
        self.path, self.checked = path, set[int]()
        try:
            found = path.stat().st_size
        except FileNotFoundError:
            raise CheckpointError(f"'{path}' is missing.") from None
        if found != size:
            raise CheckpointError(
                f"'{path}' has {found} bytes, but {size} were written: it was cut off or changed."
            )
        self._check(0, header["bytes"], header["sha256"], "its header")

    def _bytes(self, begin: int, end: int) -> Any:
        # Of one's own, so that torch may take it for a tensor that is written to.
        return np.memmap(self.path, np.uint8, "c", offset=begin, shape=(end - begin,))

    def _check(self, begin: int, end: int, checksum: str, what: str) -> None:
        if hashlib.sha256(self._bytes(begin, end)).hexdigest() != checksum:
            raise CheckpointError(
                f"'{self.path}' is damaged: {what} is not what was written (checksums differ)."
            )

    def read(self, name: str, part: Mapping[str, Any], box: Sequence[slice]) -> torch.Tensor:
        """The numbers of a part that lie in a box, which counts from the part's beginning."""
        begin, end = part["bytes"]
        dtype = DTYPES[part["dtype"]]
        if begin == end:
            return torch.empty(part["shape"], dtype=dtype)
        if begin not in self.checked:
            self._check(begin, end, part["sha256"], f"'{name}'")
            self.checked.add(begin)
        flat = torch.from_numpy(self._bytes(begin, end)).view(dtype)
        return flat.reshape(part["shape"])[tuple(box)]
