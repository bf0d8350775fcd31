"""What the tests of this folder share: one tiny checkpoint and one server for most of them.

They want the packages of requirements.txt; where those are missing nothing here is collected. `make test-clients`
installs them into `.venv-clients` and runs this folder.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

# Clients keep caches and ask hubs; neither belongs into a test.
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

LONG_CONTEXT = 1 << 15
_WANTED = ("lm_eval", "guidellm", "langchain_openai", "openai", "anthropic", "schemathesis")
collect_ignore_glob = ["test_*.py"] if any(importlib.util.find_spec(name) is None for name in _WANTED) else []

if not collect_ignore_glob:
    from live_server import LiveServer, scripted_model, serving, tiny_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama in float32 with a byte-level tokenizer, a chat template and room for 32768 tokens."""
    return tiny_model(tmp_path_factory.mktemp("model"), max_position_embeddings=LONG_CONTEXT)


@pytest.fixture(scope="session")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """It serves the checkpoint as `tiny` and as `org/tiny`, a name with a slash as hubs have them."""
    with serving(
        tmp_path_factory.mktemp("server"), f"tiny={model}", f"org/tiny={model}", "--memory", "256MiB"
    ) as running:
        yield running


@pytest.fixture(scope="session")
def speaker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """It serves `speaker`, which calls a function where it may, and says what the weather is once it has a result."""
    scripts = {
        "\n": [
            "<tool_call>\n", '{"name": "weather", ', '"arguments": {"city": ', '"Paris", ', '"days": 2}}',
            "\n</tool_call>",
        ],
        "\t": ["It will be", " sunny", " in Paris", "."],
    }  # fmt: skip
    folder = scripted_model(tmp_path_factory.mktemp("speaker"), scripts)
    with serving(tmp_path_factory.mktemp("server"), f"speaker={folder}", "--memory", "64MiB") as running:
        yield running
