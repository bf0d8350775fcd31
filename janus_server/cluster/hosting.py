"""What a node hands to its place in a cluster once its models are open: its memory, its models, who looks on."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from janus_server.applications import Application, Applications
from janus_server.executor import DeviceThread
from janus_server.fitting import Fitter
from janus_server.fork import checkpoint_of
from janus_server.kv.vmm_cpu import CpuMemory
from janus_server.kv.xtensor import XTensor
from janus_server.lifecycle import Lifecycle
from janus_server.orders import Action, Counts, Event, KnownModel
from janus_server.sched.scarcity import Scarcity
from janus_server.sched.state import BrainSettings
from janus_server.telemetry import Telemetry
from janus_server.transfer.rundir import Peering


@dataclasses.dataclass(frozen=True, slots=True)
class Paging:
    """What pages of keys and values are dealt with by: the device thread owns the pool, `table` are its kernels."""

    device: DeviceThread
    scarcity: Scarcity
    xtensor: XTensor
    table: str


@dataclasses.dataclass(frozen=True, slots=True)
class Hosting:
    """known() are the models with all that a leader is to know of them, seen() is shown orders and their ends, counts()
    are this node's totals by model, sight(past) is what others are told of the node. With a journal, every term that
    it leads in is written to a file of its own beside that path."""

    lifecycle: Lifecycle
    pool_pages: int
    host_bytes: int
    settings: BrainSettings
    known: Callable[[], tuple[KnownModel, ...]]
    seen: Callable[[Event | Action], None]
    counts: Callable[[], Mapping[str, Counts]]
    sight: Callable[[bool], bytes]
    peering: Peering | None
    memory: CpuMemory
    paging: Paging
    fitter: Fitter | None
    journal: Path | None


def known_models(lifecycle: Lifecycle, telemetry: Telemetry, listed: Sequence[Application]) -> tuple[KnownModel, ...]:
    """The catalogue with what is promised of each model and a digest of its files."""
    applications = Applications(tuple(listed))
    return tuple(
        msgspec.structs.replace(
            known,
            attain=telemetry.target(name),
            priority=max((one.priority for one in applications.of_model(name)), default=0),
            checkpoint=checkpoint_of(lifecycle.residents[name].opened),
        )
        for name, known in zip(lifecycle.residents, lifecycle.known(), strict=True)
    )
