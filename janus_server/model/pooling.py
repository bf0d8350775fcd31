"""How a checkpoint says that its embeddings are made: sentence-transformers' file, or a key of a GGUF file.

`lifecycle` asks once, when a model is loaded. Most checkpoints say nothing, and then the mean is what people expect. It
is a hint and nothing else: what cannot be read counts as absent, and a client may always ask for the other way.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Final

from janus_server.errors import BadModel
from janus_server.model.checkpoint import Checkpoint
from janus_server.model.safetensors import parse_json_object
from janus_server.model.stored import read_small_file
from janus_server.types import Pooling

_HINT: Final = Path("1_Pooling", "config.json")
_HINT_BYTES: Final = 64 << 10
_GGUF_LAST: Final = 3


def pooling_of(checkpoint: Checkpoint) -> Pooling:
    """LAST where the checkpoint says so, else MEAN."""
    if checkpoint.is_gguf:
        arch = checkpoint.metadata.get("general.architecture")
        last = checkpoint.metadata.get(f"{arch}.pooling_type") == _GGUF_LAST
    else:
        last = _says_last(checkpoint.path)
    return Pooling.LAST if last else Pooling.MEAN


def _says_last(folder: Path) -> bool:
    with contextlib.suppress(BadModel, OSError, RuntimeError):
        root, real = folder.resolve(), (folder / _HINT).resolve()
        # As for every other file of a model: inside its folder, or where the hub's own cache links to.
        blobs = root.parent.parent / "blobs"
        if real.is_file() and (real.is_relative_to(root) or (root.parent.name == "snapshots" and real.parent == blobs)):
            hint = parse_json_object(read_small_file(real, _HINT_BYTES), _HINT.name)
            return hint.get("pooling_mode_lasttoken") is True
    return False
