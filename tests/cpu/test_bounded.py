"""Helper processes start wherever the package lies, and say so when they cannot."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from janus_server.bounded import Workers
from janus_server.errors import Bug

REPO = Path(__file__).parents[2]
# As an editable install is found: by a hook of the interpreter, with no path that leads to the package.
BY_A_HOOK = f"""
import importlib.util, sys
spec = importlib.util.spec_from_file_location(
    "janus_server", {str(REPO / "janus_server" / "__init__.py")!r},
    submodule_search_locations=[{str(REPO / "janus_server")!r}],
)
module = sys.modules["janus_server"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
from janus_server.grammar.compile import Grammars
from janus_server.tokens.render import Renderers
from janus_server.types import Grammar, GrammarKind
renderers, grammars = Renderers(), Grammars()
print(renderers.ask("{{{{ 6 * 7 }}}}", {{}}))
print(repr(grammars._check(Grammar(GrammarKind.REGEX, "[a-c]+"), 300).refused))
renderers.close(), grammars.close()
"""


def test_an_installed_package_starts_its_helpers(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-c", BY_A_HOOK], cwd=tmp_path, env={"PATH": ""}, capture_output=True, text=True,
        timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["{'text': '42'}", "''"]


def test_a_program_that_does_not_start_is_a_bug_and_says_why(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    program = tmp_path / "broken.py"
    program.write_text("import a_module_that_is_not_there")
    workers = Workers(program, workers=1, cpu_s=1.0, memory_bytes=1 << 28, answer_bytes=100)
    for _ in range(2):
        with pytest.raises(Bug, match=r"broken\.py did not start"):
            workers.ask({})
    workers.close()
    assert "a_module_that_is_not_there" in capfd.readouterr().err
