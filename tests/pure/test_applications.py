"""Applications: which one a request counts for, what their tables may say, and what a request attains of a promise."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from janus_server.applications import Application, Applications, check_keys
from janus_server.attainment import Counts, Course, Families, Kind, Outcome, judge, kinds_of
from janus_server.config import ServeConfig, serve_config
from janus_server.errors import BadConfig, Refused
from janus_server.modelref import ModelOptions
from janus_server.types import Promise, Request

FAST = Promise(0.3, 0.05, 0.95)
SUPPORT = Application("support", "chat", FAST, priority=10)
ALICES = Application("alices", "chat", Promise(1.0), key="alice")
OWN = Application("code", "code", Promise(None, 0.1), priority=-5)
ALL = Applications((SUPPORT, ALICES, OWN))


# Names


@pytest.mark.parametrize(
    ("name", "key", "expected"),
    [
        ("support", "", SUPPORT),
        ("support", "alice", SUPPORT),
        ("code", "", OWN),
        ("code", "alice", OWN),
        ("chat", "", Application("chat", "chat")),
        ("chat", "bob", Application("chat", "chat")),
        ("chat", "alice", ALICES),
        ("alices", "alice", ALICES),
        ("alices", "bob", None),
        ("alices", "", None),
        ("nobody's", "alice", Application("nobody's", "nobody's")),
    ],
)
def test_a_request_counts_for_the_application_of_its_name_or_its_key(
    name: str, key: str, expected: Application | None
) -> None:
    assert ALL.resolve(name, key) == expected


def test_an_admin_key_may_use_every_name() -> None:
    assert ALL.resolve("alices", "operator", admin=True) == ALICES
    assert ALL.resolve("chat", "operator", admin=True) == Application("chat", "chat")


def test_served_names_are_the_models_then_the_applications() -> None:
    assert ALL.names(["code", "chat"]) == ["code", "chat", "support", "alices"]
    assert ALL.of_model("chat") == [SUPPORT, ALICES]


def test_an_application_is_bound_to_a_key_that_exists() -> None:
    check_keys(ALL.listed, {"alice", "bob"})
    with pytest.raises(BadConfig, match=r'\[applications.alices\]: no API key is called "alice"; did you mean "alise"'):
        check_keys(ALL.listed, {"alise"})
    with pytest.raises(BadConfig, match="there is none: give --api-key-file"):
        check_keys(ALL.listed, set())
    check_keys((SUPPORT, OWN), set())


# Tables of the config file


def configured(tmp_path: Path, text: str, *models: str) -> ServeConfig:
    """What a file with models chat and code and this text resolves to."""
    folder = tmp_path / "tiny"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text("{}")
    file = tmp_path / "janus.toml"
    both = f'[models]\nchat = "{folder}"\ncode = "{folder}"\n' if "[models" not in text else ""
    file.write_text(f"{text}\n{both}".replace("PATH", str(folder)))
    return serve_config([f"{name}={folder}" for name in models], file=file)


def test_applications_are_read(tmp_path: Path) -> None:
    text = """
        [applications.support]
        model = "chat"
        ttft = "300ms"
        tpot = 0.05
        attain = 0.95
        priority = 10
        [applications.alices]
        model = "chat"
        ttft = 1
        key = "alice"
        [applications.code]
        tpot = "100ms"
        priority = -5
    """
    assert configured(tmp_path, text).applications == ALL.listed


def test_options_of_models_are_read_beside_plain_ones(tmp_path: Path) -> None:
    text = """
        idle-after = "1h"
        [models]
        chat = "PATH"
        [models.code]
        path = "PATH"
        kv-floor = "64MiB"
        kv_ceiling = "1GiB"
        idle = 30
        pin = true
        preload = false
        max_model_len = 4096
        [models.kept]
        path = "PATH"
        idle = "never"
    """
    chat, code, kept = configured(tmp_path, text).models
    assert (chat.name, chat.options) == ("chat", ModelOptions(idle_s=3600.0))
    assert (code.name, code.path, code.options) == (
        "code", chat.path,
        ModelOptions(
            kv_floor_bytes=64 << 20, kv_ceiling_bytes=1 << 30, idle_s=30.0, pinned=True, preload=False,
            max_model_len=4096,
        ),
    )  # fmt: skip
    assert (kept.name, kept.options) == ("kept", ModelOptions())


def test_models_of_the_command_line_have_the_servers_defaults(tmp_path: Path) -> None:
    config = configured(tmp_path, 'preload = false\nidle_after = "never"\n[models.x]\npath = 3', "mine")
    assert [(one.name, one.options) for one in config.models] == [("mine", ModelOptions(preload=False))]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("applications = 3", "takes tables"),
        ("[applications]\nsupport = 3", "takes tables"),
        ('[applications.support]\nmodle = "chat"', r"\[applications.support\].*'modle'.*did you mean \"model\""),
        ('[applications.support]\nmodel = "chta"', 'no model "chta" is served; did you mean "chat"'),
        ("[applications.support]\nttft = 1", 'no model "support" is served; give model = one of: chat, code'),
        ("[applications.support]\nmodel = 3", "model: 3 is not the name of a model"),
        ('[applications.support]\nmodel = "chat"\nttft = 0', "ttft: 0 is no promise"),
        ('[applications.support]\nmodel = "chat"\ntpot = "fast"', "tpot: 'fast' is not a duration such as"),
        ('[applications.support]\nmodel = "chat"\nttft = 1\nattain = 1.5', "attain: 1.5 is not a share"),
        ('[applications.support]\nmodel = "chat"\nttft = 1\nattain = 0', "attain: 0 is not a share"),
        ('[applications.support]\nmodel = "chat"\nttft = 1\nattain = true', "attain: True is not a share"),
        ('[applications.support]\nmodel = "chat"\nttft = 1\nattain = nan', "attain: nan is not a share"),
        ('[applications.support]\nmodel = "chat"\nattain = 0.9', "promise ttft, tpot or both"),
        ('[applications.support]\nmodel = "chat"\npriority = 101', "priority: 101 is not a whole number from -100"),
        ('[applications.support]\nmodel = "chat"\npriority = 0.5', "priority: 0.5 is not a whole number"),
        ('[applications.support]\nmodel = "chat"\nkey = "a b"', "never the key itself"),
        ('[applications."a b"]\nmodel = "chat"', "cannot name an application"),
        ('[applications.a.b]\nmodel = "chat"', r'needs quotes: \[applications."a.b"\]'),
        ('[applications.code]\nmodel = "chat"', "a model has that name"),
        ('[applications.code]\nkey = "alice"', "promised to every key"),
        (
            '[applications.x]\nmodel = "chat"\nkey = "alice"\n[applications.y]\nmodel = "chat"\nkey = "alice"',
            r'\[applications.y\]: the key "alice" is bound to the application "x"',
        ),
        ("[models.a]\nkv_floor = 1", r"\[models.a\].*path must say which model"),
        ('[models.Qwen3-0.6B]\npath = "PATH"', r'needs quotes: \[models."Qwen3-0.6B"\]'),
        ('[models.a]\npath = "PATH"\nkv_flor = 1', 'did you mean "kv_floor"'),
        ('[models.a]\npath = "PATH"\nkv_floor = "lots"', "kv_floor: 'lots' is not a size such as"),
        ('[models.a]\npath = "PATH"\nkv_floor = "2MiB"\nkv_ceiling = "1MiB"', "kv_floor 2 MiB is more than kv_ceiling"),
        ('[models.a]\npath = "PATH"\nidle = 0', "idle: 0 is not a duration"),
        ('[models.a]\npath = "PATH"\npin = "perhaps"', "pin: 'perhaps' is not true or false"),
        ('[models.a]\npath = "PATH"\nmax_model_len = 0', "max_model_len: 0 is not a number of tokens"),
        ('[models.a]\npath = "/nowhere"', "neither a folder"),
    ],
)
def test_tables_that_cannot_be_used_are_refused_with_what_would_be_right(
    text: str, expected: str, tmp_path: Path
) -> None:
    with pytest.raises(BadConfig, match=expected):
        configured(tmp_path, text)


def test_tables_are_no_settings_of_the_command_line(tmp_path: Path) -> None:
    with pytest.raises(BadConfig, match=r"tables \[applications.NAME\]"):
        serve_config(sets=["applications=3"])


# Judging


def course(
    outcome: Outcome = Outcome.OK, ttft_s: float | None = 0.2, tpot_s: float | None = 0.04, late: int = 0
) -> Course:
    return Course(outcome=outcome, open_s=0.25, ttft_s=ttft_s, tpot_s=tpot_s, tokens=10, late_tokens=late)


def verdict(promise: Promise, one: Course) -> str:
    """A letter for each kind: its first where it is attained, small where it is missed; o is OVERALL, k every token."""
    letters = {Kind.TTFT: "F", Kind.TPOT: "P", Kind.OVERALL: "O", Kind.TOKENS: "K"}
    found = judge(promise, one)
    return "".join(letter if found[kind] else letter.lower() for kind, letter in letters.items() if kind in found)


@pytest.mark.parametrize(
    ("promise", "one", "expected"),
    [
        (FAST, course(), "FPOK"),
        (FAST, course(ttft_s=0.3, tpot_s=0.05), "FPOK"),
        (FAST, course(late=1), "FPOk"),
        (FAST, course(ttft_s=0.31, late=1), "fPok"),
        (FAST, course(tpot_s=0.06, late=3), "Fpok"),
        (FAST, course(tpot_s=None), "FPOK"),
        (Promise(0.3), course(tpot_s=9.0), "FO"),
        (Promise(None, 0.05), course(ttft_s=9.0), "PO"),
        (Promise(None, 0.03), course(), "po"),
        (Promise(), course(), ""),
        # What the server failed attains nothing, however far it came; what a client did wrong is nobody's promise.
        (FAST, course(Outcome.FAILED), "fpok"),
        (Promise(0.3), course(Outcome.FAILED), "fo"),
        (FAST, course(Outcome.REFUSED), ""),
        # Who leaves is judged by what it got.
        (FAST, course(Outcome.LEFT), "FPOK"),
        (FAST, course(Outcome.LEFT, tpot_s=None), "FK"),
        (FAST, course(Outcome.LEFT, tpot_s=0.06, late=1), "Fpok"),
        (FAST, course(Outcome.LEFT, ttft_s=None, tpot_s=None), ""),
        (Promise(0.2, 0.05), course(Outcome.LEFT, ttft_s=None, tpot_s=None), "fok"),
    ],
)
def test_a_request_is_judged_by_what_was_promised(promise: Promise, one: Course, expected: str) -> None:
    assert verdict(promise, one) == expected


times = st.none() | st.floats(0.01, 1.0)


@given(st.builds(Promise, times, times), st.sampled_from(Outcome), times, times, st.integers(0, 5))
def test_overall_is_attained_where_every_part_is(
    promise: Promise, outcome: Outcome, ttft_s: float | None, tpot_s: float | None, late: int
) -> None:
    found = judge(promise, course(outcome, ttft_s, tpot_s if ttft_s is not None else None, late))
    parts = [found[kind] for kind in (Kind.TTFT, Kind.TPOT) if kind in found]
    assert set(found) <= set(kinds_of(promise))
    if Kind.OVERALL in found:
        assert found[Kind.OVERALL] == all(parts)
    if outcome is Outcome.OK and ttft_s is not None:
        assert set(found) == set(kinds_of(promise))
    if outcome is Outcome.FAILED:
        assert set(found) == set(kinds_of(promise))
        assert not any(found.values())


# Counting


def test_counts_are_kept_by_kind_and_hold_what_was_promised() -> None:
    registry = CollectorRegistry()
    counts = Counts(Families(registry, (0.1, 1.0), (0.01, 0.1)), SUPPORT)
    request = Request(id="r", model="chat", prompt=(1,), max_tokens=10)
    counts.ended(request, course())
    counts.ended(request, course(tpot_s=0.06, late=4))
    counts.ended(request, course(Outcome.LEFT, ttft_s=None, tpot_s=None))
    counts.turned_away([request, request], Refused("full", status=429, kind="server_error"))
    counts.turned_away([request], Refused("too fast", status=429, kind="rate_limit_error"))
    embedding = Request(id="e", model="chat", prompt=(1,), max_tokens=0)
    counts.ended(embedding, Course(outcome=Outcome.OK, open_s=9.0))

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"janus_application_{name}", {"application": "support", **labels})

    outcomes = {one.value: value("requests_total", model="chat", outcome=one.value) for one in Outcome}
    assert outcomes == {"ok": 3, "failed": 2, "refused": 1, "left": 1}
    assert [value("promised_total", kind=kind.value) for kind in Kind] == [4, 4, 4, 4]
    assert [value("attained_total", kind=kind.value) for kind in Kind] == [2, 1, 1, 1]
    assert [value(f"{name}_total") for name in ("tokens", "goodput_tokens", "late_tokens")] == [30, 10, 4]
    assert (value("ttft_seconds_count"), value("tpot_seconds_count")) == (2, 2)
    assert [value("promise_seconds", kind=kind) for kind in ("ttft", "tpot")] == [0.3, 0.05]
    assert (value("target_share"), value("priority")) == (0.95, 10)


def test_whoever_listens_hears_of_every_request_and_whether_it_kept_everything() -> None:
    told: list[tuple[str, int, float, bool | None]] = []
    counts = Counts(
        Families(CollectorRegistry(), (1.0,), (1.0,)), SUPPORT,
        lambda request, how, on_time: told.append((request.id, how.tokens, how.open_s, on_time)),
    )  # fmt: skip
    request = Request(id="r", model="chat", prompt=(1,), max_tokens=10)
    counts.ended(request, course())
    counts.ended(request, course(tpot_s=0.06))
    counts.ended(Request(id="e", model="chat", prompt=(1,), max_tokens=0), Course(outcome=Outcome.OK, open_s=9.0))
    counts.turned_away([request], Refused("full", status=429, kind="server_error"))
    counts.turned_away([request], Refused("too fast", status=429, kind="rate_limit_error"))
    assert [on_time for *_, on_time in told] == [True, False, None, False, None]
    assert [open_s == 0.0 for _, _, open_s, _ in told] == [False, False, False, True, True]
    assert [name for name, *_ in told] == ["r", "r", "e", "r", "r"]


def test_what_promises_nothing_has_no_series_of_promises() -> None:
    registry = CollectorRegistry()
    Counts(Families(registry, (1.0,), (1.0,)), Application("chat", "chat"))
    names = {sample.name for family in registry.collect() for sample in family.samples}
    assert "janus_application_requests_total" in names
    assert not any("promise" in name or "attained" in name or "goodput" in name or "late" in name for name in names)
