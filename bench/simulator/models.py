"""The models of a scenario: their dimensions, what they take of a node, and what the oracle is told of them.

`scenario` asks for them by name. Dimensions are those of `models.toml`, of a models.csv beside a trace, or the
scenario's own. Sizes follow from dimensions alone; whether a model fits is checked here, before anything runs.
"""

from __future__ import annotations

import csv
import math
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from janus_server.errors import BadConfig
from janus_server.orders import KnownModel
from janus_server.sched.oracle_records import Promise, Subject
from janus_server.sched.roofline import DeviceShape, ModelShape, shards_needed
from janus_server.suggest import nearest
from janus_server.units import format_bytes

from ..oracle_subjects import shape_of
from ..traces import UNREADABLE, open_text
from .constants import (
    DISK_BYTES_S,
    DISK_FIXED_S,
    DISK_SHARED_BYTES_S,
    HOST_BYTES_S,
    HOST_FIXED_S,
    HOST_SHARED_BYTES_S,
)
from .records import AppSpec, ModelSpec, NodeSpec
from .spec import ModelEntry

DIMENSIONS: Final = Path(__file__).with_name("models.toml")


class Room(NamedTuple):
    """context_tokens: the longest sequence. floor_tokens: so many tokens' KV is kept for a model while it is Active.

    shards by model, where they are not to be as few as fit.
    """

    context_tokens: int
    floor_tokens: int
    shards: Mapping[str, int]


def builtin() -> dict[str, ModelShape]:
    table = tomllib.loads(DIMENSIONS.read_text(encoding="utf-8"))
    return dict(_shape({key: str(value) for key, value in zip(table["columns"], row, strict=True)}, "models.toml")
                for row in table["rows"])  # fmt: skip


def of_folder(folder: Path) -> dict[str, ModelShape]:
    """The models.csv of a trace's folder."""
    path = folder / "models.csv"
    try:
        with open_text(path) as file:
            return dict(_shape(row, str(path)) for row in csv.DictReader(file))
    except UNREADABLE as error:
        raise BadConfig(f"{path}: {error}") from None


def own(entry: ModelEntry, known: Mapping[str, ModelShape]) -> ModelShape:
    """A [[models]] entry that is like a known one, or brings its own dimensions: grouped-query attention in bf16."""
    where = f"[[models]] {entry.name!r}"
    if entry.like and entry.params_b is not None:
        raise BadConfig(f"{where} is like {entry.like!r} and has params_b of its own: give one of them")
    if entry.like:
        if entry.like not in known:
            raise BadConfig(f"{where} is like {entry.like!r}, which is not known{nearest(entry.like, known)}")
        return msgspec.structs.replace(known[entry.like], name=entry.name)
    needed = ("layers", "hidden", "heads", "kv_heads", "head_dim")
    lacking = [key for key in needed if getattr(entry, key) is None]
    if entry.params_b is None:
        close = nearest(entry.name, known)
        raise BadConfig(f"{where} has no dimensions and is not known; give like, or params_b and others{close}")
    if lacking:
        raise BadConfig(f"{where} has params_b and lacks {', '.join(lacking)}")
    given = {key: str(value) for key, value in msgspec.structs.asdict(entry).items() if value is not None}
    kv_bytes = 2 * int(given["layers"]) * int(given["kv_heads"]) * int(given["head_dim"]) * 2
    return _shape({"attention": "gqa", **given, "llm": entry.name, "kv_bytes_per_token_bf16": str(kv_bytes)}, where)[1]


def _shape(row: Mapping[str, str], where: str) -> tuple[str, ModelShape]:
    try:
        return row["llm"], shape_of(row)
    except UNREADABLE as error:
        raise BadConfig(f"{where}: not the dimensions of a model ({type(error).__name__} {error})") from None


def specs(shapes: Mapping[str, ModelShape], apps: Sequence[AppSpec], nodes: Sequence[NodeSpec],
          room: Room) -> tuple[ModelSpec, ...]:  # fmt: skip
    """Of the models that the applications name, each once. Refused: unknown ones, and those that fit nowhere."""
    for app in apps:
        if app.model not in shapes:
            raise BadConfig(f"application {app.name}: its model {app.model!r} is not known{nearest(app.model, shapes)}")
    for name in room.shards:
        if name not in shapes:
            raise BadConfig(f"[[models]] {name!r} has no dimensions and is not known{nearest(name, shapes)}")
    named = sorted({app.model for app in apps})
    made = tuple(_spec(shapes[name], [app for app in apps if app.model == name], nodes, room) for name in named)
    return made


def smallest(nodes: Sequence[NodeSpec]) -> NodeSpec:
    """Of all nodes that with the least memory for models."""
    return min(nodes, key=lambda node: (node.pool_pages * node.page_bytes, node.name))


def subjects(models: Iterable[ModelSpec], apps: Sequence[AppSpec], device: DeviceShape) -> dict[str, Subject]:
    """What the oracle is told: the strictest promise of a model's applications; decode steps paced at half of TPOT."""
    found = {}
    for spec in models:
        mine = [app for app in apps if app.model == spec.known.model]
        promise = Promise(min(app.ttft_s for app in mine), min(app.tpot_s for app in mine))
        found[spec.known.model] = Subject(
            model=spec.shape, device=device, promise=promise, shards=spec.known.shards, pace_s=promise.tpot_s / 2
        )
    return found


def _spec(shape: ModelShape, apps: Sequence[AppSpec], nodes: Sequence[NodeSpec], room: Room) -> ModelSpec:
    """Pages and bytes are those of a shard, on the smallest of the devices: a replica may meet any of them."""
    small = smallest(nodes)
    shards = room.shards.get(shape.name) or shards_needed(shape, small.shape)
    kv_bytes = shape.kv_bytes / shards
    page_tokens = max(1, int(small.page_bytes // kv_bytes))
    scale = math.ceil(kv_bytes / small.page_bytes)
    weight_bytes = math.ceil(shape.weight_bytes / shards)
    known = KnownModel(
        model=shape.name,
        weight_pages=math.ceil(weight_bytes / small.page_bytes),
        host_bytes=weight_bytes,
        longest_pages=scale * math.ceil(room.context_tokens / page_tokens),
        floor_pages=scale * math.ceil(min(room.floor_tokens, room.context_tokens) / page_tokens),
        shards=shards,
        attain=max(app.attain for app in apps),
        priority=max(app.priority for app in apps),
        # A fleet places models when they are asked for; nothing is there at first.
        preload=False,
        load_s=DISK_FIXED_S + weight_bytes / min(DISK_BYTES_S, DISK_SHARED_BYTES_S / shards),
        wake_s=HOST_FIXED_S + weight_bytes / min(HOST_BYTES_S, HOST_SHARED_BYTES_S / shards),
    )
    _check(known, small, nodes)
    return ModelSpec(known=known, shape=shape)


def _check(known: KnownModel, small: NodeSpec, nodes: Sequence[NodeSpec]) -> None:
    needed = known.weight_pages + known.longest_pages
    if needed > small.pool_pages:
        parts = (known.weight_pages, known.longest_pages, small.pool_pages)
        weights, longest, has = (format_bytes(pages * small.page_bytes) for pages in parts)
        raise BadConfig(
            f"{known.model} is too large for {small.shape.name} ({small.name}) in {known.shards} shards: each has "
            f"{weights} of weights and {longest} for the longest sequence, and the device has {has}; give it more "
            "shards, a shorter context_tokens or larger devices"
        )
    if known.shards > len(nodes):
        raise BadConfig(f"{known.model} needs {known.shards} devices at once and the cluster has {len(nodes)}")
