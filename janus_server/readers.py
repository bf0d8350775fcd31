"""Readers of settings: from a raw value (TOML, --set text or flag text) to the field's type, or ValueError.

`settings` puts them into its table and `config` calls them; the error says what is allowed. They open nothing.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

from janus_server import units
from janus_server.suggest import nearest

PAGE_BYTES_MIN: Final = 4096
NODE_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")

E = TypeVar("E", bound=enum.Enum)
T = TypeVar("T")


def choice(kind: type[E]) -> Callable[[Any], E]:
    names = [member.value for member in kind]

    def read(raw: Any) -> E:
        if raw not in names:
            raise ValueError(f"{raw!r} is not one of {', '.join(names)}{nearest(str(raw), names)}")
        return kind(raw)

    return read


def between(low: int, high: int, what: str) -> Callable[[Any], int]:
    def read(raw: Any) -> int:
        negative = isinstance(raw, str) and raw.startswith("-") and raw[1:].isascii() and raw[1:].isdigit()
        count = int(raw) if negative else units.parse_count(raw)
        if not low <= count <= high:
            raise ValueError(f"{raw!r} is not {what} between {low} and {high}")
        return count

    return read


def truth(raw: Any) -> bool:
    words = {True: True, False: False, "true": True, "false": False, "yes": True, "no": False, "1": True, "0": False}
    if not isinstance(raw, bool | str) or raw not in words:
        raise ValueError(f"{raw!r} is not true or false")
    return words[raw]


def switch(raw: Any) -> bool:
    if raw in ("on", "off"):
        return bool(raw == "on")
    try:
        return truth(raw)
    except ValueError:
        raise ValueError(f"{raw!r} is not on or off") from None


def collector(raw: Any) -> str:
    if not isinstance(raw, str) or not re.fullmatch(r"https?://[A-Za-z0-9._:\[\]-]{1,253}(/[A-Za-z0-9._~/-]*)?", raw):
        raise ValueError(f"{raw!r} is not the address of a collector, such as http://127.0.0.1:4318")
    return raw


def page_bytes(raw: Any) -> int:
    size_bytes = units.parse_bytes(raw)
    if size_bytes < PAGE_BYTES_MIN or size_bytes & (size_bytes - 1) or size_bytes > 1 << 30:
        raise ValueError(f"{raw!r} is not a page size; a power of two from 4KiB to 1GiB, such as 2MiB")
    return size_bytes


def host(raw: Any) -> str:
    if not isinstance(raw, str) or not re.fullmatch(r"[A-Za-z0-9.:_%-]{1,253}", raw):
        raise ValueError(f"{raw!r} is not a host name or address, such as 127.0.0.1 or 0.0.0.0")
    return raw


def folder(raw: Any) -> Path:
    if not isinstance(raw, str) or not raw:
        raise ValueError(f"{raw!r} is not a folder")
    return Path(raw).expanduser().absolute()


def meeting(raw: Any) -> str:
    """An address stays as it is; a folder is made whole."""
    if not isinstance(raw, str) or not raw:
        raise ValueError(f"{raw!r} is neither a run directory nor etcd://HOST:2379/NAME")
    return raw if "://" in raw else str(folder(raw))


def file(raw: Any) -> Path:
    if not isinstance(raw, str) or not raw:
        raise ValueError(f"{raw!r} is not a file")
    return Path(raw).expanduser().absolute()


def bytes_or_none(raw: Any) -> int:
    """A size; 0 or "off" is none at all."""
    return 0 if raw in (0, "0", "off") and not isinstance(raw, bool) else units.parse_bytes(raw)


def node_name(raw: Any) -> str:
    if not isinstance(raw, str) or not NODE_NAME.fullmatch(raw):
        raise ValueError(f"{raw!r} is not a node's name: up to 64 letters, digits, dots and dashes, no dash first")
    return raw


def auto(read: Callable[[Any], T]) -> Callable[[Any], T | None]:
    """A reader that also takes "auto" (None)."""
    return lambda raw: None if raw == "auto" else read(raw)


def never(read: Callable[[Any], T]) -> Callable[[Any], T | None]:
    """A reader that also takes "never" (None)."""
    return lambda raw: None if raw == "never" else read(raw)


def positive_seconds(raw: Any) -> float:
    duration_s = units.parse_seconds(raw)
    if duration_s == 0:
        raise ValueError(f"{raw!r} is not a duration of more than zero")
    return duration_s


def promised_seconds(raw: Any) -> float:
    duration_s = units.parse_seconds(raw)
    if not 1e-6 <= duration_s <= 86400:
        raise ValueError(f"{raw!r} is no promise that could be kept or broken; from 1us to 24h, such as 500ms")
    return duration_s


def names_of(what: str, shape: str) -> Callable[[Any], tuple[str, ...]]:
    """A list of names of that shape: a list in TOML, else a text with commas. Lower case, since case means nothing."""

    def read(raw: Any) -> tuple[str, ...]:
        listed = raw.split(",") if isinstance(raw, str) else raw
        if not isinstance(listed, list) or not all(isinstance(one, str) for one in listed):
            raise ValueError(f"{raw!r} is not a list of {what}")
        names = [one.strip().lower().removesuffix("/") for one in listed if one.strip()]
        for name in names:
            if not re.fullmatch(shape, name):
                raise ValueError(f"{name!r} is not one of {what}; each is named in full, without *")
        return tuple(names)

    return read


def share(raw: Any) -> float:
    """A share of requests, more than 0 and at most 1."""
    if isinstance(raw, bool) or not isinstance(raw, int | float) or not 0 < raw <= 1:
        raise ValueError(f"{raw!r} is not a share of more than 0 and at most 1, such as 0.99")
    return float(raw)


def priority(raw: Any) -> int:
    if isinstance(raw, bool) or not isinstance(raw, int) or not -100 <= raw <= 100:
        raise ValueError(f"{raw!r} is not a whole number from -100 to 100, where higher goes first")
    return raw


def key_name(raw: Any) -> str:
    if not isinstance(raw, str) or not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", raw):
        raise ValueError(f"{raw!r} is not the name of an API key, as it stands in the key file (never the key itself)")
    return raw
