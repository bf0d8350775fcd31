"""The Brain over many nodes: imaginary clusters with trouble, in which every request ends and memory suffices."""

from __future__ import annotations

import random

import pytest
from fleet_world import FleetWorld

from janus_server.orders import KnownModel


def known(name: str, weight_pages: int = 40, longest_pages: int = 10, **more: object) -> KnownModel:
    return KnownModel(model=name, weight_pages=weight_pages, host_bytes=weight_pages, longest_pages=longest_pages,
                      **{"preload": False, **more})  # type: ignore[arg-type]  # fmt: skip


def some_world(seed: int) -> FleetWorld:
    rng = random.Random(seed)
    models = [
        known(name, rng.randint(5, 40), rng.randint(1, 15), floor_pages=rng.choice((0, 3)),
              idle_s=rng.choice((None, 5.0, 20.0)), shards=rng.choice((1, 1, 1, 2)),
              priority=rng.choice((0, 0, 1)), preload=rng.random() < 0.3)
        for name in "abcdefgh"[: rng.randint(2, 8)]
    ]  # fmt: skip
    return FleetWorld(seed, models, rng.randint(2, 6), rng.choice((60, 100, 150)), rng.choice((0.0, 0.1)),
                      rng.choice((0, 80, 500)))  # fmt: skip


@pytest.mark.parametrize("seed", range(40))
def test_whatever_happens_every_request_ends_and_all_comes_to_rest(seed: int) -> None:
    world = some_world(seed)
    rng = random.Random(seed + 1000)
    at_s = 0.0
    for _ in range(150):
        at_s += rng.expovariate(1.0) * rng.choice((0.02, 0.3, 1.5))
        world.later(at_s, "ask", rng.choice(list(world.models)))
    if world.trouble:
        world.later(rng.uniform(1, 60), "lose")
        world.later(rng.uniform(1, 60), "crash")
    world.run(rng.uniform(5, 60))
    world.remember()
    world.trouble = 0.0
    world.run(at_s + 240.0)
    asked = {id.rstrip("'") for id in (*world.ended, *world.refused)}
    assert asked == {f"t{n}" for n in range(1, world.tickets + 1)}, f"left: {world.waiting}"
    assert world.now - world.calm_s > 60.0, f"still ordering: {world.said[-5:]}"
    world.replay()
