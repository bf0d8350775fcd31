"""A scenario as it stands in TOML: one record per section with its defaults and ranges, and how files are read.

`scenario` builds from these. Unknown keys are refused with the nearest known one, numbers outside their ranges with
what is allowed. Options ("workload.factor" = "2") are put in before anything is checked.
"""

from __future__ import annotations

import re
import tomllib
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from janus_server.errors import BadConfig
from janus_server.suggest import nearest

SCENARIOS: Final = Path(__file__).with_name("scenarios")
Positive = Annotated[float, Meta(gt=0, lt=1e12)]
NotNegative = Annotated[float, Meta(ge=0, lt=1e12)]
Moment = Annotated[float, Meta(ge=0, le=60 * 86_400)]
"""As late as a scenario may last."""
Count = Annotated[int, Meta(ge=1, le=1_000_000)]
Share = Annotated[float, Meta(gt=0, lt=1)]
Name = Annotated[str, Meta(min_length=1, max_length=200)]


class Hosts(msgspec.Struct, frozen=True, kw_only=True):
    """Alike hosts. devices are those of one host, host_memory is what it has for copies of weights. warm: copies are
    there from the start, as in the published system, where every engine begins with all models in host memory. memory:
    of a device, instead of its data sheet's. domain: hosts of the same name have fast links to each other; "" stands
    for a domain for each host."""

    hosts: Annotated[int, Meta(ge=1, le=10_000)] = 1
    devices: Annotated[int, Meta(ge=1, le=1024)] = 8
    kind: str = "Ascend 910C die"
    host_memory: str | int = "2400GB"
    warm: bool = True
    memory: str | int | None = None
    domain: str = "one"


class ClusterSpec(Hosts, frozen=True, kw_only=True):
    """more: hosts of other kinds. page: of the pool that weights and KV share."""

    page: str | int = "2MiB"
    more: list[Hosts] = []


class BurstSpec(msgspec.Struct, frozen=True, kw_only=True):
    """app: a name. at_s counts from the start of the slice."""

    app: Name
    at_s: Moment
    multiple: Annotated[float, Meta(ge=1, le=1000)]
    ramp_s: Positive = 3.0
    hold_s: NotNegative = 30.0


class TideSpec(msgspec.Struct, frozen=True, kw_only=True):
    """So many cycles over the slice, each application at a phase of its own."""

    cycles: Positive = 1.5
    amplitude: Annotated[float, Meta(ge=0, lt=1)] = 0.4


class SplitSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Applications of one kind of request, one for each of `models` (which may repeat), together per_second requests.
    The i-th has requests as i^-exponent, or as `shares` say."""

    models: Annotated[list[str], Meta(min_length=1, max_length=10_000)]
    per_second: Positive
    exponent: NotNegative = 1.0
    shares: list[Positive] = []
    cv: Annotated[float, Meta(ge=0.05, le=20)] = 1.0
    lengths: str = "sharegpt"


class TraceSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A file and the names of the applications that get its requests; none named: all. start_s: of the file."""

    path: Name
    apps: list[str] = []
    split: Literal["robin", "power", "names"] = "robin"
    factor: Annotated[float, Meta(gt=0, le=10_000)] = 1.0
    start_s: NotNegative = 0.0


