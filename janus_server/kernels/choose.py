"""Picks the kernel table for this machine and says why; called once at start by the node, and by `janus doctor`.

It must not fail where a slower table would serve: a native library that cannot be built or loaded is a reason, not an
error, unless the configuration asked for exactly that table.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from janus_server.errors import BadConfig
from janus_server.kernels import build
from janus_server.kernels.cpu import CpuNative
from janus_server.kernels.table import Kernels

KINDS = ("auto", "cpu", "torch_ref")


@dataclasses.dataclass(frozen=True, slots=True)
class Reason:
    """One line of `janus doctor`: which path serves `what`, and why that one."""

    what: str
    chosen: str
    why: str


def choose(kind: str, threads: int, cache_dir: Path) -> tuple[Kernels, tuple[Reason, ...]]:
    """The table named by `kind`, or the fastest that runs here for "auto"."""
    if kind not in KINDS:
        raise BadConfig(f"kernels = {kind!r}: use one of {', '.join(KINDS)}")
    if kind == "torch_ref":
        return _torch(threads, "asked for by the configuration")
    built = build.ensure(cache_dir)
    why = built.how
    if built.path is not None:
        try:
            table = CpuNative(built.path, threads)
        except OSError as error:
            why = f"{built.path.name} does not load: {error}"
        else:
            return table, (Reason("kernels", table.name, f"{built.how}; {threads} threads"),)
    if kind == "cpu":
        raise BadConfig(f"kernels = 'cpu', but {why}; 'auto' falls back to torch")
    return _torch(threads, f"no native kernels: {why}")


def _torch(threads: int, why: str) -> tuple[Kernels, tuple[Reason, ...]]:
    from janus_server.kernels.torch_ref import TorchRef  # torch takes more than a second to import

    table = TorchRef(threads)
    return table, (Reason("kernels", table.name, why),)
