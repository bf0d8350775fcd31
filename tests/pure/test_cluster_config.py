"""What a user says of a cluster on the command line, and what is made of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from janus_server import machine
from janus_server.config import ServeConfig, default_memory_bytes, serve_config
from janus_server.errors import BadConfig
from janus_server.peers import peering_of
from janus_server.types import Split


@pytest.fixture
def model(tmp_path: Path) -> str:
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return str(folder)


def config(model: str, **flags: Any) -> ServeConfig:
    return serve_config([model], flags=flags)


def test_nodes_of_one_host_share_what_one_would_have(model: str) -> None:
    alone, each = config(model), config(model, nodes="4")
    assert each.memory_bytes == default_memory_bytes() // 4 // each.page_bytes * each.page_bytes < alone.memory_bytes
    assert each.host_memory_bytes == alone.host_memory_bytes // 4
    assert each.threads == max(1, machine.cores() // 4)


def test_what_is_said_is_said_of_each_and_must_fit_for_all(model: str) -> None:
    size = machine.memory_bytes() // 3
    assert config(model, nodes="2", memory=str(size)).memory_bytes > size - (2 << 20)
    with pytest.raises(BadConfig, match="for each of 4 nodes is more than this machine"):
        config(model, nodes="4", memory=str(size))


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ({"nodes": "0"}, "a number of nodes between 1 and 64"),
        ({"nodes": "-1"}, "'-1' is not a number of nodes between 1 and 64"),
        ({"nodes": "2", "node": "n1"}, "names its nodes itself"),
        ({"join": ""}, "neither a run directory nor"),
        ({"cluster_secret": "x"}, "--cluster-secret is for a server that is part of a cluster"),
        ({"etcd_login": "x"}, "--etcd-login is for a server that is part of a cluster"),
        ({"join": "/tmp/x", "etcd_login": "x"}, "--etcd-login is for nodes that meet in etcd"),
        ({"peer_host": "10.0.0.1"}, "--peer-host is for a server that is part of a cluster"),
        ({"domain": "rack"}, "--domain is for .* give --nodes N or --join WHERE"),
        ({"join": "/tmp/x", "peer_keyfile": "x"}, "go together"),
    ],
)
def test_what_makes_no_sense_is_refused(model: str, flags: dict[str, str], sentence: str) -> None:
    with pytest.raises(BadConfig, match=sentence):
        config(model, **flags)


def test_a_run_directory_is_made_whole_and_an_address_is_left_alone(model: str) -> None:
    assert config(model, join="run").join == str(Path("run").absolute())
    assert config(model, join="etcd://a:2379/c").join == "etcd://a:2379/c"


def test_nodes_that_meet_in_a_directory_share_their_weights_there(model: str, tmp_path: Path) -> None:
    peering = peering_of(config(model, join=str(tmp_path / "run"), node="n1"), [tmp_path / "other"])
    assert peering is not None and peering.run_dir == tmp_path / "run" / "weights"
    assert (tmp_path / "run").stat().st_mode & 0o777 == 0o700  # the coordinator refuses any other


def test_prompts_are_computed_elsewhere_in_a_cluster_alone(model: str) -> None:
    assert config(model, nodes="2").pd_split is Split.OFF
    assert config(model, nodes="2", pd_split="auto").pd_split is Split.AUTO
    with pytest.raises(BadConfig, match="--pd-split is for a server that is part of a cluster"):
        config(model, pd_split="auto")
