"""Settings of nodes that are one cluster: how many there are on this host, where they meet, how they reach each other.

`settings` puts them into its table. Nothing here is used by a server that is alone.
"""

from __future__ import annotations

from typing import Final

from janus_server.knob import Setting
from janus_server.readers import between, choice, file, host, meeting, node_name
from janus_server.types import Split

CLUSTER: Final[tuple[Setting, ...]] = (
    Setting(
        "nodes",
        "nodes",
        between(1, 64, "a number of nodes"),
        ("--nodes",),
        "start so many nodes on this host that are one server, on --port and the ports after it. --memory, "
        "--host-memory and --threads are those of each; by default they share what one would have",
        "N",
    ),
    Setting(
        "join",
        "join",
        meeting,
        ("--join",),
        "the cluster that this node belongs to: a run directory that nodes of this host have in common, or "
        "etcd://HOST:2379[,HOST…]/NAME for several hosts",
        "WHERE",
    ),
    Setting(
        "cluster_secret",
        "cluster_secret",
        file,
        ("--cluster-secret",),
        "file with the secret that nodes know each other by, readable by you alone (default: one in the run directory)",
        "FILE",
    ),
    Setting(
        "etcd_login",
        "etcd_login",
        file,
        ("--etcd-login",),
        "file with USER:PASSWORD for an etcd that wants them, readable by you alone (encrypted with etcds:// only)",
        "FILE",
    ),
    Setting(
        "pd_split",
        "pd_split",
        choice(Split),
        ("--pd-split",),
        "off, auto or always: whether another node computes a prompt than the one that runs its request, which then "
        "copies what came of it: auto where that pays by prediction, always for tests (default off)",
    ),
    Setting("domain", "domain", node_name, ("--domain",), "nodes of one domain have fast links to each other", "NAME"),
    Setting(
        "peer_host", "peer_host", host, ("--peer-host",), "address that other nodes reach this one at (127.0.0.1)", "IP"
    ),
    Setting(
        "peer_certfile",
        "peer_certfile",
        file,
        ("--peer-certfile",),
        "certificate (PEM) that this node shows to nodes of other machines",
        "FILE",
    ),
    Setting("peer_keyfile", "peer_keyfile", file, ("--peer-keyfile",), "its private key (PEM)", "FILE"),
    Setting("peer_cafile", "peer_cafile", file, ("--peer-cafile",), "the CA (PEM) that signed those of all", "FILE"),
)
