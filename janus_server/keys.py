"""API keys: read from a file or the environment, kept as digests, compared in constant time.

`config` takes the keys of the environment from here, `serve` those of the file; `http.gate` asks a `KeyRing` whose key
a client sent. A key itself is never kept, shown or logged: only its name is.

A file whose name ends in .toml names its keys and limits them; any other file holds one key a line, # begins a comment:

    [keys.alice]
    key = "…"                    # or sha256 = "…", the digest in hex, so that the file need not hold the key
    requests = 8                 # calls in progress
    requests_per_minute = 60
    tokens_per_minute = 100_000  # prompts and answers
    tokens_per_request = 8_000
    models = ["chat"]            # default: all
    [keys.operator]
    sha256 = "…"
    admin = true
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from janus_server.admission import KeyLimits
from janus_server.errors import BadConfig
from janus_server.suggest import nearest

USER_VARIABLE: Final = "JANUS_API_KEY"
ADMIN_VARIABLE: Final = "JANUS_ADMIN_KEY"
_KEY: Final = re.compile(r"[\x21-\x7e]{8,512}")
_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")
_COUNTS: Final = ("requests", "requests_per_minute", "tokens_per_minute", "tokens_per_request")
_FIELDS: Final = ("key", "sha256", *_COUNTS, "models", "admin")
_MOST_KEYS: Final = 10_000
_MOST_BYTES: Final = 4 << 20


class Key(msgspec.Struct, frozen=True):
    """Who a client is: the name of its key, the key's SHA-256 and what it may do. An admin key may do everything."""

    name: str
    digest: bytes
    limits: KeyLimits = KeyLimits()
    admin: bool = False

    def __repr__(self) -> str:
        """Without the digest, from which a weak key could be found."""
        return f"Key({self.name!r})"


class KeyRing:
    """The keys in force. Without any, nobody has to send one.

    local is the admin key that a server makes for its own user (`localkey`). It counts as no key of the configuration:
    nobody has to send one because of it, and it opens nothing while an admin key is configured.
    """

    def __init__(self, keys: Iterable[Key] = (), local: Key | None = None) -> None:
        self._keys = tuple(keys)
        configured = any(key.admin for key in self._keys)
        self._valid = self._keys if local is None or configured else (*self._keys, local)
        self.local = local

    def with_local(self, local: Key) -> KeyRing:
        return KeyRing(self._keys, local)

    def __len__(self) -> int:
        return len(self._keys)

    @property
    def has_admin(self) -> bool:
        return any(key.admin for key in self._valid)

    def find(self, presented: str) -> Key | None:
        """The key that was sent, or None. Every key is compared, each in a time that does not tell how much agrees."""
        digest = _digest(presented)
        found = None
        for key in self._valid:
            if hmac.compare_digest(key.digest, digest):
                found = key
        return found

    def limits(self) -> dict[str, KeyLimits]:
        return {key.name: key.limits for key in self._keys}


def from_environment(variable: str, text: str) -> Key:
    if not _KEY.fullmatch(text):
        raise BadConfig(f"{variable} {_WANTED}")
    return Key(variable, _digest(text), admin=variable == ADMIN_VARIABLE)


def local_admin(text: str) -> Key:
    """The admin key of whoever runs the server; its name is none that a file could give."""
    return Key("(local admin)", _digest(text), admin=True)


def load(environment: Iterable[Key], file: Path | None, local: Key | None = None) -> KeyRing:
    """The keys of the environment and of the file, or BadConfig. Two names for one key are refused."""
    keys = [*environment, *(read_file(file) if file is not None else ())]
    seen: dict[bytes, str] = {}
    for key in keys:
        if key.digest in seen:
            raise BadConfig(f"the keys {seen[key.digest]} and {key.name} are the same key")
        seen[key.digest] = key.name
    return KeyRing(keys, local)


