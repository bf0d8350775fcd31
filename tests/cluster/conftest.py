"""What every test of a cluster serves: two tiny models, and what one node alone says of them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from real_cluster import SMALL, complete

sys.path.insert(0, str(Path(__file__).parents[1] / "cpu"))
from server_process import Server, tiny_model


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {name: tiny_model(folder / name, seed=seed) for seed, name in enumerate("ab")}


@pytest.fixture(scope="session")
def texts(models: dict[str, Path]) -> dict[str, str]:
    """What one node alone answers."""
    with Server(*(f"{name}={path}" for name, path in models.items()), *SMALL) as server:
        return {name: complete(server.url, name, tokens=40) for name in models}
