"""Files that hold a secret in one line: read only where nobody but their owner can.

Called for the cluster's secret and for the login to etcd. What such a file holds is neither logged nor repeated.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Final

from janus_server.errors import BadConfig

_MOST_BYTES: Final = 4096


def read_secret_file(path: Path, what: str) -> bytes:
    """The first 4 KiB, without white space around them; BadConfig where it cannot be read, or others could."""
    try:
        # Opened once and judged by what was opened; a named pipe would block for ever.
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise BadConfig(f"cannot read {what} {path}: {error.strerror}") from None
    try:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode):
            raise BadConfig(f"{what} {path} is not a regular file")
        if status.st_uid != os.geteuid() or status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise BadConfig(f"others than you may use {what} {path}; run: chmod 600 {path}")
        return os.read(file, _MOST_BYTES).strip()
    finally:
        os.close(file)
