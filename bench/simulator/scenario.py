"""From a TOML file, or the name of a built-in one, to a `Scenario`: its cluster, models, applications and calls.

`read` is what the command calls. All that can be wrong with a scenario is said here, before anything runs: unknown keys
and models, a model that fits no device, a cluster without room, a trace that is none. Nothing is run here.
"""

from __future__ import annotations

import csv
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
import numpy as np

from janus_server.errors import BadConfig
from janus_server.sched.roofline import DEVICES, DeviceShape, ModelShape
from janus_server.suggest import nearest
from janus_server.units import format_bytes, parse_bytes

from ..traces import UNREADABLE, open_text
from . import generator, lengths, models
from .blocks import Blocks, Calls, later, merged, sliced
from .generator import REQUESTS, AppLoad, Burst, Tide
from .records import AppSpec, Fault, FaultKind, ModelSpec, NodeSpec, Scenario
from .spec import Hosts, Spec, load
from .workload import Chosen, Mapped, Split, check, check62, mapped, requests62

_MOST_A_SECOND: Final = 200_000.0
_MOST_REQUESTS: Final = 1e9
_MOST_COPIES: Final = 10_000.0
# With a handful of pages, models of one device do nothing but take them from each other.
_LEAST_PAGES: Final = 32
_CLIENT_TTFT_S, _CLIENT_TOKEN_S, _CLIENT_TPOT_S = 0.1, 0.2e-3, 0.05
"""What the published test clients promise, before their scale: TTFT by the length of the prompt, and TPOT."""

FOLDER: Final = Path(__file__).resolve().parents[3] / "shared" / "traces" / "workload62"
"""Where the trace workload62 is, unless the scenario says otherwise."""


class _Asked(NamedTuple):
    """Who asks: their loads (per_second 0 where requests are recorded), whether they have a priority or a share of
    requests of their own, and what makes the requests."""

    loads: tuple[AppLoad, ...]
    own: Mapping[str, tuple[float, int]]
    sources: tuple[Callable[[], Blocks], ...]
    shapes: Mapping[str, ModelShape]


def read(source: str, seed: int, options: Mapping[str, str]) -> Scenario:
    """options: "section.key" or a short name of `spec.SHORT`, and the value as TOML or as text."""
    if seed < 0:
        raise BadConfig(f"the seed is a whole number from 0 on, not {seed}")
    spec = load(source, options)
    work = spec.workload
    if work.since_s >= work.duration_s:
        raise BadConfig(
            f"scenario {spec.name}: it lasts {work.duration_s:g} s, and is counted from second {work.since_s:g} on"
        )
    nodes = _nodes(spec)
    asked = _asked(spec, seed)
    apps = tuple(_app(load_, asked, spec) for load_ in asked.loads)
    if len({app.name for app in apps}) < len(apps):
        double = next(app.name for i, app in enumerate(apps) if app.name in {a.name for a in apps[:i]})
        raise BadConfig(f"scenario {spec.name}: two applications are named {double!r}")
    room = models.Room(
        spec.memory.context_tokens, spec.memory.floor_tokens, {m.name: m.shards for m in spec.models if m.shards}
    )
    known = models.specs(asked.shapes, apps, nodes, room)
    sources = asked.sources
    made = sources[0] if len(sources) == 1 else lambda: merged([make() for make in sources])
    calls = Calls(lambda: later(made(), work.quiet_s))
    if not any(block.n for block in calls.blocks()):
        raise BadConfig(f"scenario {spec.name}: no request lies in the chosen part of the workload")
    nodes, copies = _host_memory(spec, nodes, known)
    return Scenario(
        name=spec.name, nodes=nodes, models=known, apps=apps, calls=calls,
        duration_s=work.quiet_s + work.duration_s,
        subjects=models.subjects(known, apps, models.smallest(nodes).shape), faults=_faults(spec, nodes), seed=seed,
        copies=copies, since_s=work.quiet_s + work.since_s,
        bursts_s=tuple(sorted({work.quiet_s + burst.at_s for burst in work.bursts if burst.at_s < work.duration_s})),
    )  # fmt: skip


# The cluster


def _nodes(spec: Spec) -> tuple[NodeSpec, ...]:
    page_bytes = _bytes(spec.cluster.page, "cluster.page")
    found: list[NodeSpec] = []
    first = 0
    for hosts in (spec.cluster, *spec.cluster.more):
        found += _alike(hosts, first, page_bytes)
        first += hosts.hosts
    if len(found) > 100_000:
        raise BadConfig(f"the cluster has {len(found)} devices; 100,000 are the most")
    return tuple(found)


