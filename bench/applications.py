"""Who asks: applications with their models and promises, from `--model`, `--goodput`, a TOML file or an apps.csv.

`serve` calls it once, before any data is read. Pure but for reading the file that was named. Unknown keys are refused
with the nearest known one.

    [app.chat]                  # the name; `model` defaults to it
    model = "qwen"
    ttft_ms = 500               # the promise; also e2el_ms, and attain (the wanted share, 0.95)
    tpot_ms = 50
    share = 3                   # of the common traffic, by weight; or request_rate = 2.5 of its own
    input_len = 200             # instead of the run's lengths
    output_len = 64
    extra_body = { top_k = 5 }
"""

from __future__ import annotations

import csv
import dataclasses
import math
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from janus_server.errors import BadConfig
from janus_server.suggest import nearest

from .records import Application, Slo
from .traces import open_text

_PROMISES: Final = ("ttft", "tpot", "e2el")
_NUMBERS: Final = ("ttft_ms", "tpot_ms", "e2el_ms", "attain", "share", "request_rate", "input_len", "output_len")
_KEYS: Final = ("model", "extra_body", *_NUMBERS)


def parse_goodput(words: Sequence[str]) -> Slo:
    """`ttft:500 tpot:50 e2el:5000`, in milliseconds."""
    found: dict[str, float] = {}
    for word in words:
        name, colon, value = word.partition(":")
        if name not in _PROMISES or not colon:
            known = ", ".join(f"{n}:MS" for n in _PROMISES)
            raise BadConfig(f"--goodput: {word!r}; write {known}{nearest(name, _PROMISES)}")
        try:
            ms = float(value)
        except ValueError:
            ms = math.nan
        if not 0 < ms < math.inf:
            raise BadConfig(f"--goodput: {word!r}; {value!r} is not a number of milliseconds above 0")
        found[f"{name}_s"] = ms / 1000
    return Slo(**found)


def read_applications(path: Path, default: Slo) -> list[Application]:
    """From a .toml file, or from a CSV with at least the column `app`."""
    with open_text(path) as file:
        text = file.read()
    if path.suffix == ".csv" or path.name.endswith(".csv.gz"):
        found = _from_csv(text.splitlines(), path, default)
    else:
        try:
            found = _from_toml(tomllib.loads(text), path, default)
        except tomllib.TOMLDecodeError as error:
            raise BadConfig(f"{path}: {error}") from None
    if not found:
        raise BadConfig(f"{path}: it names no application")
    return found


def for_models(models: Sequence[str], slo: Slo) -> list[Application]:
    """One application a model, all with the same promise."""
    return [Application(name=model, model=model, slo=slo) for model in models]


def renamed(apps: Sequence[Application], pairs: Sequence[str]) -> list[Application]:
    """`--model-map FROM=TO`: FROM is an application's name or the model it names, `*` all that have no pair."""
    table = dict(_pair(word) for word in pairs)
    return [
        dataclasses.replace(app, model=table.get(app.name, table.get(app.model, table.get("*", app.model))))
        for app in apps
    ]


def _pair(word: str) -> tuple[str, str]:
    source, equals, target = word.partition("=")
    if not equals or not source or not target:
        raise BadConfig(f"--model-map: {word!r}; write FROM=TO")
    return source, target


def _from_toml(document: Mapping[str, Any], path: Path, default: Slo) -> list[Application]:
    for key in document:
        if key != "app":
            raise BadConfig(f"{path}: {key!r} is not known there; applications are [app.NAME]{nearest(key, ['app'])}")
    table = document.get("app", {})
    if not isinstance(table, dict):
        raise BadConfig(f"{path}: app is not a table; write [app.NAME]")
    found = []
    for name, entry in table.items():
        where = f"{path}: [app.{name}]"
        if not isinstance(entry, dict):
            raise BadConfig(f"{where} is not a table")
        for key, value in entry.items():
            if key not in _KEYS:
                raise BadConfig(f"{where} {key!r} is not known there{nearest(key, _KEYS)}")
            if key == "extra_body" and not isinstance(value, dict):
                raise BadConfig(f"{where} extra_body is not a table")
            if key == "model" and not isinstance(value, str):
                raise BadConfig(f"{where} model is not a text")
        numbers = {key: _number(entry[key], f"{where} {key}") for key in _NUMBERS if key in entry}
        extra = entry.get("extra_body", {})
        found.append(_application(name, str(entry.get("model", name)), numbers, extra, default, where))
    return found


def _from_csv(lines: Sequence[str], path: Path, default: Slo) -> list[Application]:
    """`app`, and where they exist: model or llm, ttft_slo_s, tpot_slo_ms, and the keys of the TOML file."""
    reader = csv.DictReader(lines)
    if "app" not in (reader.fieldnames or ()):
        raise BadConfig(f"{path}: there is no column app")
    found = []
    for number, row in enumerate(reader, 2):
        where = f"{path}: line {number}:"
        numbers = {key: _number(row[key], f"{where} {key}") for key in _NUMBERS if row.get(key)}
        if row.get("ttft_slo_s"):
            numbers["ttft_ms"] = 1000 * _number(row["ttft_slo_s"], f"{where} ttft_slo_s")
        if row.get("tpot_slo_ms"):
            numbers["tpot_ms"] = _number(row["tpot_slo_ms"], f"{where} tpot_slo_ms")
        name = row["app"] or ""
        if not name:
            raise BadConfig(f"{where} the application has no name")
        model = str(row.get("model") or row.get("llm") or name)
        found.append(_application(name, model, numbers, {}, default, where))
    return found


def _application(
    name: str, model: str, numbers: Mapping[str, float], extra: Mapping[str, Any], default: Slo, where: str
) -> Application:
    promised = {f"{n}_s": numbers[f"{n}_ms"] / 1000 for n in _PROMISES if f"{n}_ms" in numbers}
    slo = Slo(**promised) if promised else default
    attain = numbers.get("attain", slo.attain)
    if attain > 1:
        raise BadConfig(f"{where} attain: {attain:g} is not a share of 1")
    return Application(
        name=name,
        model=model,
        slo=slo._replace(attain=attain),
        share=numbers.get("share", 1.0),
        request_rate=numbers.get("request_rate"),
        input_tokens=_count(numbers.get("input_len"), f"{where} input_len"),
        output_tokens=_count(numbers.get("output_len"), f"{where} output_len"),
        extra_body=extra,
    )


def _number(value: object, where: str) -> float:
    try:
        number = math.nan if isinstance(value, bool) else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        number = math.nan
    if not 0 < number < math.inf:
        raise BadConfig(f"{where}: {value!r} is not a number above 0")
    return number


def _count(value: float | None, where: str) -> int | None:
    if value is None:
        return None
    if value != int(value):
        raise BadConfig(f"{where}: {value:g} is not a whole number")
    return int(value)
