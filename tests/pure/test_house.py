"""The house rules that a machine can hold, read from the syntax trees of every file.

A file or a function that must break a size rule, or a module that must keep state, says so where it does:
`# house: exempt — reason`. Each rule is tried on a small offender too, so that none can fall silent.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SERVER = sorted((ROOT / "janus_server").rglob("*.py"))
BENCH = sorted((ROOT / "bench").rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))

FILE_LINES, FUNCTION_LINES = 400, 60
# A test file is a list that nobody reads from top to bottom.
TEST_FILE_LINES = 600
BROAD_EXCEPTS = 5
EXEMPT = re.compile(r"# house: exempt — \S+|# noqa: RUF012 +\S+")
# A comment of more than the mark that silences the linter.
REASON = re.compile(r"#\s*(?:noqa: BLE001)?[\s(,-]*(?!noqa)\w+\W+\w+")

# Code that decides or counts: given a state, an event and `now`, it returns actions. Paths below janus_server/.
PURE = (
    "types.py", "errors.py", "duty.py", "units.py", "suggest.py", "admission.py", "tokens/detokenize.py",
    "api/*.py", "sched/*.py",
    "kv/pages.py", "kv/blocks.py", "kv/prefix.py", "model/spec.py", "model/rope.py", "model/weights.py",
    "applications.py", "calibrate.py", "moe/aebs.py", "moe/placement.py", "moe/activation.py",
    "coordinator/records.py", "coordinator/lease.py",
    "cluster/tickets.py", "cluster/tally.py", "cluster/windows.py", "cluster/files.py", "cluster/outsider.py",
    "cluster/prefixes.py",
    "cluster/prices.py",
    "cluster/said.py", "cluster/sight.py", "cluster/decisions.py", "cluster/past.py", "terminal/course.py",
    "wire/trouble.py", "wire/frames.py", "wire/pieces.py", "wire/items.py", "wire/handshake.py", "wire/doorman.py",
    "wire/pulse.py", "wire/credits.py", "wire/post.py",
)  # fmt: skip
IMPURE_MODULES = frozenset(
    {"asyncio", "time", "random", "secrets", "torch", "logging", "socket", "subprocess", "threading", "os", "uvloop"}
)
IMPURE_CALLS = frozenset({"open", "print", "input"})
HEAVY_MODULES = frozenset({"torch", "transformers", "gpytorch", "ortools"})
UNSAFE_MODULES = frozenset({"pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"})
UNSAFE_CALLS = frozenset({"eval", "exec", "compile", "__import__", "breakpoint"})
# What may speak to a terminal, and what may read the environment.
SPEAKS = frozenset(
    {
        "cli.py",
        "serve.py",
        "terminal/chat.py",
        "terminal/dashboard.py",
        "terminal/doctor.py",
        "terminal/drain.py",
        "terminal/lines.py",
        "terminal/memory.py",
        "terminal/models.py",
        "terminal/progress.py",
        "terminal/replay.py",
        "terminal/status.py",
        "kernels/build.py",
    }
)
READS_ENVIRONMENT = frozenset({"config.py", "cli.py", "kernels/build.py"})
# What bench/ may import of ours: it meets a live server only over HTTP.
BENCH_MAY_IMPORT = (
    "types", "errors", "units", "suggest", "machine", "orders", "sched", "kv.pages", "kv.blocks", "kv.prefix",
)  # fmt: skip

MUTABLE_MAKERS = frozenset(
    {
        "list",
        "dict",
        "set",
        "bytearray",
        "defaultdict",
        "deque",
        "OrderedDict",
        "Counter",
        "ContextVar",
        "local",
        "count",
    }
)
MUTATORS = frozenset({"append", "add", "update", "pop", "clear", "extend", "insert", "remove", "setdefault", "discard"})

Rule = Callable[[ast.Module, str], Iterator[str]]


def no_asserts(tree: ast.Module, _: str) -> Iterator[str]:
    """`python -O` strips them; errors.require stays."""
    yield from (f"line {n.lineno}: assert" for n in ast.walk(tree) if isinstance(n, ast.Assert))


def nothing_that_runs_what_it_reads(tree: ast.Module, _: str) -> Iterator[str]:
    for name, line in imports(tree):
        if name.split(".")[0] in UNSAFE_MODULES:
            yield f"line {line}: import {name}"
    for call in calls(tree):
        if isinstance(call.func, ast.Name) and call.func.id in UNSAFE_CALLS:
            yield f"line {call.lineno}: {call.func.id}()"
        if ast.unparse(call.func) == "torch.load":
            yield f"line {call.lineno}: torch.load()"


def broad_excepts_say_why(tree: ast.Module, source: str) -> Iterator[str]:
    """On its line or the one above."""
    lines = source.splitlines()
    for node in broad_handlers(tree):
        if not any(REASON.search(line) for line in lines[max(0, node.lineno - 2) : node.lineno]):
            yield f"line {node.lineno}: a broad except without its reason"


def no_mutable_module_state(tree: ast.Module, source: str) -> Iterator[str]:
    """No module-level list, dict or set, unless it is Final and nothing in the module writes to it."""
    written = {name for node in ast.walk(tree) for name in written_names(node)}
    for node in tree.body:
        if not isinstance(node, ast.Assign | ast.AnnAssign) or not is_mutable(node.value):
            continue
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        names = {t.id for t in targets if isinstance(t, ast.Name)}
        final = isinstance(node, ast.AnnAssign) and "Final" in ast.unparse(node.annotation)
        if names - {"__all__"} and (not final or names & written) and not exempt(source, node.lineno):
            yield f"line {node.lineno}: {', '.join(sorted(names))} is mutable (a tuple, frozenset or Final will do)"
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            yield f"line {node.lineno}: global {', '.join(node.names)}"
        if isinstance(node, ast.FunctionDef) and any("cache" in ast.unparse(d) for d in node.decorator_list):
            if not exempt(source, node.lineno, *(d.lineno for d in node.decorator_list)):
                yield f"line {node.lineno}: {node.name} keeps a cache for the whole process"


def no_mutable_class_attributes(tree: ast.Module, source: str) -> Iterator[str]:
    """Shared by all instances; msgspec and dataclass fields copy theirs, so annotated ones are left to them."""
    for owner in (n for n in ast.walk(tree) if isinstance(n, ast.ClassDef)):
        for node in owner.body:
            if isinstance(node, ast.Assign) and is_mutable(node.value) and not exempt(source, node.lineno):
                yield f"line {node.lineno}: {owner.name} shares a mutable attribute"


def no_stray_prints(tree: ast.Module, _: str) -> Iterator[str]:
    yield from (
        f"line {c.lineno}: print()" for c in calls(tree) if isinstance(c.func, ast.Name) and c.func.id == "print"
    )


def no_environment(tree: ast.Module, _: str) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv", "environb"):
            if isinstance(node.value, ast.Name) and node.value.id == "os":
                yield f"line {node.lineno}: os.{node.attr}"
        if isinstance(node, ast.ImportFrom) and node.module == "os":
            yield from (f"line {node.lineno}: os.{a.name}" for a in node.names if a.name in ("environ", "getenv"))


def pure_rooms_touch_nothing(tree: ast.Module, _: str) -> Iterator[str]:
    for name, line in imports(tree):
        if name.split(".")[0] in IMPURE_MODULES:
            yield f"line {line}: import {name}"
    for node in ast.walk(tree):
        if isinstance(node, ast.AsyncFunctionDef | ast.Await | ast.AsyncFor | ast.AsyncWith):
            yield f"line {node.lineno}: it awaits"
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in IMPURE_CALLS:
            yield f"line {node.lineno}: {node.func.id}()"


def no_heavy_imports(tree: ast.Module, _: str) -> Iterator[str]:
    yield from (f"line {line}: import {name}" for name, line in imports(tree) if name.split(".")[0] in HEAVY_MODULES)


def bench_meets_the_server_over_http(tree: ast.Module, source: str) -> Iterator[str]:
    for name, line in imports(tree):
        if name.split(".")[0] == "janus_server" and not exempt(source, line):
            room = name.removeprefix("janus_server").removeprefix(".")
            if not any(room == allowed or room.startswith(f"{allowed}.") for allowed in BENCH_MAY_IMPORT):
                yield f"line {line}: import {name}"


# Offenders: for each rule, sources it must catch and sources it must leave alone.
RULES: list[tuple[Rule, list[str], list[str]]] = [
    (no_asserts, ["assert x"], ["require(x, 'y')"]),
    (
        nothing_that_runs_what_it_reads,
        ["import pickle", "from marshal import loads", "eval('1')", "def f():\n exec('')", "torch.load('x')"],
        ["import json", "re.compile('x')", "model.eval()"],
    ),
    (
        broad_excepts_say_why,
        [
            "try:\n f()\nexcept Exception:\n pass",
            "try:\n f()\nexcept:\n pass",
            "try:\n f()\nexcept (ValueError, BaseException):  # noqa: BLE001\n pass",
        ],
        [
            "try:\n f()\nexcept ValueError:\n pass",
            "try:\n f()\nexcept Exception:  # noqa: BLE001 - a boundary\n pass",
            "try:\n f()\n# One of the boundaries.\nexcept Exception:  # noqa: BLE001\n pass",
            "try:\n f()\nexcept BaseException:\n undo()\n raise",
        ],
    ),
    (
        no_mutable_module_state,
        [
            "X = []",
            "x: dict[str, int] = {}",
            "X: Final = {}\ndef f():\n X['a'] = 1",
            "X: Final = []\ndef f():\n X.append(1)",
            "x = collections.deque()",
            "def f():\n global y\n y = 1",
            "@functools.lru_cache\ndef f(): ...",
            "x = [n for n in y]",
        ],
        [
            "X = (1, 2)",
            "X = frozenset({1})",
            "X: Final = {'a': 1}",
            "X = MappingProxyType({1: 2})",
            "def f():\n x = []",
        ],
    ),
    (no_mutable_class_attributes, ["class A:\n x = []"], ["class A:\n x: list[int] = []", "class A:\n x = ()"]),
    (no_stray_prints, ["def f():\n print('here')"], ["log.info('x')"]),
    (no_environment, ["os.environ['A']", "os.getenv('A')", "from os import environ"], ["os.path.join(a, b)"]),
    (
        pure_rooms_touch_nothing,
        ["import time", "from random import random", "async def f(): ...", "open('x')", "import torch.nn"],
        ["import numpy", "import heapq", "from janus_server.types import Batch"],
    ),
    (no_heavy_imports, ["def f():\n import torch", "from transformers import x"], ["import torchless", "import numpy"]),
    (
        bench_meets_the_server_over_http,
        ["from janus_server.node import Node", "import janus_server.api.plan", "from janus_server import cli"],
        ["from janus_server.sched.batcher import Batcher", "import aiohttp", "from janus_server import units"],
    ),
]


@pytest.mark.parametrize(
    ("rule", "source", "caught"),
    [(rule, source, True) for rule, bad, _ in RULES for source in bad]
    + [(rule, source, False) for rule, _, good in RULES for source in good],
)
def test_each_rule_catches_its_offenders_and_nothing_else(rule: Rule, source: str, caught: bool) -> None:
    assert bool(list(rule(ast.parse(source), source))) is caught


SERVER_RULES: tuple[tuple[Rule, frozenset[str]], ...] = (
    (no_asserts, frozenset()),
    (nothing_that_runs_what_it_reads, frozenset()),
    (broad_excepts_say_why, frozenset()),
    (no_mutable_module_state, frozenset()),
    (no_mutable_class_attributes, frozenset()),
    (no_stray_prints, SPEAKS),
    (no_environment, READS_ENVIRONMENT),
    (no_heavy_imports, frozenset({"kernels/torch_ref.py", "sched/oracle_fit.py"})),
)


@pytest.mark.parametrize("path", SERVER, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_server_keeps_the_rules(path: Path) -> None:
    name = str(path.relative_to(ROOT / "janus_server"))
    for rule, excepted in SERVER_RULES:
        if name not in excepted:
            assert broken(rule, path) == []


@pytest.mark.parametrize("path", [*SERVER, *BENCH, *TESTS], ids=lambda path: str(path.relative_to(ROOT)))
def test_files_and_functions_fit_and_open_with_a_docstring(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    if path.name == "__init__.py":
        assert source == ""
        return
    tree, lines = ast.parse(source), source.splitlines()
    assert ast.get_docstring(tree), "the module has no docstring"
    if not any(EXEMPT.search(line) for line in lines[:20]):
        assert len(lines) <= (TEST_FILE_LINES if path in TESTS else FILE_LINES)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not exempt(source, node.lineno):
            size = (node.end_lineno or node.lineno) - node.lineno + 1
            assert size <= FUNCTION_LINES, f"{node.name} has {size} lines"


@pytest.mark.parametrize("pattern", PURE)
def test_pure_rooms_touch_nothing(pattern: str) -> None:
    for path in (ROOT / "janus_server").glob(pattern):
        # A program that runs in a process of its own, beside the room whose numbers it fits.
        if path.name != "oracle_fit.py":
            assert broken(pure_rooms_touch_nothing, path) == []


def test_broad_excepts_are_few() -> None:
    found = [f"{path.name}:{node.lineno}" for path in SERVER for node in broad_handlers(parse(path))]
    assert len(found) <= BROAD_EXCEPTS, found


def test_bench_meets_the_server_over_http() -> None:
    for path in BENCH:
        assert broken(bench_meets_the_server_over_http, path) == []


def test_the_pure_tier_runs_without_heavy_libraries() -> None:
    for path in [*(ROOT / "tests" / "pure").glob("*.py"), ROOT / "tests" / "conftest.py"]:
        assert broken(no_heavy_imports, path) == []


def test_every_package_of_the_tree_is_installed_and_nothing_else() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {path.parent.relative_to(ROOT) for path in SERVER}
    expected = {".".join(folder.parts) for folder in folders} | {"janus_server.cuda"}
    benches = {path.parent.relative_to(ROOT / "bench") for path in BENCH}
    expected |= {".".join(("janus_bench", *folder.parts)) for folder in benches}
    assert set(project["packages"]) == expected
    for package, folder in project["package-dir"].items():
        assert (ROOT / folder).is_dir(), package


def test_no_file_names_a_machine_or_a_place_outside_the_repository() -> None:
    places = re.compile("/(?:work|root|home/[a-z]+|tmp/w)" + "/")
    names = [*SERVER, *BENCH, *TESTS, *(ROOT / "cuda").iterdir(), ROOT / "Makefile", ROOT / ".ci" / "run"]
    for path in (path for path in names if path.is_file()):
        found = [line for line in path.read_text(encoding="utf-8").splitlines() if places.search(line)]
        assert found == [], path


def broken(rule: Rule, path: Path) -> list[str]:
    return [f"{path.relative_to(ROOT)} {fault}" for fault in rule(parse(path), path.read_text(encoding="utf-8"))]


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def exempt(source: str, *lines: int) -> bool:
    """Whether one of these lines, or the one above it, carries an exemption with its reason."""
    text = source.splitlines()
    return any(EXEMPT.search(text[i]) for line in lines for i in (line - 1, line - 2) if 0 <= i < len(text))


def calls(tree: ast.Module) -> Iterator[ast.Call]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.Call))


def imports(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Full names of what is imported, anywhere in the file, but not under `if TYPE_CHECKING`."""
    hidden = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for child in node.body
        for inner in ast.walk(child)
    }
    for node in (node for node in ast.walk(tree) if id(node) not in hidden):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        if isinstance(node, ast.ImportFrom) and node.module:
            # "from a import b" may import the module a.b; naming it so costs nothing where b is not a module.
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


