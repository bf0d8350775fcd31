"""Reads the transcripts of the deciding code: events at the margin, what was decided about them indented below.

The lines of a transcript, in any order after what they name:

    model NAME pages=N [shards=N priority=N target=X idle_s=X split bytes=N outage_s=X]
    device NAME[..NAME] pages=N [host=NAME domain=NAME copies=A,B]
    stand NAME@DEVICE[+DEVICE] [draining|rising] [running=N] [backlog_s=X]
    oracle NAME per_replica=N         a replica keeps its promise up to N tokens a second; without: nobody can predict
    SECONDS traffic NAME=TOKENS_S ... [backlog NAME=S ...] [late NAME=LATE/ENDED ...]   a tick of the fast path
    SECONDS done                      what was under way has ended, and so have the requests of what is drained
    SECONDS lost DEVICE               a device is gone, with what was on it
    SECONDS pools NAME=REPLICAS/LOAD ...      a tick of the assignment to pools
    plan NAME@DEVICE ...              the steps to that placement
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np

from janus_server.orders import Verb
from janus_server.sched.mind import Load, Question
from janus_server.sched.placement import Change, Cluster, Device, Model, Replica, Standing
from janus_server.sched.plan import plan
from janus_server.sched.pools import Pools, Signal, assign
from janus_server.sched.rollout import roll
from janus_server.sched.scaling import Scaler

T = TypeVar("T", bound=msgspec.Struct)


class Stage:
    """The devices and replicas of a transcript, which do at `done` what they were told."""

    def __init__(self) -> None:
        self.models: dict[str, Model] = {}
        self.devices: dict[str, Device] = {}
        self.replicas: dict[tuple[str, tuple[str, ...]], Replica] = {}
        self.able: dict[str, float] = {}
        self.traffic: dict[str, float] = {}
        self.quiet_since: dict[str, float] = {}
        self.scaler = Scaler()
        self.pools = Pools()

    def play(self, line: str) -> list[str]:
        """What is decided about one line."""
        words = line.split()
        if words[0] == "model":
            self.models[words[1]] = _struct(Model, {"model": words[1]}, words[2:])
        elif words[0] == "device":
            for name in _names(words[1]):
                self.devices[name] = _struct(Device, {"id": name}, words[2:])
        elif words[0] == "oracle":
            self.able[words[1]] = float(words[2].partition("=")[2])
        elif words[0] == "stand":
            self._stand(words[1:])
        elif words[0] == "plan":
            return self._plan(words[1:])
        else:
            return self._event(float(words[0]), words[1], words[2:])
        return []

    def _stand(self, words: Sequence[str]) -> None:
        model, _, at = words[0].partition("@")
        named = [w for w in words[1:] if "=" not in w]
        standing = Standing(named[0]) if named else Standing.ACTIVE
        made = _struct(Replica, {"model": model, "devices": tuple(at.split("+")), "standing": standing},
                       [w for w in words[1:] if "=" in w])  # fmt: skip
        self.replicas[made.key] = made

    def _event(self, now: float, kind: str, words: Sequence[str]) -> list[str]:
        if kind == "traffic":
            return self._tick(now, words)
        if kind == "pools":
            return self._assign(now, words)
        if kind == "lost":
            del self.devices[words[0]]
            self.replicas = {k: r for k, r in self.replicas.items() if words[0] not in r.devices}
        if kind == "done":
            for key, replica in list(self.replicas.items()):
                if replica.standing is Standing.SINKING:
                    del self.replicas[key]
                    for name in replica.devices:
                        device = self.devices[name]
                        copies = tuple(sorted({*device.copies, replica.model}))
                        self.devices[name] = msgspec.structs.replace(device, copies=copies)
                elif replica.standing is Standing.RISING:
                    self.replicas[key] = msgspec.structs.replace(replica, standing=Standing.ACTIVE)
                else:
                    self.replicas[key] = msgspec.structs.replace(replica, running=0, serves=0)
        return []

    def _tick(self, now: float, words: Sequence[str]) -> list[str]:
        backlog: dict[str, float] = {}
        late: dict[str, tuple[int, int]] = {}
        into = "traffic"
        for word in words:
            name, _, value = word.partition("=")
            if not value:
                into = word
            elif into == "traffic":
                self.traffic[name] = float(value)
            elif into == "backlog":
                backlog[name] = float(value)
            else:
                some, _, ended = value.partition("/")
                late[name] = int(some), int(ended)
        told = []
        for name, tokens_s in self.traffic.items():
            if tokens_s > 0.0 or name not in self.quiet_since:
                self.quiet_since[name] = now
            some, ended = late.get(name, (0, 0))
            told.append(Load(model=name, tokens_s=tokens_s, backlog_s=backlog.get(name, 0.0), ended=ended,
                                late=some, idle_for_s=now - self.quiet_since[name]))  # fmt: skip
        cluster = Cluster(tuple(self.devices.values()), tuple(self.replicas.values()))
        targets, notes = self.scaler.decide(told, self.models, cluster.devices, self._predict, now)
        done = roll(cluster, self.models, self.scaler.targets)
        for change in done.changes:
            self._begin(change)
        lines = [f"! {note.subject}: {note.why}" for note in notes]
        lines += [f"{target.why}" for target in targets]
        lines += [f"{change.verb.value if change.verb else 'role'}: {change.why}" for change in done.changes]
        return lines + [f"! {note.subject}: {note.why}" for note in done.notes]

    def _begin(self, change: Change) -> None:
        key = change.model, change.devices
        standings = {Verb.DRAIN: Standing.DRAINING, Verb.SLEEP: Standing.SINKING, Verb.SERVE: Standing.ACTIVE}
        old = self.replicas.get(key, Replica(model=change.model, devices=change.devices, standing=Standing.RISING))
        standing = old.standing if change.verb is None else standings.get(change.verb, Standing.RISING)
        self.replicas[key] = msgspec.structs.replace(old, standing=standing, role=change.role)
        for other in [r for r in self.replicas.values() if r.model == change.model and change.source in r.devices]:
            self.replicas[other.key] = msgspec.structs.replace(other, serves=other.serves + 1)

    def _predict(self, questions: Sequence[Question]) -> list[np.ndarray | None]:
        return [attainment(q, self.traffic[q.model], self.able.get(q.model)) for q in questions]

    def _assign(self, now: float, words: Sequence[str]) -> list[str]:
        signals = []
        for word in words:
            name, _, value = word.partition("=")
            replicas, _, load = value.partition("/")
            signals.append(Signal(model=name, replicas=int(replicas), hbm=0.2, compute=float(load), bandwidth=0.1,
                                  heat=float(load)))  # fmt: skip
        done = assign(self.pools, signals, len(self.devices), now)
        self.pools = done.pools
        return [change.why for change in done.changes] + [f"! {note.subject}: {note.why}" for note in done.notes]

    def _plan(self, words: Sequence[str]) -> list[str]:
        wanted = [Replica(model=w.partition("@")[0], devices=tuple(w.partition("@")[2].split("+"))) for w in words]
        made = plan(Cluster(tuple(self.devices.values()), tuple(self.replicas.values())), self.models.values(), wanted)
        lines = []
        for i, step in enumerate(made.steps):
            after = f" (after {', '.join(map(str, step.after))})" if step.after else ""
            verb = step.change.verb.value if step.change.verb else "role"
            lines.append(f"{i} {verb}{after}: {step.change.why}")
        return lines + [f"! {note.subject}: {note.why}" for note in made.notes]


def attainment(question: Question, tokens_s: float, able: float | None) -> np.ndarray | None:
    """All on time up to what a replica is able to do; above, the part that it does in time. Never quite all."""
    if able is None:
        return None
    load = question.factor * tokens_s / np.array(question.counts, dtype=np.float64) / able
    return np.minimum(0.999, 1.0 / np.maximum(load, 1e-9))


def read(path: Path) -> tuple[str, str]:
    """The transcript as it is written, and as it comes out."""
    stage, out = Stage(), []
    written = path.read_text(encoding="utf-8")
    for line in written.splitlines():
        if line.startswith(" "):
            continue
        out.append(line)
        if line.strip() and not line.startswith("#"):
            out += [f"    {said}" for said in stage.play(line)]
    return written, "\n".join(out) + "\n"


def _names(word: str) -> list[str]:
    """n0..n3 are four."""
    found = re.fullmatch(r"([a-z]+)(\d+)\.\.[a-z]+(\d+)", word)
    return [f"{found[1]}{i}" for i in range(int(found[2]), int(found[3]) + 1)] if found else [word]


def _struct(kind: type[T], known: dict[str, object], words: Sequence[str]) -> T:
    """Words such as pages=3, and bare ones for what is true."""
    fields: dict[str, object] = dict(known)
    for word in words:
        name, _, value = word.partition("=")
        fields["weight_bytes" if name == "bytes" else name] = (
            True if not value else tuple(value.split(",")) if name == "copies" else
            value if name in ("host", "domain") else float(value) if "." in value or "e" in value else int(value)
        )  # fmt: skip
    return kind(**fields)
