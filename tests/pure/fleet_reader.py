"""Reads the transcripts of the whole Brain: what happens at the margin, what it decided about that indented below.

A transcript says first what there is, then what happens when; everything takes fixed times (`Steady`):

    node NAME[..NAME] pages=N [host=NAME domain=NAME host_bytes=N]
    model NAME pages=N [shards=N priority=N idle_s=X attain=X longest=N]
    oracle NAME per_replica=N     it is known how it runs: a device prefills N tokens a second; nothing is fitted
    SECONDS join NAME[..NAME]     nodes join
    SECONDS lose NAME             a node dies
    SECONDS traffic NAME=N ...    from now on so many requests a second, of 1,000 tokens each
    SECONDS sleep NAME            an operator puts a model to sleep
    SECONDS clock X               the leader's clock jumps by so many seconds
    SECONDS                       nothing; until then

The times below are of the teller. An order is told by its verb, a refusal as "refuse"; which requests begin where is
left out.
"""

from __future__ import annotations

import re
from pathlib import Path

from fleet_world import FleetWorld, Node

from janus_server.orders import Action, Answer, Asked, KnownModel, Observed, Order, Refuse, Ticket, Verb, Wish
from janus_server.sched.oracle_records import Features, Observation, Promise, Subject
from janus_server.sched.shapes import DeviceShape, ModelShape
from janus_server.sched.state import BrainSettings

_TAKES_S = {Verb.LOAD: 3.0, Verb.WAKE: 0.4, Verb.FORK: 0.6, Verb.SLEEP: 0.3, Verb.UNLOAD: 0.1, Verb.EVICT: 0.1}
_TOKENS = 1000
_PAGE_BYTES = 200_000_000
_PERIOD_S = 30.0


class Steady(FleetWorld):
    """A prompt takes 20 ms, an answer a second, a load 3 s, a wake 0.4 s, a fork 0.6 s, a sleep 0.3 s."""

    def __init__(self) -> None:
        super().__init__(0, [], 0, 0, settings=BrainSettings(refit_every_s=None))
        self.back_s = None
        self.spare: dict[str, Node] = {}
        self.rates: dict[str, float] = {}
        self.flows: dict[str, int] = {}
        self.subjects: dict[str, Subject] = {}
        self.counted: dict[str, int] = {}
        self.lines: list[str] = []
        self.later(_PERIOD_S, "observe")

    def first_s(self, ticket: Ticket) -> float:
        return ticket.work_s

    def last_s(self) -> float:
        return 1.0

    def order_s(self, order: Order) -> float:
        return _TAKES_S[order.verb]

    def obey(self, action: Action) -> None:
        said = None
        match action:
            case Order(node=node, model=model, verb=verb, why=why):
                said = f"{verb.value} {model}@{node}: {why}"
            case Refuse(model, why, retry_s):
                said = f"refuse {model}: {why}" + ("" if retry_s is None else f"; again in {retry_s:g} s")
            case Answer(_, _, why):
                said = f"answer: {why}"
        before = len(self.said)
        if not isinstance(action, Answer):
            super().obey(action)
        for _, why in self.said[before:] if said is None else [(0.0, said)]:
            self.lines.append(f"    {self.now:.2f} {why}")

    def flow(self, model: str, rate: float) -> None:
        self.rates[model] = rate
        self.flows[model] = self.flows.get(model, 0) + 1
        if rate:
            self.later(0.0, "more", (model, self.flows[model]))

    def _more(self, flow: object) -> None:
        """The next request, unless the rate has changed."""
        model, number = flow  # type: ignore[misc]
        if self.flows[model] == number:
            self.counted[model] = self.counted.get(model, 0) + 1
            self.ask(model, _TOKENS)
            self.later(1.0 / self.rates[model], "more", flow)

    def _observe(self, _: object) -> None:
        """The period that ends now."""
        models = {}
        for model, requests in self.counted.items():
            rate = requests / _PERIOD_S
            features = Features(rate * (_TOKENS + 10), rate, _TOKENS, 1.0, 10.0, 1.0)
            models[model] = Observation(at_s=self.clock, features=features, replicas=1, requests=requests,
                                        on_time=requests)  # fmt: skip
        self.counted.clear()
        if self.subjects:
            self.tell(Observed(models, self.subjects))
        self.later(_PERIOD_S, "observe")

    # The script

    def play(self, line: str) -> list[str]:
        """What is decided until and by what the line tells."""
        words = line.split()
        self.lines = []
        match words[0]:
            case "node":
                for name in _names(words[1]):
                    settings = _settings(words[2:])
                    host_bytes = int(settings.get("host_bytes", 10**12))
                    self.spare[name] = Node(name, int(settings["pages"]), host_bytes, [],
                                            (settings.get("host", "h0"), settings.get("domain", "d0")))  # fmt: skip
            case "model":
                self.models[words[1]] = _model(words[1], _settings(words[2:]))
                self.tokens[words[1]] = [0, 0, 0, 0, 0]
            case "oracle":
                self.subjects[words[1]] = _subject(words[1], float(_settings(words[2:])["per_replica"]))
            case _:
                self.run(float(words[0]))
                self._happen(words[1:])
        return self.lines

    def _happen(self, words: list[str]) -> None:
        match words:
            case ["join", names]:
                for name in _names(names):
                    old = self.spare[name]
                    self.join(Node(name, old.pool, old.host, list(self.models), old.place))
            case ["lose", name]:
                self.lose(name)
            case ["traffic", *rates]:
                for rate in rates:
                    model, _, value = rate.partition("=")
                    self.flow(model, float(value))
            case ["sleep", model]:
                self.tell(Asked(model, Wish.SLEEP))
            case ["clock", jump]:
                self.ahead_s += float(jump)
        self.run(self.now)