class WorkloadSpec(msgspec.Struct, frozen=True, kw_only=True):
    """source: the built-in generator's 62 applications; the trace workload62 in `folder`; or nothing but what [[apps]],
    split and traces say.

    factor: times the requests. apps: numbers of those of the 62 that take part, none: all. rates: times the requests of
    single applications, by name. equal: requests a second of each, whatever it had. models: other models than its own,
    by application. flat: neither daily curve nor drawn bursts. jitter_s: how far copies of a recorded request are from
    it.

    A lead-in, so that a cluster which begins with nothing is not judged by that: quiet_s is put before the slice, and
    nothing comes in it; requests of the first since_s of the slice are run and not counted.
    """

    source: Literal["generator", "workload62", "apps"] = "generator"
    folder: str = ""
    factor: Annotated[float, Meta(gt=0, le=10_000)] = 1.0
    start_s: Moment = 0.0
    duration_s: Annotated[float, Meta(gt=0, le=60 * 86_400)] = 86_400.0
    quiet_s: Moment = 0.0
    since_s: Moment = 0.0
    jitter_s: NotNegative = 10.0
    apps: list[Annotated[int, Meta(ge=0, lt=62)]] = []
    rates: dict[str, Positive] = {}
    equal: Positive | None = None
    models: dict[str, Name] = {}
    flat: bool = False
    bursts: list[BurstSpec] = []
    tide: TideSpec | None = None
    split: SplitSpec | None = None
    traces: list[TraceSpec] = []


class AppEntry(msgspec.Struct, frozen=True, kw_only=True):
    """An application beside those of the workload. per_second 0: its requests come from a trace. lengths: a name, or
    prompt and answer as in "1000/200"."""

    name: Name
    model: Name
    ttft_s: Positive = 1.0
    tpot_s: Positive = 0.05
    attain: Share = 0.95
    priority: Annotated[int, Meta(ge=-100, le=100)] = 0
    per_second: NotNegative = 0.0
    cv: Annotated[float, Meta(ge=0.05, le=20)] = 1.0
    lengths: str = "sharegpt"


class PromiseSpec(msgspec.Struct, frozen=True, kw_only=True):
    """scale: times what is promised. by_length: TTFT of 100 ms and 0.2 ms for each token of an application's mean
    prompt, and TPOT of 50 ms, before scaling, in place of its own."""

    scale: Annotated[float, Meta(gt=0, le=1000)] = 1.0
    by_length: bool = False
    attain: Share = 0.95


class MemorySpec(msgspec.Struct, frozen=True, kw_only=True):
    """context_tokens: the longest sequence. floor_tokens: of KV that is kept for a model while it is Active; eight of
    the published system's pages, which are reserved for each model there, hold as many."""

    context_tokens: Annotated[int, Meta(ge=16, le=10_000_000)] = 40_960
    floor_tokens: Annotated[int, Meta(ge=1, le=10_000_000)] = 8192


class ModelEntry(msgspec.Struct, frozen=True, kw_only=True):
    """shards: instead of as few as fit. A model that is not built in has the dimensions of the one it is like, or
    brings its own, as columns of models.csv."""

    name: Name
    like: str = ""
    shards: Annotated[int, Meta(ge=1, le=1024)] | None = None
    params_b: Positive | None = None
    active_params_b: Positive | None = None
    layers: Count | None = None
    hidden: Count | None = None
    heads: Count | None = None
    kv_heads: Count | None = None
    head_dim: Count | None = None
    experts: Annotated[int, Meta(ge=0, le=100_000)] = 0
    experts_per_token: Annotated[int, Meta(ge=0, le=100_000)] = 0
    moe_intermediate: Annotated[int, Meta(ge=0, le=1_000_000)] = 0
    first_dense_layers: Annotated[int, Meta(ge=0, le=100_000)] = 0


class FaultEntry(msgspec.Struct, frozen=True, kw_only=True):
    at_s: NotNegative
    kind: Literal["node", "copy", "leader"]
    node: str = ""
    lasts_s: NotNegative = 0.0


class Spec(msgspec.Struct, frozen=True, kw_only=True):
    """about: one line on what the scenario is for."""

    name: str = ""
    about: str = ""
    cluster: ClusterSpec = ClusterSpec()
    workload: WorkloadSpec = WorkloadSpec()
    promise: PromiseSpec = PromiseSpec()
    memory: MemorySpec = MemorySpec()
    apps: list[AppEntry] = []
    models: list[ModelEntry] = []
    faults: list[FaultEntry] = []


