"""The tables of the config file: [models], with each model's options, and [applications.NAME].

`config` calls it with what TOML gave. A key that is not known is refused with the nearest one, a value with what it may
be; the sentence begins with the table's name. Which models there are is `modelref`'s to find, whether an application
fits them `applications`'s to say.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final, TypeVar

import msgspec

from janus_server import modelref, units
from janus_server.applications import Application
from janus_server.errors import BadConfig
from janus_server.modelref import ModelEntry, ModelOptions
from janus_server.readers import between, key_name, never, positive_seconds, priority, promised_seconds, share, truth
from janus_server.suggest import nearest
from janus_server.types import Promise

Reader = Callable[[Any], Any]
T = TypeVar("T")

_LINES: Final = '[models] takes lines NAME = "path, alias or hub id", or tables [models.NAME] with path = "…"'
# In the file: the field it fills and how it is read.
_OPTIONS: Final[Mapping[str, tuple[str, Reader]]] = MappingProxyType({
    "kv_floor": ("kv_floor_bytes", units.parse_bytes),
    "kv_ceiling": ("kv_ceiling_bytes", units.parse_bytes),
    "idle": ("idle_s", never(positive_seconds)),
    "pin": ("pinned", truth),
    "preload": ("preload", truth),
    "max_model_len": ("max_model_len", between(1, 1 << 24, "a number of tokens")),
})  # fmt: skip
_APPLICATION: Final[Mapping[str, Reader]] = MappingProxyType({
    "model": lambda raw: _name(raw),
    "ttft": promised_seconds,
    "tpot": promised_seconds,
    "attain": share,
    "priority": priority,
    "key": key_name,
})  # fmt: skip


def models(table: Any, file: str, defaults: ModelOptions) -> tuple[ModelEntry, ...]:
    """The entries of [models], each with its options, or with `defaults` where it says nothing."""
    if not isinstance(table, dict):
        raise BadConfig(f"{file}: {_LINES}")
    return tuple(_model(name, value, f"[models.{name}] in {file}", defaults) for name, value in table.items())


def applications(table: Any, file: str) -> tuple[Application, ...]:
    """Those of [applications]; `applications.check` says whether they fit the models."""
    if not isinstance(table, dict) or not all(isinstance(fields, dict) for fields in table.values()):
        raise BadConfig(f'{file}: [applications] takes tables [applications.NAME] with model = "…"')
    return tuple(_application(name, fields, f"[applications.{name}] in {file}") for name, fields in table.items())


def _model(name: str, value: Any, where: str, defaults: ModelOptions) -> ModelEntry:
    if isinstance(value, str):
        return msgspec.structs.replace(modelref.named(name, value), options=defaults)
    if not isinstance(value, dict):
        raise BadConfig(f"{where}: {value!r} is no model; {_LINES}")
    given = dict(value)
    path = given.pop("path", None)
    if not isinstance(path, str):
        raise BadConfig(f'{where}: path must say which model, as in path = "~/models/chat.gguf"{_dotted(name, given)}')
    read = _read(given, {key: reader for key, (_, reader) in _OPTIONS.items()}, ("path", *_OPTIONS), where)
    options = msgspec.structs.replace(defaults, **{_OPTIONS[key][0]: found for key, found in read.items()})
    ceiling_bytes = options.kv_ceiling_bytes
    if ceiling_bytes is not None and options.kv_floor_bytes > ceiling_bytes:
        raise BadConfig(
            f"{where}: kv_floor {units.format_bytes(options.kv_floor_bytes)} is more than kv_ceiling "
            f"{units.format_bytes(ceiling_bytes)}; lower the one or raise the other"
        )
    return msgspec.structs.replace(modelref.named(name, path), options=options)


def _application(name: str, fields: Mapping[str, Any], where: str) -> Application:
    modelref.check_name(name, hint="choose another", what="an application")
    if any(isinstance(value, dict) for value in fields.values()):
        raise BadConfig(f"{where} takes no tables{_dotted(name, fields, 'applications')}")
    read = _read(fields, _APPLICATION, tuple(_APPLICATION), where)
    promise = Promise(read.get("ttft"), read.get("tpot"), read.get("attain", Promise().attain))
    if "attain" in read and promise.ttft_s is None and promise.tpot_s is None:
        raise BadConfig(f"{where}: attain is a share of requests that keep a promise; promise ttft, tpot or both")
    return Application(name, read.get("model", name), promise, read.get("priority", 0), read.get("key"))


def _read(
    given: Mapping[str, Any], readers: Mapping[str, Reader], known: tuple[str, ...], where: str
) -> dict[str, Any]:
    """Each value as its reader has it, with - or _ between the words of a key."""
    found = {}
    for raw_key, raw in given.items():
        key = raw_key.replace("-", "_")
        if key not in readers:
            hint = nearest(key, known) or f"; it takes {', '.join(known)}"
            raise BadConfig(f"{where}: there is no such setting as {raw_key!r}{hint}")
        try:
            found[key] = readers[key](raw)
        except ValueError as error:
            raise BadConfig(f"{where}: {key}: {error}") from None
    return found


def _name(raw: Any) -> str:
    if not isinstance(raw, str) or not modelref.NAME.fullmatch(raw):
        raise ValueError(f"{raw!r} is not the name of a model")
    return raw


def _dotted(name: str, given: Mapping[str, Any], table: str = "models") -> str:
    """A hint for TOML's reading of a dot, which begins a table inside the table."""
    inner = next((key for key, value in given.items() if isinstance(value, dict)), None)
    if inner is None or not re.fullmatch(r"[\w.-]+", inner):
        return ""
    return f'; a name with a dot needs quotes: [{table}."{name}.{inner}"]'
