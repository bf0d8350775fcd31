"""Whether what a run is going to write can be written, asked before it begins: an hour's work must not be lost.

Called by the commands that simulate, each for its own folder or file. Nothing that is there is changed.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from janus_server.errors import BadConfig


def check_folder(folder: Path | None) -> None:
    """It is made where it is not there yet. None: nothing is to be written."""
    if folder is None:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except (OSError, ValueError) as error:
        raise BadConfig(f"{folder}: nothing can be written there: {_why(error)}") from None


def check_file(path: Path | None) -> None:
    """A file that is not there yet is not there afterwards either."""
    if path is None:
        return
    try:
        new = not path.exists()
        with path.open("ab"):
            pass
        if new:
            path.unlink()
    except (OSError, ValueError) as error:
        raise BadConfig(f"{path}: it cannot be written: {_why(error)}") from None


def _why(error: OSError | ValueError) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
