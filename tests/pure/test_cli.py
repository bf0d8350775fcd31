"""The `janus` command as a user meets it: exit codes, one-line refusals, help, what doctor reports."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from janus_server import packaged
from janus_server.cli import main
from janus_server.errors import BadConfig
from janus_server.terminal import doctor

HEAVY = ("torch", "transformers", "gpytorch", "ortools", "rich", "aiohttp", "huggingface_hub", "difflib", "tomllib")


def test_resolving_a_serve_command_imports_nothing_heavy(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    program = (
        "import sys; from janus_server import cli; from janus_server.config import serve_config; cli._parser();"
        f"serve_config(['m={tmp_path}'], sets=['port=0']); print([m for m in {HEAVY!r} if m in sys.modules])"
    )
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=root, check=True)
    assert done.stdout.strip() == "[]"


def test_without_a_command_the_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    shown = capsys.readouterr().out
    assert all(word in shown for word in ("janus serve", "janus chat", "janus doctor", "bench"))


@pytest.mark.parametrize("command", ["serve", "chat", "models", "memory", "drain", "doctor", "bench", "version"])
def test_each_command_has_help_with_exit_code_zero(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main([command, "--help"])
    assert left.value.code == 0
    assert f"janus {command}" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["--version"], ["version"]])
def test_the_version_is_printed(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 0
    assert capsys.readouterr().out.startswith("janus ")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["serve", "--prot", "9"], 'did you mean "--port"'),
        (["serve", "--max-model", "9"], "there is no such flag"),
        (["chat", "--temprature", "1"], 'did you mean "--temperature"'),
        (["--verison"], 'did you mean "--version"'),
        (["srve"], "invalid choice"),
        (["chat", "--temperature", "hot"], "invalid float"),
    ],
)
def test_unknown_arguments_are_one_line_and_exit_code_two(
    arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        main(arguments)
    shown = capsys.readouterr().err
    assert left.value.code == 2
    assert expected in shown
    assert shown.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["serve", "--port", "99999", "x"], "--port: '99999'"),
        (["serve", "--set", "prot=1", "x"], 'did you mean "port"'),
        (["serve", "/absent"], "neither a folder"),
        (["serve", "--api-key", "hunter2-hunter2"], "--api-key-file"),
        (["serve", "--api-key=hunter2-hunter2", "x"], "JANUS_API_KEY"),
        (["serve", "--set", "api_key=hunter2-hunter2"], "api_key_file"),
        (["serve", "--config", "/absent.toml"], "cannot read"),
        (["bench", "engin"], 'did you mean "engine"'),
        (["models", "load"], "which model?"),
        (["models", "load", "a", "--timeout", "soon"], "--timeout: 'soon'"),
        (["doctor", "--kernels", "gpu"], "auto, cpu, torch_ref"),
    ],
)
def test_wrong_settings_are_one_line_and_exit_code_two(
    arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    shown = capsys.readouterr().err
    assert expected in shown
    assert shown.startswith("janus: ")
    assert shown.count("\n") == 1
    assert "hunter2" not in shown


def test_the_module_runs_as_a_command_and_shows_no_traceback() -> None:
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-m", "janus_server", "serve", "--memory", "lots"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=root, check=False)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "--memory: 'lots'" in done.stderr


def test_doctor_names_what_blocks_and_its_remedy() -> None:
    rows = [doctor.Row("device", "cores", "2"), doctor.Row("kernels", "table", "none", "install g++", blocks=True)]
    shown = doctor._table(rows)
    assert "✗ table" in shown
    assert "→ install g++" in shown
    assert "cannot serve here yet: table" in shown
    assert json.loads(doctor._json(rows)) == {
        "can_serve": False,
        "remedies": [{"name": "table", "do": "install g++", "blocks": True}],
        "device": {"cores": "2"},
        "kernels": {"table": "none"},
    }


def test_doctor_reports_this_machine() -> None:
    rows = {row.name: row for row in [*doctor._device(), *doctor._memory(), *doctor._software(), *doctor._model()]}
    assert rows["cores"].value[0].isdigit()
    assert rows["numpy"].value == doctor._version("numpy")
    assert not rows["python"].blocks
    assert "→" in doctor._table([rows[packaged.DEFAULT_ALIAS]]) or "gguf" in rows[packaged.DEFAULT_ALIAS].value
    with pytest.raises(BadConfig, match='did you mean "cpu"'):
        doctor.report("cpus")
