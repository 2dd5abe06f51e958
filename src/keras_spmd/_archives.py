"""The h5 file in the middle of a `.keras` file, read and written where it is.

Keras reads all of it into memory, or unpacks it, and collects it in memory before it writes. With
many ranks on a machine, or a model that no rank could hold, neither will do.
"""

import io
import shutil
import struct
import tempfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py

from keras_spmd import _layouts, _processes, _saving


class _Inside(io.RawIOBase):
    """A file that lies in another one as it is."""

    def __init__(self, file: Any, start: int, size: int) -> None:
        self._file, self._start, self._size, self._at = file, start, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        self._file.seek(self._start + self._at)
        data = self._file.read(max(0, min(len(buffer), self._size - self._at)))
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


def _member(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> io.BufferedReader:
    file: Any = archive.fp
    # Behind the lengths of a name and of more, and behind these.
    file.seek(info.header_offset + 26)
    name_length, more_length = struct.unpack("<HH", file.read(4))
    start = info.header_offset + 30 + name_length + more_length
    return io.BufferedReader(_Inside(file, start, info.file_size))


def h5_file_or(original: Callable) -> Callable:
    """`H5IOStore._get_h5_file`, of a file in an archive, or of one that all ranks write at once."""

    def _get_h5_file(self: Any, path_or_io: Any, mode: str | None = None) -> Any:
        mode = mode or self.mode
        if self.archive and mode == "w" and _saving.is_under_way():
            name = getattr(self.archive.fp, "name", None)
            folder = Path(name).parent if name else None
            self.io_file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115
        elif self.archive and mode == "r" and _layouts.active_mesh() is not None:
            info = self.archive.getinfo(str(path_or_io))
            if info.compress_type != zipfile.ZIP_STORED:
                return original(self, path_or_io, mode)
            self.io_file = _member(self.archive, info)
        elif mode == "w" and _is_written_by_all(self, path_or_io):
            self._keras_spmd_is_common = True
            if _processes.process_id() == 0:
                return original(self, path_or_io, mode)
            return h5py.File(io.BytesIO(), mode=mode)
        else:
            return original(self, path_or_io, mode)
        return h5py.File(self.io_file, mode=mode)

    return _get_h5_file


def _is_written_by_all(store: Any, path_or_io: Any) -> bool:
    """Whether a library writes a store of its own (KerasHub, for LoRA): every rank has all of it,
    and the file is one."""
    is_path = not store.archive and isinstance(path_or_io, (str, Path))
    return is_path and not _saving.is_under_way() and _layouts.active_mesh() is not None


def close_or(original: Callable) -> Callable:
    """`H5IOStore.close`: a file that is not in memory is copied into its archive."""

    def close(self: Any) -> None:
        if self.mode != "w" or not self.archive or isinstance(self.io_file, io.BytesIO):
            original(self)
            if getattr(self, "_keras_spmd_is_common", False):
                _saving.heard(None)  # Nobody reads it before it is complete.
            return
        self.h5_file.close()
        # As `ZipFile.writestr` describes a file.
        info = zipfile.ZipInfo(str(self.path_or_io), time.localtime()[:6])
        info.compress_type = self.archive.compression
        info.external_attr = 0o600 << 16
        info.file_size = self.io_file.seek(0, io.SEEK_END)
        self.io_file.seek(0)
        with self.archive.open(info, "w") as target:
            shutil.copyfileobj(self.io_file, target, 2**24)
        self.io_file.close()

    return close


class _InPlace(Exception):
    """What Keras takes for a disk that it can't use, so that it reads the file where it is."""


def is_memory_sufficient_or(original: Callable) -> Callable:
    """Whether Keras may hold all weights in memory; if not, it would unpack them or ask for room
    beside the file."""

    def is_memory_sufficient(model: Any) -> bool:
        if _saving.is_under_way():
            return True  # It won't.
        if _layouts.active_mesh() is not None:
            raise _InPlace
        return original(model)

    return is_memory_sufficient
