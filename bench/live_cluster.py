"""A cluster of paced nodes on this machine that stands for a scenario of the simulator: real processes, small models.

Every model of the scenario is served by a random checkpoint whose pages are to the node's as those of the imagined
model are to the device's, and every node takes as long as the scenario's device does (`--paced`). `live` starts one and
asks it what it cost; `live_told` reads what its leader decided. Nothing is measured here but processor time.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from janus_server.errors import BadConfig
from janus_server.sched.state import BrainSettings

from .memory_models import Shape, write_model
from .simulator.constants import LINKS
from .simulator.physics import page_tokens
from .simulator.records import ModelSpec, NodeSpec, Scenario

# Of the live node: a page holds 512 tokens of the smallest KV cache that there is, 32 bytes a token.
PAGE_BYTES: Final = 16 << 10
_LAYERS, _HEAD_DIM, _HIDDEN, _VOCAB = 1, 8, 64, 320
# Enough for steps as large as asked for; what the imagined device has no pages for is held back.
_MEMORY: Final = "128MiB"
_READY_S: Final = 60.0
_STOP_S: Final = 60.0
STEP_TOKENS: Final = 512
SEQUENCES: Final = 128


class Busy(NamedTuple):
    """Processor seconds until a moment: of the nodes and of whoever asks them, and of the whole machine."""

    at_s: float
    ours_s: float
    machine_s: float


class LiveCluster:
    """`with LiveCluster(scenario, brain) as cluster:` has nodes that are ready. urls are theirs, in order."""

    def __init__(self, scenario: Scenario, brain: BrainSettings, folder: Path | None = None) -> None:
        """folder keeps journals and logs; without one they are gone afterwards."""
        _check(scenario)
        self._scenario = scenario
        self._brain = brain
        self._temporary = tempfile.TemporaryDirectory(prefix="janus-live-")
        self.folder = folder or Path(self._temporary.name)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.urls: list[str] = []
        self.log: list[str] = []

    def __enter__(self) -> LiveCluster:
        nodes, work = len(self._scenario.nodes), Path(self._temporary.name)
        for old in self.journals():
            old.unlink()
        command = [
            sys.executable, "-m", "janus_server", "serve", "--config", str(self._write(work)), "--nodes", str(nodes),
            "--port", "0", "--access-log", "off", "--journal", str(self.folder / "journal"), "--kernels", "cpu",
            "--threads", "1", "--page-size", str(PAGE_BYTES), "--host-memory", "64MiB", "--max-num-seqs",
            str(SEQUENCES), "--max-num-batched-tokens", str(STEP_TOKENS), "--no-enable-prefix-caching",
            "--memory", _MEMORY, "--paced", str(work / "pacing.json"),
        ]  # fmt: skip
        run = work / "run"
        run.mkdir(mode=0o700)
        paths = os.pathsep.join(str(Path(path).resolve()) for path in sys.path if path)
        self._process = subprocess.Popen(
            command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True,
            env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "XDG_RUNTIME_DIR": str(run)},
        )  # fmt: skip
        self._ready = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self._ready.wait(_READY_S)
        if not self.urls:
            self._end()
            raise SystemExit(f"the nodes were not ready:\n{''.join(self.log[-40:])}")
        return self

    def __exit__(self, *_: object) -> None:
        self._end()
        (self.folder / "nodes.log").write_text("".join(self.log))
        self._temporary.cleanup()

    def journals(self) -> list[Path]:
        """Of all nodes and terms."""
        return sorted(self.folder.glob("journal.*"))

    def busy(self) -> Busy:
        """What was spent so far."""
        tick_s = 1.0 / os.sysconf("SC_CLK_TCK")
        pids = [self._process.pid, *_children(self._process.pid)]
        ours = sum(_ticks(pid) for pid in pids) * tick_s + time.process_time()
        idle, total = _machine()
        return Busy(time.monotonic(), ours, (total - idle) * tick_s)

    def paced(self) -> list[str]:
        """How well each node kept its pace; said at the end."""
        return [line.strip() for line in self.log if "paced: " in line]

    def _read(self) -> None:
        for line in self._process.stderr or ():
            self.log.append(line)
            if "nodes are one server" in line:
                self.urls = re.findall(r"http://\S+?(?=,|\s|$)", line)
                self._ready.set()
        self._ready.set()  # it ended

    def _end(self) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(_STOP_S)
        self._reader.join(_STOP_S)

    def _write(self, work: Path) -> Path:
        """Checkpoints, the pacing and the config file."""
        asked, lines = self._scenario, ["[models]"]
        for number, spec in enumerate(asked.models):
            folder = write_model(work / f"model{number}", _small(spec, asked.nodes[0]), number)
            lines.append(f'"{spec.known.model}" = "{folder}"')
        for app in asked.apps:
            lines += [f'[applications."{app.name}"]', f'model = "{app.model}"', f"ttft = {app.ttft_s}",
                      f"tpot = {app.tpot_s}", f"attain = {app.attain}", f"priority = {app.priority}"]  # fmt: skip
        config = work / "janus.toml"
        config.write_text("\n".join(lines) + "\n")
        node = asked.nodes[0]
        pacing = {
            "device": node.shape, "models": {spec.known.model: spec.shape for spec in asked.models},
            "pool_pages": node.pool_pages, "host_bytes": node.host_bytes, "links": LINKS, "brain": self._brain,
        }  # fmt: skip
        (work / "pacing.json").write_bytes(msgspec.json.encode(pacing))
        return config


def _check(scenario: Scenario) -> None:
    """BadConfig where nodes of this machine cannot stand for it."""
    if len(set(node.shape for node in scenario.nodes)) > 1 or any(spec.known.shards > 1 for spec in scenario.models):
        raise BadConfig(f"scenario {scenario.name}: live nodes are all alike, and each holds whole models")
    for spec in scenario.models:
        if page_tokens(spec, scenario.nodes[0].page_bytes) != _page_tokens():
            raise BadConfig(f"scenario {scenario.name}: cluster.page must hold {_page_tokens()} tokens of "
                            f"{spec.known.model}, as a live node's does")  # fmt: skip


def _page_tokens() -> int:
    return PAGE_BYTES // (2 * _LAYERS * _HEAD_DIM * 2)


def _small(spec: ModelSpec, node: NodeSpec) -> Shape:
    """A model whose weights take as many pages of a live node as the imagined ones do of a device."""
    wanted = spec.known.weight_pages * PAGE_BYTES // 2
    others = _VOCAB * _HIDDEN + 4 * _HIDDEN * _HEAD_DIM + 3 * _HIDDEN
    return Shape(
        _HIDDEN, _LAYERS, 1, 1, _HEAD_DIM, max(16, (wanted - others) // (3 * _HIDDEN) // 16 * 16), 2048, _VOCAB
    )


def _children(pid: int) -> list[int]:
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def _ticks(pid: int) -> int:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return int(fields[11]) + int(fields[12])


def _machine() -> tuple[int, int]:
    """Idle ticks and all of them, of all processors."""
    fields: Sequence[int] = [int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return fields[3] + fields[4], sum(fields)
