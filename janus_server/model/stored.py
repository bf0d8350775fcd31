"""How tensors lie in files: encodings, entries, and bounded reads. Used by both header readers and by the loader.

A file is read with pread only, never mapped: a file cut short while it is read must be a refusal, not a SIGBUS. Nothing
here trusts a number that came from a file before it was compared with the file's size.
"""

from __future__ import annotations

import dataclasses
import enum
import os
import stat
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType

from janus_server.errors import BadModel


class Encoding(enum.Enum):
    """Element encodings that are read: label, values per block, bytes per block, GGUF's type number."""

    F32 = ("F32", 1, 4, 0)
    F16 = ("F16", 1, 2, 1)
    BF16 = ("BF16", 1, 2, 30)
    Q4_0 = ("Q4_0", 32, 18, 2)
    Q4_1 = ("Q4_1", 32, 20, 3)
    Q8_0 = ("Q8_0", 32, 34, 8)
    Q4_K = ("Q4_K", 256, 144, 12)
    Q6_K = ("Q6_K", 256, 210, 14)

    @property
    def label(self) -> str:
        return self.value[0]

    @property
    def block_values(self) -> int:
        return self.value[1]

    @property
    def block_bytes(self) -> int:
        return self.value[2]

    @property
    def ggml_type(self) -> int:
        return self.value[3]

    def row_bytes(self, k: int) -> int:
        """Bytes of one row of k values; k is a multiple of block_values."""
        return k // self.block_values * self.block_bytes


@dataclasses.dataclass(frozen=True, slots=True)
class FileStamp:
    """A file as it was when its header was checked; the loader refuses one that has changed since."""

    path: Path
    size_bytes: int
    mtime_ns: int
    inode: int


@dataclasses.dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor: row-major shape (outermost first), `nbytes` bytes at `offset` of `file`, checked against its size."""

    name: str
    encoding: Encoding
    shape: tuple[int, ...]
    file: FileStamp
    offset: int
    nbytes: int


class OpenFile:
    """A regular file open for reading. A context manager; a read past its end is `BadModel`."""

    def __init__(self, path: Path) -> None:
        try:
            # O_NONBLOCK so that a FIFO put in a model folder cannot hang the launch; it is refused below.
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise BadModel(f"{path.name} cannot be opened: {error.strerror}.") from error
        status = os.fstat(self._fd)
        self.stamp = FileStamp(path, status.st_size, status.st_mtime_ns, status.st_ino)
        if not stat.S_ISREG(status.st_mode):
            self.close()
            raise BadModel(f"{path.name} is not a regular file.")

    def __enter__(self) -> OpenFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        os.close(self._fd)

    def read_into(self, target: memoryview, offset: int) -> None:
        """Fill `target` (bytes) from `offset`, in several calls where the kernel caps one at 2 GiB."""
        name, done = self.stamp.path.name, 0
        while done < len(target):
            try:
                got = os.preadv(self._fd, [target[done:]], offset + done)
            except OSError as error:
                raise BadModel(f"{name} cannot be read at byte {offset + done}: {error.strerror}.") from error
            if got == 0:
                raise BadModel(f"{name} ends at byte {offset + done}; {len(target) - done} more were expected.")
            done += got

    def read(self, offset: int, count: int) -> bytes:
        """Exactly `count` bytes from `offset`; the caller has bounded count by the file's size."""
        data = bytearray(count)
        self.read_into(memoryview(data), offset)
        return bytes(data)


def open_unchanged(stamp: FileStamp) -> OpenFile:
    """Open a file whose header was checked before, refusing one that was replaced or rewritten meanwhile."""
    file = OpenFile(stamp.path)
    if file.stamp != stamp:
        file.close()
        raise BadModel(f"{stamp.path.name} changed while it was being loaded; load it again.")
    return file


def is_unchanged(stamp: FileStamp) -> bool:
    """Whether the file is the one whose header was checked. OSError where there is none."""
    status = os.stat(stamp.path)
    return (status.st_size, status.st_mtime_ns, status.st_ino) == (stamp.size_bytes, stamp.mtime_ns, stamp.inode)


def read_small_file(path: Path, limit_bytes: int) -> bytes:
    """A whole small file (a config), refused when larger than the limit."""
    with OpenFile(path) as file:
        if file.stamp.size_bytes > limit_bytes:
            raise BadModel(f"{path.name} has {file.stamp.size_bytes} bytes; at most {limit_bytes} are read.")
        return file.read(0, file.stamp.size_bytes)


def check_disjoint(entries: Iterable[TensorEntry]) -> None:
    """Refuse two tensors of one file that share a byte; the entries are already inside their files."""
    ends: dict[Path, tuple[int, str]] = {}
    for entry in sorted(entries, key=lambda entry: (str(entry.file.path), entry.offset, entry.nbytes)):
        end, before = ends.get(entry.file.path, (0, ""))
        if entry.offset < end:
            raise BadModel(f"{entry.file.path.name}: tensor {entry.name!r:.120} overlaps tensor {before!r:.120}.")
        ends[entry.file.path] = (entry.offset + entry.nbytes, entry.name)