def read_file(path: Path) -> tuple[Key, ...]:
    """The keys of a file that nobody but its owner can read."""
    try:
        # Opened once and judged by what was opened: a path could point elsewhere a moment later.
        with open(path, "rb", opener=_open_without_waiting) as file:
            _check_owner(path, os.fstat(file.fileno()))
            data = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise BadConfig(f"cannot read the key file {path}: {error.strerror}") from None
    if len(data) > _MOST_BYTES:
        raise BadConfig(f"the key file {path} is larger than 4 MiB")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        raise BadConfig(f"the key file {path} is not UTF-8 text") from None
    keys = _of_toml(path, text) if path.suffix == ".toml" else _of_lines(path, text)
    if not keys:
        raise BadConfig(f"the key file {path} holds no key")
    if len(keys) > _MOST_KEYS:
        raise BadConfig(f"the key file {path} holds more than {_MOST_KEYS} keys")
    return keys


_WANTED: Final = "must be 8 to 512 printable characters without spaces; `openssl rand -hex 32` makes a good key"


def _open_without_waiting(path: str, flags: int) -> int:
    # A named pipe would otherwise block for ever.
    return os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)


def _check_owner(path: Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise BadConfig(f"the key file {path} is not a regular file")
    if status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        mode = stat.S_IMODE(status.st_mode)
        raise BadConfig(f"others than its owner may use the key file {path} (mode {mode:03o}); run: chmod 600 {path}")


def _of_lines(path: Path, text: str) -> tuple[Key, ...]:
    keys = []
    for number, line in enumerate(text.splitlines(), start=1):
        word = re.sub(r"(^|\s)#.*", "", line).strip()
        if word.startswith("[") or re.search(r"\s=\s|=\s*[\"']", word):
            raise BadConfig(f"{path} line {number} looks like TOML; a key file in TOML has a name that ends in .toml")
        if word and not _KEY.fullmatch(word):
            raise BadConfig(f"the key in {path} line {number} {_WANTED}")
        if word:
            keys.append(Key(f"line-{number}", _digest(word)))
    return tuple(keys)


def _of_toml(path: Path, text: str) -> tuple[Key, ...]:
    import tomllib

    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        # The decoder's own words may quote the line, and with it a key.
        raise BadConfig(f"the key file {path} is not TOML") from None
    except RecursionError:
        raise BadConfig(f"the key file {path} is nested too deeply") from None
    listed = table.pop("keys", {})
    if table or not isinstance(listed, dict):
        raise BadConfig(f"the key file {path} takes tables [keys.NAME] and nothing else")
    return tuple(_entry(f"{path} [keys.{name}]", name, fields) for name, fields in listed.items())


def _entry(where: str, name: str, fields: Any) -> Key:
    if not _NAME.fullmatch(name) or name in (USER_VARIABLE, ADMIN_VARIABLE):
        raise BadConfig(f"{where}: a key's name is 1 to 64 letters, digits, dots, dashes or underscores")
    if not isinstance(fields, Mapping):
        raise BadConfig(f"{where} must be a table with key or sha256")
    for field in fields:
        if field not in _FIELDS:
            raise BadConfig(f"{where}: there is no such setting as {field!r}{nearest(field, _FIELDS)}")
    counts = {field: _count(where, field, fields.get(field)) for field in _COUNTS}
    models = fields.get("models")
    if models is not None and not (isinstance(models, list) and all(isinstance(one, str) for one in models)):
        raise BadConfig(f"{where}: models must be a list of names")
    admin = fields.get("admin", False)
    if not isinstance(admin, bool):
        raise BadConfig(f"{where}: admin must be true or false")
    limits = KeyLimits(**counts, models=None if models is None else frozenset(models))
    return Key(name, _entry_digest(where, fields), limits, admin)


def _entry_digest(where: str, fields: Mapping[str, Any]) -> bytes:
    key, sha256 = fields.get("key"), fields.get("sha256")
    if (key is None) is (sha256 is None):
        raise BadConfig(f"{where} needs either key or sha256")
    if key is not None:
        if not isinstance(key, str) or not _KEY.fullmatch(key):
            raise BadConfig(f"{where}: key {_WANTED}")
        return _digest(key)
    if not isinstance(sha256, str) or not re.fullmatch(r"[0-9A-Fa-f]{64}", sha256):
        raise BadConfig(f"{where}: sha256 must be the 64 hex digits of the key's SHA-256 (printf %s KEY | sha256sum)")
    return bytes.fromhex(sha256)


def _count(where: str, field: str, value: Any) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 10**12:
        raise BadConfig(f"{where}: {field} must be a whole number from 1 to 10^12")
    return value


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