def broad_handlers(tree: ast.Module) -> list[ast.ExceptHandler]:
    """Handlers that catch everything and end there; one that raises again only tidies up or translates."""

    def broad(kind: ast.expr | None) -> bool:
        kinds = kind.elts if isinstance(kind, ast.Tuple) else [kind]
        return any(k is None or (isinstance(k, ast.Name) and k.id in ("Exception", "BaseException")) for k in kinds)

    found = (node for node in ast.walk(tree) if isinstance(node, ast.ExceptHandler) and broad(node.type))
    return [node for node in found if not isinstance(node.body[-1], ast.Raise)]


def is_mutable(value: ast.expr | None) -> bool:
    if isinstance(value, ast.Call):
        return ast.unparse(value.func).split(".")[-1] in MUTABLE_MAKERS
    return isinstance(value, ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp | ast.SetComp)


def written_names(node: ast.AST) -> Iterator[str]:
    """Names whose contents this node changes: x[i] = …, del x[i], x += …, x.append(…)."""
    if (
        isinstance(node, ast.Subscript)
        and isinstance(node.ctx, ast.Store | ast.Del)
        and isinstance(node.value, ast.Name)
    ):
        yield node.value.id
    if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
        yield node.target.id
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MUTATORS:
        if isinstance(node.func.value, ast.Name):
            yield node.func.value.id
