"""Network namespaces for nodes and etcd servers, and the network between them: `Net` for the chaos bench.

Each namespace stands for a host of its own. `chaos_switch` carries what they say, in a process of its own; a client in
the namespace of the bench reaches all of them whatever happens between them.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

# A range that is set aside for measurements: no real network has it.
_NET: Final = "198.18.77"
_BITS: Final = 24
_CLIENT: Final = "client"


class Net:
    """`with Net(names) as net:` has a namespace for each name, and all reach each other."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = tuple(names)
        self._process: subprocess.Popen[str] | None = None

    def address(self, name: str) -> str:
        return f"{_NET}.{self._names.index(name) + 1}"

    def before(self, name: str) -> list[str]:
        """The beginning of a command that is to run on that host."""
        return ["ip", "netns", "exec", _namespace(name)]

    def weather(
        self, *, cut: Iterable[tuple[str, str]] = (), slow: Iterable[str] = (), delay_s: float = 0.0,
        jitter_s: float = 0.0, loss: float = 0.0,
    ) -> None:  # fmt: skip
        """What holds from now on, instead of what held before; see `chaos_switch.Weather`."""
        said = {"cut": [list(pair) for pair in cut], "slow": list(slow), "delay_s": delay_s, "jitter_s": jitter_s,
                "loss": loss}  # fmt: skip
        process = self._process
        if process is None or process.stdin is None:
            return
        process.stdin.write(json.dumps(said) + "\n")
        process.stdin.flush()
        self._said("changed")

    def cut_off(self, name: str, others: Iterable[str]) -> None:
        """That host reaches none of these; clients reach all."""
        self.weather(cut=[(name, other) for other in others if other != name])

    def __enter__(self) -> Net:
        try:
            for name in self._names:
                subprocess.run(["ip", "netns", "add", _namespace(name)], check=True)
            ports = [f"{name}={_namespace(name)}={self.address(name)}/{_BITS}" for name in self._names]
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(Path(__file__).with_name("chaos_switch.py")), *ports,
                 f"{_CLIENT}=={_NET}.254/{_BITS}"],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            )  # fmt: skip
            self._said("ready")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        process = self._process
        if process is not None:
            if process.stdin is not None:
                process.stdin.close()
            process.wait(20)
            if process.stdout is not None:
                process.stdout.close()
        for name in self._names:
            subprocess.run(["ip", "netns", "del", _namespace(name)], check=False, stderr=subprocess.DEVNULL)

    def _said(self, word: str) -> None:
        line = "" if self._process is None or self._process.stdout is None else self._process.stdout.readline()
        if line.strip() != word:
            raise RuntimeError("the network between the namespaces has failed")


def why_not() -> str | None:
    """Why no namespaces can be made here; None where they can."""
    if shutil.which("ip") is None:
        return "there is no `ip` (Debian: apt install iproute2)"
    if not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        return "/dev/net/tun cannot be opened: network namespaces are joined by TAP devices"
    name = _namespace("trial")
    tried = subprocess.run(["ip", "netns", "add", name], check=False, capture_output=True, text=True)
    if tried.returncode != 0:
        return f"network namespaces may not be made here ({tried.stderr.strip()})"
    subprocess.run(["ip", "netns", "del", name], check=False)
    return None


def _namespace(name: str) -> str:
    return f"chaos-{os.getpid()}-{name}"
