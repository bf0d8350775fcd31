"""Which names of nodes are taken where a cluster meets: looked up once, before nodes are started that need free ones.

`cluster.watch` calls it. A name that is free now may be taken a moment later: whoever joins is told so then.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Final

from janus_server.coordinator.address import read_address
from janus_server.coordinator.base import Trouble
from janus_server.coordinator.etcdkeys import Keys
from janus_server.coordinator.gateway import Barred, Gateway, Login, NotEtcd, Range, Untrusted
from janus_server.coordinator.rundir import RunFiles
from janus_server.errors import BadConfig

_PATIENCE_S: Final = 10.0
_POLL_S: Final = 0.25
_CALL_S: Final = 2.0


async def taken(where: str, login: Login | None = None) -> frozenset[str]:
    """BadConfig where there is nothing to ask."""
    if "://" in where:
        return await _of_etcd(where, login)
    return frozenset(await asyncio.to_thread(_of_folder, Path(where)))


def free(count: int, used: frozenset[str]) -> list[str]:
    """n0, n1, … without those that are used."""
    names = [f"n{number}" for number in range(count + len(used))]
    return [name for name in names if name not in used][:count]


def _of_folder(folder: Path) -> list[str]:
    if not folder.exists():
        return []
    files = RunFiles(folder)
    try:
        return list(files.nodes())
    finally:
        files.close()


async def _of_etcd(where: str, login: Login | None) -> frozenset[str]:
    address = read_address(where)
    keys = Keys(address.cluster)
    gateway = Gateway(address.endpoints, None, _CALL_S, login)
    until_s = time.monotonic() + _PATIENCE_S
    try:
        while True:
            try:
                keys.replace(await gateway.call("/v3/kv/range", keys.everything(), Range))
                return frozenset(member.name for member in keys.members())
            except Barred as trouble:
                raise BadConfig(str(trouble)) from None
            except (NotEtcd, Untrusted) as trouble:
                raise BadConfig(f"{trouble}; see what --join names") from None
            except Trouble as trouble:
                if time.monotonic() >= until_s:
                    raise BadConfig(f"{trouble} where --join says; is it running, and does it want TLS?") from None
            await asyncio.sleep(_POLL_S)
    finally:
        await gateway.close()
