"""The index of a checkpoint: which part of which variable is in which file.

folder/step-00000040/
    9f03c1-00000-of-00002.safetensors    what rank 0 held
    9f03c1-00001-of-00002.safetensors    what rank 1 held
    index.json                           written last: without it there is no checkpoint
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from keras_spmd.checkpoints._errors import CheckpointError
from keras_spmd.checkpoints._safetensors import DTYPES, SUFFIX, File

INDEX = "index.json"
_FORMAT, _VERSION = "keras-spmd checkpoint", 1
_STEP = re.compile(r"step-(\d+)")


def folder_of(path: Path, step: int) -> Path:
    return path / f"step-{step:08d}"


def step_of(folder: Path) -> int:
    """The number of a checkpoint's folder; 0 if it has none."""
    match = _STEP.fullmatch(folder.name)
    return int(match[1]) if match else 0


def steps_in(path: Path) -> dict[int, Path]:
    """All complete checkpoints of a folder, the newest last."""
    found = {}
    for folder in path.glob("step-*"):
        match = _STEP.fullmatch(folder.name)
        if match and (folder / INDEX).is_file():
            found[int(match[1])] = folder
    return dict(sorted(found.items()))


def write_index(folder: Path, records: Sequence[dict], rest: dict[str, Any]) -> None:
    """Make files a checkpoint, and remove what is left there of another one."""
    index: dict[str, Any] = {"format": _FORMAT, "version": _VERSION, **rest}
    index["files"] = {r["file"]: {"bytes": r["bytes"], "header": r["header"]} for r in records}
    for variable in index["variables"].values():
        variable["parts"] = []
    for record in records:
        for name, part in record["tensors"].items():
            index["variables"][name]["parts"].append({"file": record["file"], **part})
    # As it will be read: keys of dicts that are numbers become strings, which have another order.
    index = json.loads(json.dumps(index))
    text = json.dumps({"checksum": _checksum(index), **index}, indent=1)
    new = folder / f".{INDEX}"
    with new.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    new.replace(folder / INDEX)
    _sync_folder(folder)
    for other in folder.glob(f"*{SUFFIX}"):
        if other.name not in index["files"]:
            other.unlink()


def _checksum(index: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(index, sort_keys=True).encode()).hexdigest()


def _sync_folder(folder: Path) -> None:
    """A name that was given is on the disk, too."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove(folder: Path) -> None:
    """Remove a checkpoint: it stops being one first."""
    (folder / INDEX).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def remove_incomplete(path: Path, keep: Path) -> None:
    """Remove what saves left behind that never came to their end."""
    for folder in path.glob("step-*"):
        if folder != keep and _STEP.fullmatch(folder.name) and not (folder / INDEX).exists():
            shutil.rmtree(folder, ignore_errors=True)


class Checkpoint:
    """A complete checkpoint, of which any part can be read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files: dict[str, File] = {}
        try:
            text = (folder / INDEX).read_text()
        except (FileNotFoundError, NotADirectoryError):
            raise FileNotFoundError(
                f"There is no complete checkpoint in '{folder}': it has no {INDEX}."
            ) from None
        self.index = _parsed(text, folder)

    @property
    def checksum(self) -> str:
        """Of the index."""
        return _checksum(self.index)

    @property
    def step(self) -> int:
        return self.index["step"]

    @property
    def variables(self) -> dict[str, dict]:
        return self.index["variables"]

    def read(
        self, name: str, start: Sequence[int] | None = None, shape: Sequence[int] | None = None
    ) -> torch.Tensor:
        """A variable, or the part of this shape that begins at `start`."""
        variable = self.variables[name]
        shape = variable["shape"] if shape is None else shape
        start = [0] * len(shape) if start is None else start
        result = torch.empty(tuple(shape), dtype=DTYPES[variable["dtype"]])
        for part in variable["parts"]:
            both = _common(start, shape, part["start"], part["shape"])
            if both is not None:
                mine, theirs = both
                result[mine] = self._file(part["file"]).read(name, part, theirs)
        return result

    def verify(self) -> None:
        """Read everything, and raise if it isn't what was written."""
        for name in self.variables:
            self.read(name)

    def _file(self, name: str) -> File:
        if name not in self._files:
            about = self.index["files"][name]
            self._files[name] = File(self.folder / name, about["bytes"], about["header"])
        return self._files[name]


def _parsed(text: str, folder: Path) -> dict[str, Any]:
    try:
        index = json.loads(text)
        checksum = index.pop("checksum")
        is_ours = index["format"] == _FORMAT
    except (ValueError, KeyError, AttributeError, TypeError):
        raise CheckpointError(f"The index '{folder / INDEX}' can't be read: damaged.") from None
    if not is_ours or index["version"] > _VERSION:
        raise CheckpointError(
            f"The index '{folder / INDEX}' is of the format {index['format']!r}, version "
            f"{index['version']}. This keras-spmd reads '{_FORMAT}' up to version {_VERSION}."
        )
    if _checksum(index) != checksum:
        raise CheckpointError(
            f"The index '{folder / INDEX}' is damaged: it is not what was written (checksums "
            "differ)."
        )
    return index


def _common(
    start: Sequence[int], shape: Sequence[int], other_start: Sequence[int], other: Sequence[int]
) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    """Where two boxes overlap, as seen from each of them."""
    mine, theirs = [], []
    for a, n, b, m in zip(start, shape, other_start, other, strict=True):
        first, last = max(a, b), min(a + n, b + m)
        if first >= last:
            return None
        mine.append(slice(first - a, last - a))
        theirs.append(slice(first - b, last - b))
    return tuple(mine), tuple(theirs)
