"""A `janus serve` child over a config file, and what the memory benches ask of it over HTTP.

Streams go through the load client of `bench serve`, wishes and looks through the admin routes. A server that refuses to
start is an answer too: `Server.start` says with which words.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from .load import LoadRun
from .records import Application, Drawn, Outcome, Plan, Segment
from .target import Caller, make_target
from .wording import IdWording

_READY: Final = re.compile(r"ready on http://\S+:(\d+)")
_STOP_S: Final = 60.0
_REFUSED: Final = 2  # the exit code for settings that cannot be


class NotStarted(Exception):
    """The server refused its settings before it was ready; the text is the last line of its log."""


class Server:
    """One node as a process of its own. Use it in a `with`; it is ready when that begins."""

    def __init__(self, config: Path, flags: Sequence[str] = ()) -> None:
        self._command = [sys.executable, "-m", "janus_server", "serve", "--config", str(config), "--port", "0",
                         "--access-log", "off", *flags]  # fmt: skip
        self._admin_key, self._user_key = secrets.token_hex(24), secrets.token_hex(24)
        self.log = ""
        self.port = 0

    def __enter__(self) -> Server:
        paths = os.pathsep.join(str(Path(path).resolve()) for path in sys.path if path)
        self._process = subprocess.Popen(
            self._command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True,
            env={**os.environ, "PYTHONPATH": paths, "JANUS_ADMIN_KEY": self._admin_key,
                 "JANUS_API_KEY": self._user_key},
        )  # fmt: skip
        for line in self._process.stderr or ():
            self.log += line
            if found := _READY.search(line):
                self.port = int(found[1])
                # The pipe must not fill while the benchmark runs.
                threading.Thread(target=self._drain, daemon=True).start()
                return self
        code, last = self._process.wait(_STOP_S), (self.log.strip().splitlines() or ["it said nothing"])[-1]
        if code != _REFUSED:
            raise SystemExit(f"the server ended with {code} before it was ready:\n{self.log}")
        raise NotStarted(last)

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(_STOP_S)

    def get(self, path: str) -> dict[str, Any]:
        """The JSON answer of an admin route."""
        return self._ask(path, None)[1]

    def wish(self, model: str, wish: str, wait_s: float = 0.0) -> tuple[int, dict[str, Any]]:
        """An operator's wish: the status, and what was answered."""
        return self._ask(f"/admin/models/{model}/{wish}?wait={wait_s:g}", b"")

    async def wishes(self, wishes: Sequence[tuple[str, str]], wait_s: float) -> list[tuple[int, dict[str, Any]]]:
        """(model, wish) pairs all at once, each waited for."""
        asked = [asyncio.to_thread(self.wish, model, wish, wait_s) for model, wish in wishes]
        return await asyncio.gather(*asked)

    async def load(self, plans: Sequence[Plan], seed: int) -> list[Outcome]:
        """Send the plans at their times and wait for all answers."""
        target = make_target(f"http://127.0.0.1:{self.port}", "completions", (), self._user_key, insecure=False)
        caller = Caller(
            target, IdWording(5, 250, seed), sampling={"temperature": 0}, ignore_eos=True, running_usage=True,
            extra_body={}, id_prefix=f"memory-{secrets.token_hex(4)}-",
        )  # fmt: skip
        return await LoadRun(target, caller, sorted(plans, key=lambda plan: plan.due_s)).run()

    def metrics(self) -> dict[str, float]:
        """Samples of /metrics by name, those of one name summed over their labels."""
        request = urllib.request.Request(self._url("/metrics"), headers=self._headers())
        text = urllib.request.urlopen(request, timeout=60).read().decode()
        found: dict[str, float] = {}
        for name, value in re.findall(r"^([a-z_:]+)(?:\{[^}]*\})? (\S+)$", text, re.MULTILINE):
            found[name] = found.get(name, 0.0) + float(value)
        return found

    def _ask(self, path: str, body: bytes | None) -> tuple[int, dict[str, Any]]:
        request = urllib.request.Request(self._url(path), body, headers=self._headers())
        try:
            with urllib.request.urlopen(request, timeout=600) as reply:
                return reply.status, json.loads(reply.read())
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())

    def _url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.port}{path}"

    def _headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self._admin_key}"}

    def _drain(self) -> None:
        for line in self._process.stderr or ():
            self.log = (self.log + line)[-200_000:]


def config_file(
    path: Path, settings: Mapping[str, Any], models: Mapping[str, Mapping[str, Any]],
    applications: Mapping[str, Mapping[str, Any]] | None = None,
) -> Path:  # fmt: skip
    """A janus.toml: settings, a [models.NAME] table each, and [applications.NAME] tables."""
    lines = [f"{key} = {json.dumps(value)}" for key, value in settings.items()]
    for kind, tables in (("models", models), ("applications", applications or {})):
        for name, table in tables.items():
            lines += ["", f"[{kind}.{json.dumps(name)}]"]
            lines += [f"{key} = {json.dumps(value)}" for key, value in table.items()]
    path.write_text("\n".join(lines) + "\n")
    return path


def plan_of(app: Application, due_s: float, number: int, prompt_tokens: int, output_tokens: int) -> Plan:
    """One request with a prompt that no other shares."""
    return Plan(due_s, app, Drawn((Segment(number, prompt_tokens),)), output_tokens)
