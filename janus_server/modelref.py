"""What a model argument means: NAME=PATH, a path, the alias of a packaged model, or a hub id "org/name".

Called by `config`, once for each model. It decides which file or folder is meant and under which name it is served; it
does not look inside (that is `model/load`). The network is touched only for a hub id that is not in the local cache.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final

import msgspec

from janus_server.errors import BadConfig
from janus_server.packaged import PACKAGED, locate, packaged
from janus_server.suggest import nearest
from janus_server.types import Sampling


class ModelOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How one model is treated on the node.

    Of KV cache it always has room for kv_floor_bytes while it is on the device, and never takes more than
    kv_ceiling_bytes. It leaves the device after idle_s without a request (None: not for that), never while it is
    pinned, and is loaded at start with preload, where there is room. max_model_len goes before the server's.
    """

    kv_floor_bytes: int = 0
    kv_ceiling_bytes: int | None = None
    idle_s: float | None = None
    pinned: bool = False
    preload: bool = True
    max_model_len: int | None = None


class ModelEntry(msgspec.Struct, frozen=True):
    """One served model: the name clients send, and the checkpoint (a folder or a .gguf file) it is read from.

    sampling stands where neither the client nor the checkpoint says how to sample.
    """

    name: str
    path: Path
    sampling: Sampling = Sampling()
    options: ModelOptions = ModelOptions()


NAME: Final = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._:@/+-]{0,126}[A-Za-z0-9])?")
_MOST_SHOWN: Final = 200
_HUB_ID: Final = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)
# Weights are safetensors or GGUF; everything else a checkpoint needs is small. Pickled weights are never fetched.
_HUB_FILES: Final = ("*.safetensors", "*.json", "*.jinja", "tokenizer.model", "*.txt")


def resolve(text: str) -> ModelEntry:
    """The entry that one command-line argument stands for; BadConfig when there is none."""
    left, equals, right = text.partition("=")
    if equals and not _is_there(text):
        return named(left, right)
    entry = _find(text)
    check_name(entry.name, hint=f"write NAME={text}")
    return entry


def named(name: str, reference: str) -> ModelEntry:
    """The entry for a reference whose name the user chose."""
    if not reference:
        raise BadConfig(f"model {name!r} has no path; write {name}=PATH")
    check_name(name, hint="choose another")
    return msgspec.structs.replace(_find(reference), name=name)


def rename(entry: ModelEntry, name: str) -> ModelEntry:
    """The same checkpoint under the name that --served-model-name gave."""
    check_name(name, hint="choose another --served-model-name")
    return msgspec.structs.replace(entry, name=name)


def unique(entries: tuple[ModelEntry, ...]) -> tuple[ModelEntry, ...]:
    """The same entries; BadConfig when two share a name, since a request could not tell them apart."""
    seen: dict[str, Path] = {}
    for entry in entries:
        if entry.name in seen:
            raise BadConfig(
                f"two models are called {entry.name!r} ({seen[entry.name]} and {entry.path}); "
                f"give one another name: NAME={entry.path}"
            )
        seen[entry.name] = entry.path
    return entries


def check_name(name: str, hint: str, what: str = "a model") -> None:
    """BadConfig unless clients can send it."""
    if not NAME.fullmatch(name):
        raise BadConfig(
            f"{shown(name)!r} cannot name {what} (letters, digits and . _ : @ / + - inside, at most 128); {hint}"
        )
    if {".", ".."} & set(name.split("/")):  # clients resolve these in an address, and would mean another model
        raise BadConfig(f"{name!r} cannot name {what}: no part of it may be . or ..; {hint}")


def shown(text: str) -> str:
    """What a message repeats of it."""
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}…"


def _find(reference: str) -> ModelEntry:
    """The checkpoint, under the name it has when the user gives none."""
    known = packaged(reference)
    if known is not None:
        return ModelEntry(known.alias, locate(known), known.sampling)
    path = Path(os.path.expanduser(reference))
    if _is_there(path):
        path = path.resolve()
        _check_checkpoint(path)
        return ModelEntry(path.stem if path.is_file() else path.name, path)
    if _HUB_ID.fullmatch(reference) and not reference.endswith(".gguf"):
        return ModelEntry(reference, _from_hub(reference))
    hint = nearest(reference, [model.alias for model in PACKAGED])
    raise BadConfig(
        f"model {shown(reference)!r} is neither a folder, a .gguf file nor a known alias{hint}; "
        f"aliases: {', '.join(model.alias for model in PACKAGED)}"
    )


def _is_there(path: str | Path) -> bool:
    """Also for what can be no path, being too long: there is nothing then."""
    return os.path.exists(path)


def _check_checkpoint(path: Path) -> None:
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise BadConfig(f"{path} holds no config.json; a model is a Hugging Face folder or a .gguf file")
    elif path.suffix != ".gguf":
        raise BadConfig(f"{path} is not a .gguf file; a model is a Hugging Face folder or a .gguf file")


def _from_hub(repository: str) -> Path:
    """The snapshot folder of a hub repository: from the local cache when it is there, else downloaded."""
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
    except ImportError:
        raise BadConfig(
            f"model {repository!r} is no local path, and huggingface_hub is not installed to fetch it; "
            "install huggingface_hub or give the path of a downloaded model"
        ) from None
    patterns = list(_HUB_FILES)
    try:
        return Path(snapshot_download(repository, allow_patterns=patterns, local_files_only=True))
    except LocalEntryNotFoundError:
        pass
    except HFValidationError as error:
        raise BadConfig(f"model {repository!r} is not a hub id: {error}") from None
    # Releases of huggingface_hub differ in the HTTP library below them; its errors are bases of their own one.
    transport = [kind for kind in HfHubHTTPError.__mro__ if kind.__module__.startswith(("httpx", "requests"))]
    failures: tuple[type[Exception], ...] = (OSError, *transport)
    try:
        return Path(snapshot_download(repository, allow_patterns=patterns))
    except failures as error:
        reason = str(error).strip().splitlines()
        raise BadConfig(
            f"model {repository!r} is no local path, and the hub could not give it "
            f"({reason[0] if reason else type(error).__name__}); give the path of a downloaded model: NAME=PATH"
        ) from None
