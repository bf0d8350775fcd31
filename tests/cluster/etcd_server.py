"""Real etcd servers for the tests of the cluster, which the chaos bench has.

A test that wants one is skipped where there is no `etcd` (Debian: etcd-server; .ci/run installs it).
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench import chaos_etcd
from bench.chaos_etcd import MISSING, PROGRAM, free_ports

__all__ = ["EtcdServer", "etcd_servers", "free_ports"]


class EtcdServer(chaos_etcd.EtcdServer):
    def start(self) -> None:
        skip_without()
        super().start()


@contextlib.contextmanager
def etcd_servers(folder: Path, count: int = 1) -> Iterator[list[chaos_etcd.EtcdServer]]:
    skip_without()
    with chaos_etcd.etcd_servers(folder, count) as servers:
        yield servers


def skip_without() -> None:
    if shutil.which(PROGRAM) is None:
        pytest.skip(MISSING)
