"""What a user may say of peers and of preparation, and what is answered where it makes no sense."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from janus_server.config import ServeConfig, serve_config
from janus_server.errors import BadConfig


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text("{}")
    return f"a={tmp_path}"


def said(model: str, **flags: Any) -> ServeConfig:
    return serve_config([model], flags=flags)


def test_nothing_is_shared_unless_the_server_has_a_name(model: str) -> None:
    config = said(model)
    assert (config.node, config.run_dir, config.prepare_bytes) == (None, None, 256 << 20)
    named = said(model, node="n0", run_dir="~/somewhere")
    assert (named.node, named.run_dir) == ("n0", Path.home() / "somewhere")


def test_a_run_folder_without_a_name_says_what_is_missing(model: str) -> None:
    with pytest.raises(BadConfig, match="--node NAME"):
        said(model, run_dir="/tmp/x")


@pytest.mark.parametrize("name", ["", "a/b", "..", "-a", "a b", "n" * 65, "n\n0", 5])
def test_names_that_could_be_paths_or_flags_are_refused(model: str, name: object) -> None:
    with pytest.raises(BadConfig, match=r"--node.*letters, digits, dots and dashes"):
        said(model, node=name)


@pytest.mark.parametrize(("text", "size_bytes"), [("0", 0), ("off", 0), (0, 0), ("1GiB", 1 << 30)])
def test_preparation_has_a_budget_or_is_off(model: str, text: object, size_bytes: int) -> None:
    assert said(model, prepare=text).prepare_bytes == size_bytes


@pytest.mark.parametrize("wrong", ["-1", "much", True])
def test_other_budgets_are_refused(model: str, wrong: object) -> None:
    with pytest.raises(BadConfig, match="--prepare"):
        said(model, prepare=wrong)