# What is set most often has a short name.
SHORT: Final[Mapping[str, str]] = {
    "hosts": "cluster.hosts", "devices": "cluster.devices", "kind": "cluster.kind", "source": "workload.source",
    "traces": "workload.folder", "folder": "workload.folder", "factor": "workload.factor",
    "start_s": "workload.start_s", "duration_s": "workload.duration_s", "quiet_s": "workload.quiet_s",
    "since_s": "workload.since_s", "scale": "promise.scale",
}  # fmt: skip


def names() -> dict[str, str]:
    """The built-in scenarios, and what each is for."""
    return {path.stem: _parse(path).get("about", "") for path in sorted(SCENARIOS.glob("*.toml"))}


def load(source: str, options: Mapping[str, str]) -> Spec:
    """A file, or the name of a built-in scenario."""
    path = Path(source)
    if not path.suffix and not path.is_file():
        path = SCENARIOS / f"{source}.toml"
        if not path.is_file():
            known = [path.stem for path in sorted(SCENARIOS.glob("*.toml"))]
            raise BadConfig(f"no scenario is named {source!r}: there are {', '.join(known)}, or give a .toml file"
                            f"{nearest(source, known)}")  # fmt: skip
    document = _parse(path)
    for key, value in options.items():
        _put(document, key, value)
    _known_keys(document, Spec, "")
    try:
        spec = msgspec.convert(document, Spec)
    except msgspec.ValidationError as error:
        raise BadConfig(f"scenario {source}: {_said(str(error), document)}") from None
    return spec if spec.name else msgspec.structs.replace(spec, name=path.stem)


def _parse(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadConfig(f"{path}: {error.strerror or error}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadConfig(f"{path}: {error}") from None


def _said(error: str, document: Any) -> str:
    """A complaint of the converter, with the place as users write it and the value that stands there."""
    found = re.fullmatch(r"(.*) - at `\$\.(.*)`", error)
    if found is None:
        return error
    for step in re.findall(r"[^.\[\]]+", found[2]):
        try:
            document = document[int(step) if isinstance(document, list) else step]
        except (LookupError, TypeError, ValueError):
            return f"{found[2]}: {found[1]}"
    return f"{found[2]}: {found[1]}, not {str(document)[:80]}"


def _put(document: dict[str, Any], key: str, text: str) -> None:
    """One option, such as "workload.factor" and "2". What is no TOML value is taken as text."""
    section, dot, name = SHORT.get(key, key).rpartition(".")
    sections = [f.name for f in msgspec.structs.fields(Spec) if isinstance(f.type, type)]
    if section not in ("", *sections) or not (dot or name in ("name", "about")):
        short = [*SHORT, *(f"{s}." for s in sections)]
        raise BadConfig(f"option {key!r} is not known; write section.key, or one of {', '.join(SHORT)}"
                        f"{nearest(key, short)}")  # fmt: skip
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    table = document.setdefault(section, {}) if section else document
    if not isinstance(table, dict):
        raise BadConfig(f"[{section}] is not a table")
    table[name] = value


def _known_keys(table: Any, kind: type[msgspec.Struct], where: str) -> None:
    """Refuse unknown keys, in this table and in those inside it. Values of wrong kinds are left to who converts."""
    if not isinstance(table, dict):
        return
    fields = {field.name: field.type for field in msgspec.structs.fields(kind)}
    for key, value in table.items():
        inside = f"{where}.{key}" if where else key
        if key not in fields:
            raise BadConfig(f"{inside!r} is not known in a scenario{nearest(key, fields)}")
        for part in _structs(fields[key]):
            for one in value if isinstance(value, list) else [value]:
                _known_keys(one, part, inside)


def _structs(kind: Any) -> list[type[msgspec.Struct]]:
    """The records among what a field may be: itself, an item of a list, one side of a union."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return [kind]
    return [found for part in typing.get_args(kind) for found in _structs(part)]
