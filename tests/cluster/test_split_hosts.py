"""Pages of a prompt come over the network where the node that computed it is another host's."""

from __future__ import annotations

import re
from contextlib import ExitStack
from pathlib import Path

from real_cluster import complete
from server_process import Server, tiny_model
from test_cluster_hosts import Admin, Host, Nodes, hosts, nodes, tls  # noqa: F401 - fixtures
from test_cluster_splits import FLAGS, PROMPTS, outcomes


def test_a_prompt_is_computed_by_another_host(
    hosts: list[Host],  # noqa: F811
    nodes: Nodes,  # noqa: F811
    tmp_path: Path,
) -> None:
    path = tiny_model(tmp_path / "m", max_position_embeddings=2048)
    flags = ("--kernels", "cpu", "--threads", "1", *FLAGS)
    with Server(f"m={path}", *flags) as server:
        wanted = [complete(server.url, "m", prompt, tokens=20) for prompt in PROMPTS[:3]]
    nodes._arguments = [f"m={path}", *nodes._arguments[2:], *FLAGS, "--pd-split", "always", "--log-level", "debug"]
    with ExitStack() as stack:
        processes = [stack.enter_context(nodes.start(host, f"n{i}")) for i, host in enumerate(hosts)]
        admins = [Admin(process) for process in processes]
        for admin in admins:
            assert admin.wished("m", "load") == "m is active"
        for i, (prompt, text) in enumerate(zip(PROMPTS, wanted, strict=False)):
            assert complete(admins[i % 2].url, "m", prompt, tokens=20) == text
        counts = [outcomes(admin.url) for admin in admins]
        assert sum(one["brought"] for one in counts) == 3, counts
        assert not any(one["computed here"] for one in counts), counts
        logs = "".join(process.log for process in processes)
        assert len(re.findall("m: being read by n[01] of another host", logs)) >= 3, logs
