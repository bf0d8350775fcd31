"""What every tier shares: where the repository is, data that may be absent, and settings that make runs repeatable.

Loaded by pytest before any test module. It must not import torch: the pure tier runs without it.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings

# Before any numeric library is loaded: spinning OpenMP threads on a shared machine slow small operations 10 to 100
# times.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# No test may depend on the network.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# Helpers beside the tests assert too; rewriting keeps those asserts under `python -O`.
_HELPERS = sorted(p.stem for p in Path(__file__).parent.glob("*/*.py") if not p.stem.startswith("test_"))
pytest.register_assert_rewrite(*_HELPERS)

# A shared machine makes single examples slow now and then; correctness is what is tested, never speed. The same
# examples every time, so that a red run is red for everyone; JANUS_TEST_SEARCH=1 looks for new ones.
settings.register_profile("janus", deadline=None, print_blob=True, derandomize="JANUS_TEST_SEARCH" not in os.environ)
settings.load_profile("janus")


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the checkout."""
    return Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def shared(repository: Path) -> Path:
    """The folder of models and traces beside the checkout; tests that want it are skipped where it is absent."""
    folder = repository.parent / "shared"
    if not folder.is_dir():
        pytest.skip("the folder ../shared with models and traces is not there")
    return folder


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if list(Path("/dev").glob("nvidia[0-9]*")):
        return
    skip = pytest.mark.skip(reason="no NVIDIA GPU on this machine")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)
