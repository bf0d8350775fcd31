"""What the chaos bench does to a cluster: each fault is struck under load, lasts, and is mended again.

A fault says which nodes' own clients may see an error of it. Those of all other nodes may see none.
"""

from __future__ import annotations

import dataclasses
import signal
from collections.abc import Awaitable, Callable, Mapping
from types import MappingProxyType
from typing import Final

from .chaos_scene import Scene

_HOUR_S: Final = 3600.0


@dataclasses.dataclass(frozen=True, slots=True)
class Fault:
    """do(scene) returns when all is as it was. place is the kind of cluster that it is done to."""

    name: str
    what: str
    place: str
    do: Callable[[Scene], Awaitable[None]]


async def kill_leader(scene: Scene) -> None:
    leader = scene.nodes.leader
    await scene.busy(leader)
    scene.strike(f"kill -9 of the leader, {leader}", [leader])
    scene.nodes[leader].kill()
    await scene.elected()
    await scene.serves(scene.others(leader))
    await scene.back(leader)


async def kill_executing(scene: Scene) -> None:
    """The follower that says it runs most."""
    await _kill_follower(scene, busiest=True)


async def kill_front(scene: Scene) -> None:
    """The follower that runs least of its own: most of what is lost with it runs elsewhere."""
    await _kill_follower(scene, busiest=False)


async def _kill_follower(scene: Scene, *, busiest: bool) -> None:
    lost = (max if busiest else min)(scene.nodes.followers, key=scene.running)
    if busiest:
        await scene.busy(lost)
    scene.strike(f"kill -9 of {lost}, which {'runs most' if busiest else 'runs least'}", [lost])
    scene.nodes[lost].kill()
    await scene.serves(scene.others(lost))
    await scene.wait(scene.settle_s)
    await scene.back(lost)


def stop_leader(for_s: float) -> Callable[[Scene], Awaitable[None]]:
    async def do(scene: Scene) -> None:
        leader = scene.nodes.leader
        await scene.busy(leader)
        scene.strike(f"SIGSTOP of the leader, {leader}, for {for_s:g} s", [leader])
        scene.nodes[leader].send(signal.SIGSTOP)
        try:
            await scene.wait(for_s)
        finally:
            scene.nodes[leader].send(signal.SIGCONT)
        await scene.serves()

    return do


def stop_etcd(for_s: float) -> Callable[[Scene], Awaitable[None]]:
    async def do(scene: Scene) -> None:
        scene.strike(f"etcd is stopped for {for_s:g} s")
        for server in scene.etcd:
            server.kill()
        await scene.wait(for_s)
        await scene.serves()
        scene.doing = "etcd starts again"
        for server in scene.etcd:
            server.start()
        # Counted from here: nobody can be elected before.
        scene.strike("etcd starts again")
        await scene.elected()
        await scene.serves()

    return do


def kill_etcd_member(for_s: float) -> Callable[[Scene], Awaitable[None]]:
    async def do(scene: Scene) -> None:
        scene.strike("kill -9 of one etcd server of three")
        scene.etcd[0].kill()
        await scene.wait(for_s)
        await scene.serves()
        scene.etcd[0].start()
        await scene.wait(scene.settle_s)
        await scene.serves()

    return do


def cut_off(whom: str, for_s: float) -> Callable[[Scene], Awaitable[None]]:
    """whom: "leader", "follower", or "leader from etcd"."""

    async def do(scene: Scene) -> None:
        nodes, net = scene.nodes, scene.net
        if net is None:
            return
        name = max(nodes.followers, key=scene.running) if whom == "follower" else nodes.leader
        alone = whom == "leader from etcd"
        await scene.busy(name)
        scene.strike(f"{name} is cut off" + (" from etcd" if alone else " from all others"), [] if alone else [name])
        net.cut_off(name, ["etcd"] if alone else scene.hosts)
        try:
            if whom != "follower":
                await scene.elected()
            await scene.wait(for_s)
            await scene.serves(scene.others(name))
        finally:
            net.weather()
        await scene.serves()

    return do


def bad_network(for_s: float) -> Callable[[Scene], Awaitable[None]]:
    async def do(scene: Scene) -> None:
        if scene.net is None:
            return
        scene.strike("every frame between nodes and to etcd 40 ± 20 ms late, 1 % lost")
        scene.net.weather(slow=scene.hosts, delay_s=0.04, jitter_s=0.02, loss=0.01)
        try:
            await scene.wait(for_s)
            await scene.serves()
        finally:
            scene.net.weather()
        await scene.serves()

    return do


async def full_disk(scene: Scene) -> None:
    """Journals cannot be written; then somebody is elected who cannot even begin one."""
    leader = scene.nodes.leader
    scene.strike("the disk of the journals is full")
    scene.fill_disk()
    await scene.wait(scene.settle_s)
    await scene.serves()
    scene.strike(f"kill -9 of the leader, {leader}, meanwhile", [leader])
    scene.nodes[leader].kill()
    await scene.elected()
    await scene.serves(scene.others(leader))
    scene.empty_disk()
    await scene.back(leader)


async def clocks_jump(scene: Scene) -> None:
    for by_s in (_HOUR_S, -2 * _HOUR_S, 0.0):
        scene.strike(f"every wall clock is {by_s / _HOUR_S:+g} h off" if by_s else "every wall clock is right again")
        scene.move_clocks(by_s)
        await scene.wait(scene.settle_s)
        await scene.serves()


def faults(scale: float = 1.0) -> Mapping[str, Fault]:
    """All of them, in the order in which they are struck; scale shortens what lasts."""
    found = [
        Fault("leader", "kill -9 of the leader", "local", kill_leader),
        Fault("executing", "kill -9 of a node that runs requests", "local", kill_executing),
        Fault("front", "kill -9 of the node that runs least", "local", kill_front),
        *(
            Fault(f"stop{for_s}", f"the leader is stopped for {for_s} s", "local", stop_leader(for_s))
            for for_s in (1, 3, 10, 30)
        ),
        Fault("disk", "the disk of the journals is full, then kill -9 of the leader", "local", full_disk),
        Fault("clock", "wall clocks jump by hours", "local", clocks_jump),
        Fault("etcd", "etcd is away", "etcd", stop_etcd(30.0 * scale)),
        Fault("member", "one of three etcd servers is killed", "etcd", kill_etcd_member(10.0 * scale)),
        Fault("etcd-leader", "kill -9 of the leader, with etcd", "etcd", kill_leader),
        Fault("cut-leader", "the leader is cut off", "net", cut_off("leader", 10.0 * scale)),
        Fault("cut-follower", "a follower is cut off", "net", cut_off("follower", 10.0 * scale)),
        Fault("cut-etcd", "the leader is cut off from etcd alone", "net", cut_off("leader from etcd", 10.0 * scale)),
        Fault("slow", "a slow network that loses frames", "net", bad_network(20.0 * scale)),
    ]
    return MappingProxyType({fault.name: fault for fault in found})