def read(path: Path) -> tuple[str, str]:
    """The transcript as it is written, and as it comes out."""
    world, out = Steady(), []
    written = path.read_text(encoding="utf-8")
    for line in written.splitlines():
        if line.startswith(" "):
            continue
        said = world.play(line) if line.strip() and not line.startswith("#") else []
        # What was decided in the meantime stands before what happens then.
        before = [one for one in said if float(one.split()[0]) < float(line.split()[0])] if said else []
        out += [*before, line, *said[len(before) :]]
    return written, "\n".join(out) + "\n"


def _names(word: str) -> list[str]:
    """n0..n3 are four."""
    found = re.fullmatch(r"([a-z]+)(\d+)\.\.[a-z]+(\d+)", word)
    return [f"{found[1]}{i}" for i in range(int(found[2]), int(found[3]) + 1)] if found else [word]


def _settings(words: list[str]) -> dict[str, str]:
    return dict(word.split("=", 1) for word in words)


def _model(name: str, settings: dict[str, str]) -> KnownModel:
    idle_s, attain = settings.get("idle_s"), settings.get("attain")
    return KnownModel(
        model=name, weight_pages=int(settings["pages"]), host_bytes=int(settings["pages"]) * _PAGE_BYTES,
        longest_pages=int(settings.get("longest", "10")), shards=int(settings.get("shards", "1")),
        priority=int(settings.get("priority", "0")), load_s=3.0, wake_s=0.4, preload="preload" in settings,
        idle_s=None if idle_s is None else float(idle_s), attain=None if attain is None else float(attain),
    )  # fmt: skip


def _subject(name: str, per_replica: float) -> Subject:
    """A model of 1 GB, and a device whose compute is what bounds it: so many tokens of prompts a second."""
    model = ModelShape(name=name, parameters=1e9, layers=16, hidden=2048, kv_bytes=65_536.0, pair_flops=0.0,
                       parameter_bytes=1.0)  # fmt: skip
    device = DeviceShape(
        name="even", flops=2e9 * per_replica, memory_bytes=4e10, bandwidth_bytes_s=1e12, link_bytes_s=1e9,
        flops_reached=1.0, bandwidth_reached=1.0, memory_reached=1.0, step_s=0.0, activation_bytes=0.0,
    )  # fmt: skip
    return Subject(model=model, device=device, promise=Promise(1.0, 0.1))
