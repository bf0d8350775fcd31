"""`janus doctor`: what this machine can run, which path each kernel takes and why, and what to do when it cannot serve.

Called by `cli`. It looks and reports; it changes nothing, except that asking for the native kernels may compile
them into the cache, as a start of the server would. It imports no accelerator library.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from janus_server import machine, units
from janus_server.config import KernelChoice, default_cache_dir, default_memory_bytes
from janus_server.errors import BadConfig, BadModel, Bug
from janus_server.packaged import DEFAULT_ALIAS, find, install_command, packaged
from janus_server.suggest import nearest


class Row(msgspec.Struct, frozen=True):
    """One line of the report. remedy is what to do about it; with `blocks`, Janus cannot serve until that is done."""

    section: str
    name: str
    value: str
    remedy: str = ""
    blocks: bool = False


# Distributions a server imports; the rest of the list explains an installation but may be absent.
_NEEDED: Final = ("numpy", "msgspec", "aiohttp", "uvloop", "tokenizers", "jinja2", "prometheus-client")
_OPTIONAL: Final = ("torch", "gpytorch", "ortools", "triton", "flashinfer-python", "cuda-bindings", "huggingface-hub")
# Two mappings for each isolated page is the most that scattered pages can cost.
_MAPPINGS_PER_PAGE: Final = 2


def run(*, as_json: bool, kernels: str) -> int:
    """Print the report; 0 when Janus can serve here, else 1."""
    rows = report(kernels)
    text = _json(rows) if as_json else _table(rows)
    print(text)
    return 1 if any(row.blocks for row in rows) else 0


def report(kernels: str = "auto") -> list[Row]:
    """Every line, in reading order."""
    choices = [choice.value for choice in KernelChoice]
    if kernels not in choices:
        raise BadConfig(f"--kernels {kernels!r} is not one of {', '.join(choices)}{nearest(kernels, choices)}")
    return [*_device(), *_memory(), *_software(), *_kernels(kernels), *_model()]


def _device() -> list[Row]:
    cpu, gpu = machine.cpu(), machine.gpu()
    found = f"{len(gpu.devices)} NVIDIA ({gpu.driver or 'no driver loaded'})" if gpu.devices else "none"
    remedy = "install the NVIDIA driver" if gpu.devices and gpu.driver is None else ""
    return [
        Row("device", "processor", cpu.model),
        Row("device", "instruction sets", " ".join(cpu.flags) or "none that matter here"),
        Row("device", "cores", f"{machine.cores()} physical, allowed to this process"),
        Row("device", "gpu", found, remedy),
    ]


def _memory() -> list[Row]:
    total, available, maps = machine.memory_bytes(), machine.available_bytes(), machine.max_map_count()
    free = "" if available is None else f", {units.format_bytes(available)} available"
    rows = [
        Row("memory", "total", f"{units.format_bytes(total)}{free}"),
        Row("memory", "default budget", f"{units.format_bytes(default_memory_bytes())} (--memory changes it)"),
        Row("memory", "pages", pages_of(machine.gpu(), _version("cuda-bindings"))),
        Row("memory", "huge pages", ", ".join(f"{k}: {v}" for k, v in machine.huge_pages().items()) or "not known"),
    ]
    if maps is not None:
        room_bytes = maps // _MAPPINGS_PER_PAGE * (2 << 20)
        short = room_bytes < default_memory_bytes()
        remedy = "raise it: sysctl -w vm.max_map_count=262144" if short else ""
        value = f"{maps} mappings, enough for {units.format_bytes(room_bytes)} of 2 MiB pages"
        rows.append(Row("memory", "vm.max_map_count", value, remedy))
    return rows


def pages_of(gpu: machine.Gpu, bindings: str | None) -> str:
    """Where a server's pages would be, and why not on a GPU: the first thing that is missing for that."""
    if not gpu.devices:
        reason = "no NVIDIA GPU"
    elif gpu.driver is None:
        reason = "an NVIDIA GPU, but no driver is loaded"
    elif bindings is None:
        reason = "an NVIDIA GPU, but cuda-bindings is not installed"
    else:
        reason = (
            f"the kernels compute there; pages on the GPU are possible (cuda-bindings {bindings}), not yet served from"
        )
    return f"host memory (memfd): {reason}"


def _software() -> list[Row]:
    python = platform.python_version()
    old = sys.version_info < (3, 11)
    rows = [
        Row("software", "system", f"{platform.system()} {platform.release()} {platform.machine()}"),
        Row("software", "python", python, "use Python 3.11 or newer" if old else "", blocks=old),
        Row("software", "compiler", *_compiler()),
    ]
    for name in (*_NEEDED, *_OPTIONAL):
        version = _version(name)
        missing = version is None and name in _NEEDED
        remedy = f"{sys.executable} -m pip install {name}" if missing else ""
        rows.append(Row("software", name, version or "not installed", remedy, blocks=missing))
    return rows


def _compiler() -> tuple[str, str]:
    """The first line of the C++ compiler's version, and what to do when there is none."""
    path = next((found for name in ("g++", "c++", "clang++") if (found := shutil.which(name))), None)
    if path is None:
        return "none", "install g++ for the native kernels (without them the slower torch path is used)"
    try:
        shown = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=10, check=False).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{path} does not run ({type(error).__name__})", "reinstall g++"
    return shown.partition("\n")[0] or path, ""


def _kernels(kind: str) -> list[Row]:
    try:
        from janus_server.kernels.choose import choose

        table, reasons = choose(kind, machine.cores(), default_cache_dir())
    except (ImportError, OSError, BadConfig, BadModel, Bug) as error:
        remedy = "install g++ or torch, then run: janus doctor"
        return [Row("kernels", "table", f"none: {_one_line(error)}", remedy, blocks=True)]
    return [Row("kernels", "table", table.name), *(_reason_row(reason) for reason in reasons)]


def _reason_row(reason: Any) -> Row:
    return Row("kernels", str(reason.what), f"{reason.chosen}: {reason.why}")


def _model() -> list[Row]:
    model = packaged(DEFAULT_ALIAS)
    if model is None:
        return []
    path = find(model)
    if path is None:
        # Not blocking: any other model can be served without it.
        return [Row("model", model.alias, "not installed", install_command(model))]
    return [Row("model", model.alias, f"{model.about}, {units.format_bytes(path.stat().st_size)} at {path}")]


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


def _json(rows: Sequence[Row]) -> str:
    sections: dict[str, dict[str, str]] = {}
    for row in rows:
        sections.setdefault(row.section, {})[row.name] = row.value
    remedies = [{"name": row.name, "do": row.remedy, "blocks": row.blocks} for row in rows if row.remedy]
    can_serve = not any(row.blocks for row in rows)
    return json.dumps({"can_serve": can_serve, "remedies": remedies, **sections}, indent=2, ensure_ascii=False)


def _table(rows: Sequence[Row]) -> str:
    width = max(len(row.name) for row in rows)
    lines: list[str] = []
    section = ""
    for row in rows:
        if row.section != section:
            section = row.section
            lines += [*([""] if lines else []), section]
        mark = "✗" if row.blocks else "!" if row.remedy else " "
        lines.append(f" {mark} {row.name:<{width}}  {row.value}")
        if row.remedy:
            lines.append(f"   {'':<{width}}  → {row.remedy}")
    blocked = [row.name for row in rows if row.blocks]
    lines += ["", f"Janus cannot serve here yet: {', '.join(blocked)}." if blocked else "Janus can serve here."]
    return "\n".join(lines)
