"""API keys: how files are read and refused, and that nothing of a key is kept or shown."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from janus_server import keys
from janus_server.admission import KeyLimits
from janus_server.errors import BadConfig
from janus_server.keys import Key, KeyRing

SECRET = "hunter2-hunter2"


def written(path: Path, text: str | bytes, mode: int = 0o600) -> Path:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    path.chmod(mode)
    return path


def test_one_key_a_line(tmp_path: Path) -> None:
    file = written(tmp_path / "keys", f"# ours\n\n{SECRET}\n  sk-abc/def+123==  # Bob's\nwith#inside-it\n")
    found = keys.read_file(file)
    assert [key.name for key in found] == ["line-3", "line-4", "line-5"]
    assert [key.digest for key in found] == [
        hashlib.sha256(one).digest() for one in (SECRET.encode(), b"sk-abc/def+123==", b"with#inside-it")
    ]
    assert all(key.limits == KeyLimits() and not key.admin for key in found)


def test_a_table_with_names_and_limits(tmp_path: Path) -> None:
    digest = hashlib.sha256(b"operator-key").hexdigest()
    file = written(
        tmp_path / "keys.toml",
        f"""
        [keys.alice]
        key = "{SECRET}"
        requests = 8
        requests_per_minute = 60
        tokens_per_minute = 100_000
        tokens_per_request = 8_000
        models = ["chat"]
        [keys.operator]
        sha256 = "{digest.upper()}"
        admin = true
    """,
    )
    alice, operator = keys.read_file(file)
    assert alice.limits == KeyLimits(
        requests=8, requests_per_minute=60, tokens_per_minute=100_000, tokens_per_request=8_000,
        models=frozenset({"chat"}),
    )  # fmt: skip
    ring = KeyRing([alice, operator])
    assert ring.find(SECRET) is alice and ring.find("operator-key") is operator
    assert ring.has_admin and not alice.admin and operator.limits == KeyLimits()
    assert ring.find("") is None and ring.find(digest) is None and ring.find(SECRET + "\0") is None


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644, 0o620, 0o601])
def test_a_file_that_others_may_use_is_refused_with_the_remedy(tmp_path: Path, mode: int) -> None:
    file = written(tmp_path / "keys", SECRET, mode)
    with pytest.raises(BadConfig, match=f"chmod 600 {file}"):
        keys.read_file(file)


def test_what_is_no_file_is_refused_and_blocks_nothing(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    (tmp_path / "folder").mkdir(mode=0o700)
    for name in ("pipe", "folder", "absent"):
        with pytest.raises(BadConfig, match="key file"):
            keys.read_file(tmp_path / name)


LINES = [
    ("", "holds no key"), ("# nothing\n", "holds no key"), ("short\n", "line 1 must be 8"),
    (f"two {SECRET}", "line 1 must be 8"), (f'[keys.a]\nkey = "{SECRET}"', r"\.toml"), (f'key="{SECRET}"', r"\.toml"),
    (b"\xff" * 10, "UTF-8"), ("é" * 10, "printable"),
]  # fmt: skip
TABLES = [
    ("x = 1", r"\[keys\.NAME\]"), ("keys = 3", r"\[keys\.NAME\]"), ("[keys]\na = 3", "must be a table"),
    ("[keys.a]\nrequests = 3", "either key or sha256"),
    (f'[keys.a]\nkey = "{SECRET}"\nsha256 = "{"0" * 64}"', "either key or sha256"),
    ('[keys.a]\nkey = "short"', "8 to 512"), ('[keys.a]\nkey = 123456789', "8 to 512"),
    ('[keys.a]\nsha256 = "12"', "64 hex"), (f'[keys.a]\nkey = "{SECRET}"\nrequest = 3', 'did you mean "requests"'),
    (f'[keys.a]\nkey = "{SECRET}"\nrequests = 0', "whole number"),
    (f'[keys.a]\nkey = "{SECRET}"\nrequests = true', "whole number"),
    (f'[keys.a]\nkey = "{SECRET}"\nmodels = "chat"', "list of names"),
    (f'[keys.a]\nkey = "{SECRET}"\nadmin = 1', "true or false"),
    (f'[keys."a b"]\nkey = "{SECRET}"', "letters"), (f'[keys.JANUS_API_KEY]\nkey = "{SECRET}"', "letters"),
    (f'[keys.a]\nkey = "{SECRET}', "not TOML"), ("[keys]", "holds no key"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "content", "expected"), [("keys", *one) for one in LINES] + [
    ("keys.toml", *one) for one in TABLES
])  # fmt: skip
def test_files_that_cannot_be_used_are_refused_without_showing_a_key(
    tmp_path: Path, name: str, content: str | bytes, expected: str
) -> None:
    with pytest.raises(BadConfig, match=expected) as caught:
        keys.read_file(written(tmp_path / name, content))
    assert SECRET not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_one_key_has_one_name(tmp_path: Path) -> None:
    file = written(tmp_path / "keys", SECRET)
    with pytest.raises(BadConfig, match="JANUS_API_KEY and line-1 are the same key"):
        keys.load([keys.from_environment(keys.USER_VARIABLE, SECRET)], file)
    both = keys.load([keys.from_environment(keys.ADMIN_VARIABLE, "another-key")], file)
    assert len(both) == 2 and both.has_admin
    assert set(both.limits()) == {"JANUS_ADMIN_KEY", "line-1"}


def test_a_key_shows_its_name_only() -> None:
    key = Key("alice", hashlib.sha256(SECRET.encode()).digest())
    assert repr(key) == f"{key}" == "Key('alice')"
    assert repr([key]) == "[Key('alice')]"
