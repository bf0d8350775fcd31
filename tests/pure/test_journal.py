"""The journal: what was written is read, replays to the same actions, and each file stands alone."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from janus_server import journal
from janus_server.cli import main
from janus_server.errors import BadConfig
from janus_server.journal import Entry, Heading, Journal
from janus_server.orders import (
    Asked,
    Busy,
    Done,
    Event,
    Joined,
    KnownModel,
    Order,
    Report,
    Stage,
    Tick,
    Verb,
    Wanted,
    Wish,
)
from janus_server.sched.brain import Brain
from janus_server.sched.state import BrainSettings
from janus_server.terminal.replay import ReplayOptions, run

SETTINGS = BrainSettings(patience_s=0.5, stay_s=1.0)


def _model(name: str) -> KnownModel:
    return KnownModel(model=name, weight_pages=10, host_bytes=100, longest_pages=4, preload=name == "a")


class _Led:
    """A Brain whose every event is journalled; its orders are done when `end` is called."""

    def __init__(self, path: Path, most_bytes: int = journal.MOST_BYTES) -> None:
        self.brain = Brain(SETTINGS)
        self.lost: list[str] = []
        self.open: list[Order] = []
        self.journal = Journal(path, self.brain, self.lost.append, most_bytes)

    def tell(self, event: Event, now: float) -> None:
        actions = tuple(self.brain.on(event, now))
        self.journal.write(Entry(now, event, actions))
        self.open += [a for a in actions if isinstance(a, Order) and a.verb not in (Verb.DRAIN, Verb.SERVE)]

    def end(self, now: float) -> None:
        order = self.open.pop(0)
        stage = {Verb.SLEEP: Stage.WARM, Verb.UNLOAD: Stage.COLD, Verb.EVICT: Stage.COLD}.get(order.verb, Stage.ACTIVE)
        self.tell(Done(order.id, stage, order.verb is Verb.SLEEP, 0.1), now)

    def run(self) -> None:
        """Two models take turns in room for one."""
        self.tell(Joined("n0", 15, 1000, (_model("a"), _model("b"))), 0.0)
        now = 0.1
        for turn in range(20):
            while self.open:
                self.end(now)
                now += 0.1
            name = "ab"[turn % 2]
            if self.brain.stages("n0")[name] is Stage.ACTIVE:
                self.tell(Report("n0", {name: Busy(turn % 3, 0, 0.3)}), now)
            self.tell(Wanted(name), now)
            self.tell(Asked("b", Wish.PIN if turn == 3 else Wish.UNPIN), now + 0.05)
            now += 2.0
            self.tell(Tick(), now)
        self.journal.close()


def test_a_journal_replays_to_the_same_actions(tmp_path: Path) -> None:
    led = _Led(tmp_path / "j")
    led.run()
    entries = [line for line in journal.read(tmp_path / "j") if isinstance(line, Entry)]
    assert sum(len(entry.actions) for entry in entries) > 20
    done = journal.replay(tmp_path / "j")
    assert (done.entries, done.difference) == (len(entries), None)
    assert done.span_s > 30


def test_another_decision_is_found(tmp_path: Path) -> None:
    _Led(tmp_path / "j").run()
    lines = (tmp_path / "j").read_bytes().replace(b'"verb":"wake"', b'"verb":"load"', 1)
    (tmp_path / "j").write_bytes(lines)
    difference = journal.replay(tmp_path / "j").difference
    assert difference is not None
    assert difference.replayed != difference.entry.actions


def test_every_file_stands_alone(tmp_path: Path) -> None:
    led = _Led(tmp_path / "j", most_bytes=6000)
    led.run()
    both = [journal.replay(tmp_path / "j.1"), journal.replay(tmp_path / "j")]
    assert [one.difference for one in both] == [None, None]
    heading = next(iter(journal.read(tmp_path / "j")))
    assert isinstance(heading, Heading) and heading.memory.orders > 5
    assert (tmp_path / "j").stat().st_mode & 0o777 == 0o600


def test_a_line_cut_short_is_left_out(tmp_path: Path) -> None:
    _Led(tmp_path / "j").run()
    whole = journal.replay(tmp_path / "j").entries
    (tmp_path / "j").write_bytes((tmp_path / "j").read_bytes()[:-7])
    assert journal.replay(tmp_path / "j").entries == whole - 1


def test_a_file_that_is_no_journal_is_named(tmp_path: Path) -> None:
    (tmp_path / "j").write_bytes(b'{"x":1}\n')
    with pytest.raises(BadConfig, match="line 1 is no line of a journal"):
        journal.replay(tmp_path / "j")
    (tmp_path / "k").write_bytes(b"")
    with pytest.raises(BadConfig, match="does not begin"):
        journal.replay(tmp_path / "k")
    with pytest.raises(BadConfig, match="cannot read"):
        journal.replay(tmp_path / "none")


def test_a_journal_that_cannot_go_on_says_so_once(tmp_path: Path) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    led = _Led(folder / "j", most_bytes=1000)
    (folder / "j").unlink()
    folder.rmdir()
    led.run()
    assert len(led.lost) == 1 and "ends here: No such file" in led.lost[0]


def test_a_journal_that_cannot_begin_is_refused() -> None:
    with pytest.raises(BadConfig, match="no regular file"):
        _Led(Path("/dev/full"))


def test_replay_prints_what_was_decided_and_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _Led(tmp_path / "j").run()
    assert main(["replay", str(tmp_path / "j"), "--sentences"]) == 0
    told = capsys.readouterr().out
    assert "b: wanted for" in told and "lead to the same decisions" in told
    lines = (tmp_path / "j").read_bytes().replace(b'"verb":"wake"', b'"verb":"load"', 1)
    (tmp_path / "j").write_bytes(lines)
    assert main(["replay", str(tmp_path / "j")]) == 1
    assert "journal: Order(" in capsys.readouterr().err
    assert main(["replay", str(tmp_path / "none")]) == 2


def test_a_restart_keeps_the_journal_of_the_run_before(tmp_path: Path) -> None:
    _Led(tmp_path / "j").run()
    before = (tmp_path / "j").read_bytes()
    _Led(tmp_path / "j").journal.close()
    assert (tmp_path / "j.1").read_bytes() == before


def test_a_memory_that_cannot_be_is_named(tmp_path: Path) -> None:
    led = _Led(tmp_path / "j")
    led.tell(Joined("n0", 15, 1000, (_model("a"),)), 0.0)
    led.journal.close()
    file = tmp_path / "j"
    heading, _, rest = file.read_bytes().partition(b"\n")
    edited = msgspec.json.decode(heading)
    edited["memory"]["fleet"]["homes"] = {"a": [["n7"]]}
    file.write_bytes(msgspec.json.encode(edited) + b"\n" + rest)
    with pytest.raises(BadConfig, match="line 1 tells of what cannot be"):
        journal.replay(file)


def test_the_command_tells_many_journals_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As a cluster leaves them: one a term. Where one comes out otherwise, its name and line are said."""
    files = tuple(tmp_path / f"j.n{i}.{i + 1}" for i in range(2))
    for file in files:
        _Led(file).run()
    assert run(ReplayOptions(files)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3 and lines[2].startswith("2 journals, of terms 1 to 1, all with the same decisions")
    files[1].write_bytes(files[1].read_bytes().replace(b'"verb":"wake"', b'"verb":"load"', 1))
    assert run(ReplayOptions(files)) == 1
    assert "j.n1.2, term 1: line " in capsys.readouterr().err