def _alike(hosts: Hosts, first: int, page_bytes: int) -> Iterable[NodeSpec]:
    shape = _device(hosts)
    pool_pages = int((shape.memory_bytes * shape.memory_reached - shape.activation_bytes) // page_bytes)
    if shape.memory_bytes * shape.memory_reached - shape.activation_bytes >= 1 > pool_pages:
        raise BadConfig(f"cluster.page: a page of {format_bytes(page_bytes)} is larger than what {shape.name} has for "
                        f"models")  # fmt: skip
    if 1 <= pool_pages < _LEAST_PAGES:
        raise BadConfig(f"cluster.page: {shape.name} has {pool_pages} of {format_bytes(page_bytes)}, and models that "
                        f"share them need {_LEAST_PAGES} at least: choose smaller pages")  # fmt: skip
    if pool_pages < 1:
        raise BadConfig(
            f"{shape.name} with {format_bytes(int(shape.memory_bytes))} has no room for models beside "
            f"{format_bytes(int(shape.activation_bytes))} of activations"
        )
    host_bytes = _bytes(hosts.host_memory, "host_memory")
    for number in range(first, first + hosts.hosts):
        host = _host(number)
        for device in range(hosts.devices):
            yield NodeSpec(
                name=f"{host}d{device:02d}", host=host, domain=hosts.domain or host, shape=shape,
                pool_pages=pool_pages, page_bytes=page_bytes, host_bytes=host_bytes,
            )  # fmt: skip


def _host_memory(
    spec: Spec, nodes: Sequence[NodeSpec], known: Sequence[ModelSpec]
) -> tuple[tuple[NodeSpec, ...], dict[str, tuple[str, ...]]]:
    """What each node may keep in its host's memory, and what is there from the start.

    Devices of one host read the same copy. Where one of each model fits in its memory, none has to be kept within a
    part of it; otherwise each device has its part, as if nothing were shared.
    """
    together = sum(model.known.host_bytes * model.known.shards for model in known)
    devices = Counter(node.host for node in nodes)
    warm = _warm_hosts(spec)
    made, copies = [], {}
    for node in nodes:
        part = node.host_bytes if together <= node.host_bytes else node.host_bytes // devices[node.host]
        made.append(msgspec.structs.replace(node, host_bytes=part))
        if node.host in warm:
            copies[node.name] = _fitting(known, part)
    return tuple(made), copies


def _warm_hosts(spec: Spec) -> frozenset[str]:
    names, first = set(), 0
    for hosts in (spec.cluster, *spec.cluster.more):
        names |= {_host(first + i) for i in range(hosts.hosts)} if hosts.warm else set()
        first += hosts.hosts
    return frozenset(names)


def _fitting(known: Sequence[ModelSpec], room_bytes: int) -> tuple[str, ...]:
    """As many as fit, in order."""
    kept = []
    for model in known:
        if model.known.host_bytes <= room_bytes:
            room_bytes -= model.known.host_bytes
            kept.append(model.known.model)
    return tuple(kept)


def _host(number: int) -> str:
    return f"h{number:03d}"


def _device(hosts: Hosts) -> DeviceShape:
    by_name = {shape.name: shape for shape in DEVICES}
    shape = by_name.get(hosts.kind)
    if shape is None:
        raise BadConfig(
            f"no device is named {hosts.kind!r}: there are {', '.join(by_name)}{nearest(hosts.kind, by_name)}"
        )
    if hosts.memory is None:
        return shape
    return msgspec.structs.replace(shape, memory_bytes=float(_bytes(hosts.memory, "memory")))


def _bytes(value: str | int, where: str) -> int:
    try:
        return parse_bytes(value)
    except ValueError as error:
        raise BadConfig(f"{where}: {error}") from None


# Applications and their requests


def _asked(spec: Spec, seed: int) -> _Asked:
    shapes = models.builtin()
    work = spec.workload
    sources: list[Callable[[], Blocks]] = []
    loads: list[AppLoad] = []
    if work.source == "workload62":
        folder = Path(work.folder) if work.folder else FOLDER
        recorded, chosen = _recorded(folder, spec)
        check62(folder, len(chosen.numbers), spec.memory.context_tokens)
        loads += recorded
        shapes |= models.of_folder(folder)
        sources.append(lambda: sliced(requests62(folder, chosen, seed), work.start_s, work.duration_s))
    elif work.source == "generator":
        loads += _generated(spec)
    else:
        _check_unused(spec)
    loads += _split(spec)
    loads += (
        AppLoad(one.name, one.model, one.per_second * work.factor, *_lengths(one.lengths, spec), one.cv,
                ttft_s=one.ttft_s, tpot_s=one.tpot_s)
        for one in spec.apps
    )  # fmt: skip
    if not loads:
        raise BadConfig(f"scenario {spec.name}: nobody asks for anything; give [workload] a source or add [[apps]]")
    made = tuple(_changed(loads, spec))
    _check_rates(made, spec)
    if any(app.per_second for app in made):
        sources.append(lambda: generator.blocks(made, seed, work.start_s, work.duration_s))
    names = [app.name for app in made]
    for number, trace in enumerate(_traces(spec, names)):
        check(trace, names, spec.memory.context_tokens)
        sources.append(_trace_source(trace, names, seed + number, work.duration_s))
    double = [name for name, times in Counter(entry.name for entry in spec.models).items() if times > 1]
    if double:
        raise BadConfig(f"[[models]] {double[0]!r} is there twice")
    for entry in spec.models:
        if entry.like or entry.params_b is not None or entry.name not in shapes:
            shapes[entry.name] = models.own(entry, shapes)
    own = {one.name: (one.attain, one.priority) for one in spec.apps}
    return _Asked(made, own, tuple(sources), shapes)


def _check_unused(spec: Spec) -> None:
    """What speaks of the 62 applications says nothing where they take no part."""
    work = spec.workload
    given = {"apps": work.apps, "rates": work.rates, "equal": work.equal, "flat": work.flat}
    for key, value in given.items():
        if value:
            raise BadConfig(f'workload.{key} is for the 62 applications of source = "generator" or "workload62", and '
                            f'here source = "{work.source}"')  # fmt: skip


def _check_rates(loads: Sequence[AppLoad], spec: Spec) -> None:
    """More than these would fill the memory before anything runs, or would not end while anybody waits."""
    per_second = sum(app.per_second * max((burst.multiple for burst in app.bursts or ()), default=1.0) for app in loads)
    requests = sum(app.per_second for app in loads) * spec.workload.duration_s
    if per_second > _MOST_A_SECOND or requests > _MOST_REQUESTS:
        raise BadConfig(f"scenario {spec.name}: {requests:.3g} requests, at most {per_second:.3g} a second; "
                        f"{_MOST_REQUESTS:.3g} and {_MOST_A_SECOND:,.0f} a second are the most")  # fmt: skip


def _trace_source(trace: Mapped, names: Sequence[str], seed: int, duration_s: float) -> Callable[[], Blocks]:
    return lambda: sliced(mapped(trace, names, seed), 0.0, duration_s)


def _generated(spec: Spec) -> list[AppLoad]:
    work = spec.workload
    most = _most(spec)
    found = [
        app._replace(input=lengths.cut(app.input, most[0]), output=lengths.cut(app.output, most[1]))
        for app in generator.shape62(REQUESTS * work.factor)
    ]
    found = [found[i] for i in dict.fromkeys(work.apps)] if work.apps else found
    _check_names(work.rates, found, "workload.rates")
    found = [app._replace(per_second=app.per_second * work.rates.get(app.name, 1.0)) for app in found]
    if work.equal is not None:
        found = [app._replace(per_second=work.equal * work.factor) for app in found]
    return [app._replace(hours=(), wobble=0.0, bursts=()) for app in found] if work.flat else found


def _recorded(folder: Path, spec: Spec) -> tuple[list[AppLoad], Chosen]:
    """The applications of workload62 that take part, and what becomes of the requests of all."""
    work = spec.workload
    if work.flat or work.equal is not None:
        raise BadConfig("workload.flat and workload.equal are for the generator: a recorded day is as it was")
    try:
        with open_text(folder / "apps.csv") as file:
            rows = list(csv.DictReader(file))
        every = [_of_row(i, row) for i, row in enumerate(rows)]
        counts = np.array([max(1.0, float(row["requests"])) for row in rows])
    except UNREADABLE as error:
        raise BadConfig(f"{folder}: not the trace workload62 ({type(error).__name__} {error})") from None
    members = list(dict.fromkeys(work.apps)) or list(range(len(every)))
    if members and max(members) >= len(every):
        raise BadConfig(f"workload.apps: {max(members)} where {folder} has applications 0 to {len(every) - 1}")
    kept = [every[i] for i in members]
    _check_names(work.rates, kept, "workload.rates")
    index = np.full(len(every), -1)
    index[members] = np.arange(len(members))
    factors = np.array([work.factor * work.rates.get(app.name, 1.0) for app in every])
    _check_copies(float(factors.max(initial=0.0)), "workload.factor times workload.rates")
    # A copy may be as far away as the application's requests are from each other: at production volume a rare one is
    # smooth, not seventy requests at once.
    return kept, Chosen(index, factors, np.maximum(generator.DAY_S / counts, work.jitter_s))


def _of_row(number: int, row: Mapping[str, str]) -> AppLoad:
    mean = lengths.fixed(max(1, round(float(row["in_mean"]))))
    promise = float(row["ttft_slo_s"]), float(row["tpot_slo_ms"]) / 1e3
    if not all(0.0 < part_s < math.inf for part_s in promise):
        raise ValueError(f"application {number} is promised {promise[0]:g} s and {promise[1]:g} s")
    return AppLoad(f"app{number:02d}", row["llm"], 0.0, mean, mean, ttft_s=promise[0], tpot_s=promise[1])


def _split(spec: Spec) -> list[AppLoad]:
    split = spec.workload.split
    if split is None:
        return []
    weights = np.array(split.shares) if split.shares else np.arange(1, len(split.models) + 1.0) ** -split.exponent
    if len(weights) != len(split.models):
        raise BadConfig(f"workload.split: {len(weights)} shares for {len(split.models)} models")
    rates = (split.per_second * spec.workload.factor * weights / weights.sum()).tolist()
    sizes = _lengths(split.lengths, spec)
    return [AppLoad(f"part{i:02d}", model, rate, *sizes, split.cv)
            for i, (model, rate) in enumerate(zip(split.models, rates, strict=True))]  # fmt: skip


def _lengths(text: str, spec: Spec) -> tuple[lengths.Lengths, lengths.Lengths]:
    return lengths.named(text, _most(spec))


def _most(spec: Spec) -> tuple[int, int]:
    """Tokens of a prompt and of an answer, so that both fit in the context: a fifth of it is the answer's."""
    context = spec.memory.context_tokens
    return max(1, context * 4 // 5), max(1, context // 5)


def _changed(loads: Sequence[AppLoad], spec: Spec) -> Iterable[AppLoad]:
    """With the bursts, the tide and the models that the scenario gives them."""
    work = spec.workload
    _check_names([burst.app for burst in work.bursts], loads, "workload.bursts")
    _check_names(work.models, loads, "workload.models")
    tide = None if work.tide is None else Tide(work.tide.cycles, work.tide.amplitude, work.duration_s)
    for app in loads:
        mine = tuple(Burst(work.start_s + burst.at_s, burst.multiple, burst.ramp_s, burst.hold_s)
                     for burst in sorted(work.bursts, key=lambda b: b.at_s) if burst.app == app.name)  # fmt: skip
        if mine and not app.per_second:
            raise BadConfig(f"workload.bursts: the requests of {app.name} are recorded; bursts are for generated ones")
        model = work.models.get(app.name, app.model)
        yield app._replace(model=model, bursts=mine or app.bursts, tide=tide if app.per_second else None)


def _traces(spec: Spec, names: Sequence[str]) -> Iterable[Mapped]:
    for trace in spec.workload.traces:
        for name in trace.apps:
            if name not in names:
                raise BadConfig(f"trace {trace.path}: no application is named {name!r}{nearest(name, names)}")
        members = tuple(names.index(name) for name in trace.apps) or tuple(range(len(names)))
        factor = trace.factor * spec.workload.factor
        _check_copies(factor, f"trace {trace.path}: its factor times workload.factor")
        yield Mapped(Path(trace.path), members, Split(trace.split), factor, spec.workload.jitter_s, trace.start_s)


def _check_copies(factor: float, what: str) -> None:
    if factor > _MOST_COPIES:
        raise BadConfig(f"{what} is {factor:g}; {_MOST_COPIES:,.0f} copies of a recorded request are the most")


def _check_names(names: Iterable[str], loads: Iterable[AppLoad], where: str) -> None:
    known = [app.name for app in loads]
    for name in names:
        if name not in known:
            raise BadConfig(f"{where}: no application is named {name!r}{nearest(name, known)}")


def _app(app: AppLoad, asked: _Asked, spec: Spec) -> AppSpec:
    attain, priority = asked.own.get(app.name, (spec.promise.attain, 0))
    ttft_s, tpot_s = app.ttft_s, app.tpot_s
    if spec.promise.by_length:
        ttft_s, tpot_s = _CLIENT_TTFT_S + _CLIENT_TOKEN_S * app.input.mean, _CLIENT_TPOT_S
    scale = spec.promise.scale
    return AppSpec(name=app.name, model=app.model, ttft_s=ttft_s * scale, tpot_s=tpot_s * scale, attain=attain,
                   priority=priority)  # fmt: skip


def _faults(spec: Spec, nodes: Sequence[NodeSpec]) -> tuple[Fault, ...]:
    known = {node.name for node in nodes}
    for fault in spec.faults:
        if fault.kind != "leader" and fault.node not in known:
            raise BadConfig(f"faults: no node is named {fault.node!r}{nearest(fault.node, known)}")
        if not math.isfinite(fault.at_s) or fault.at_s > spec.workload.duration_s:
            raise BadConfig(f"faults: one at {fault.at_s:g} s comes after the end at {spec.workload.duration_s:g} s")
    ordered = sorted(spec.faults, key=lambda fault: fault.at_s)
    quiet_s = spec.workload.quiet_s
    return tuple(Fault(at_s=quiet_s + f.at_s, kind=FaultKind(f.kind), node=f.node, lasts_s=f.lasts_s) for f in ordered)
