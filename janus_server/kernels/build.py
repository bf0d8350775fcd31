"""Builds the native CPU library from `cuda/` on demand and keeps it in a cache directory.

Called by `choose`, and as `python -m janus_server.kernels.build` ahead of time. The cache key is the source, the
flags, the CPU's features and the compiler, so that an upgrade of any of them builds anew. Two processes may build at
once: each compiles to its own file and renames it into place. It never raises for a machine without a compiler: the
answer carries a reason instead.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

SOURCES = (
    "janus_cpu.cpp", "janus_attention.h", "janus_scores.h", "janus_cache.h", "janus_matrix.h", "janus_dot.h",
    "janus_quant.h", "janus_pool.h", "janus_simd.h", "janus_copy.h",
)  # fmt: skip
# Contraction stays off: a fused multiply-add where the compiler likes would break equality between two row counts.
FLAGS = ("-std=c++17", "-O3", "-ffp-contract=off", "-fno-math-errno", "-shared", "-fPIC", "-pthread")
NATIVE = "-march=native"
COMPILERS = ("g++", "c++", "clang++")
LIBRARY = "janus_cpu.so"
COMPILE_LIMIT_S = 120.0


@dataclasses.dataclass(frozen=True, slots=True)
class Built:
    """A library that is there (path set), or why it is not. `how` is a sentence for `janus doctor`."""

    path: Path | None
    how: str


def cache_dir(environ: Mapping[str, str]) -> Path:
    """Where compiled kernels live unless the configuration says otherwise."""
    root = environ.get("XDG_CACHE_HOME", "")
    if not root.startswith("/"):  # the XDG rule: a relative path is invalid and must be ignored
        root = str(Path(environ.get("HOME") or "~").expanduser() / ".cache")
    return Path(root) / "janus" / "kernels"


def ensure(cache: Path, target: str = NATIVE, compilers: tuple[str, ...] = COMPILERS) -> Built:
    """The library for this machine: from the cache, or compiled now (about 4 s)."""
    source = source_dir()
    if source is None:
        return Built(None, "the native kernels' source is not part of this installation")
    folder = cache / _key(source, target)
    compiler = next((found for name in compilers if (found := shutil.which(name))), None)
    if compiler is None:
        ready = sorted(folder.glob(f"*/{LIBRARY}"))
        if ready:
            return Built(ready[0], f"cached in {ready[0].parent}, no compiler to compare with")
        return Built(None, f"no C++ compiler found (tried {', '.join(compilers)})")
    library = folder / _compiler_key(compiler) / LIBRARY
    if library.is_file():
        return Built(library, f"cached in {library.parent}")
    return _compile(compiler, source, target, library)


def source_dir() -> Path | None:
    """The folder with the C++ sources: inside the package once installed, beside it in a checkout."""
    here = Path(__file__).resolve()
    return next((c for c in (here.parents[1] / "cuda", here.parents[2] / "cuda") if (c / SOURCES[0]).is_file()), None)


def _compile(compiler: str, source: Path, target: str, library: Path) -> Built:
    begun = time.monotonic()
    try:
        library.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(suffix=".so", dir=library.parent)
    except OSError as error:
        return Built(None, f"the kernel cache {library.parent} cannot be written: {error.strerror}")
    os.close(handle)
    command = [compiler, *FLAGS, target, str(source / SOURCES[0]), "-o", name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_LIMIT_S, check=False)
        if done.returncode != 0:
            first = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr.strip()[:200])
            return Built(None, f"{compiler} failed: {first}")
        os.chmod(name, 0o755)  # temporary files are private; a cache may be shared
        os.replace(name, library)
    except subprocess.TimeoutExpired:
        return Built(None, f"{compiler} took longer than {COMPILE_LIMIT_S:.0f} s")
    except OSError as error:
        return Built(None, f"{compiler} could not be run: {error.strerror}")
    finally:
        Path(name).unlink(missing_ok=True)
    return Built(library, f"compiled with {compiler} in {time.monotonic() - begun:.1f} s into {library.parent}")


def _key(source: Path, target: str) -> str:
    """Hash of what decides the code: sources, flags and, for a native build, the features of this CPU."""
    digest = hashlib.sha256()
    for name in SOURCES:
        digest.update((source / name).read_bytes())
    digest.update(" ".join((*FLAGS, target)).encode())
    if target == NATIVE:
        digest.update(_cpu_features().encode())
    return digest.hexdigest()[:20]


def _compiler_key(compiler: str) -> str:
    """The compiler by its file, not by asking it: starting one costs milliseconds of every launch."""
    real = Path(compiler).resolve()
    stat = real.stat()
    return hashlib.sha256(f"{real} {stat.st_size} {stat.st_mtime_ns}".encode()).hexdigest()[:12]


def _cpu_features() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
            for line in lines:
                if line.startswith(("flags", "Features")):
                    return f"{platform.machine()} {line.strip()}"
    except OSError:
        pass
    return f"{platform.machine()} {platform.processor()}"


def main(arguments: list[str] | None = None) -> int:
    """Build ahead of time and say what happened; 1 when this machine will use the torch twin."""
    parser = argparse.ArgumentParser(
        prog="python -m janus_server.kernels.build", description="Build the native kernels."
    )
    parser.add_argument("--cache", type=Path, default=cache_dir(os.environ), help="where compiled kernels are kept")
    built = ensure(parser.parse_args(arguments).cache)
    print(f"native CPU kernels: {built.how}")
    return 0 if built.path else 1


if __name__ == "__main__":
    sys.exit(main())
