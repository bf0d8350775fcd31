"""The version of the installed package, as the API and traces tell it. Read when asked for: it costs 20 ms."""

from __future__ import annotations


def server_version() -> str:
    from importlib import metadata

    try:
        return metadata.version("janus-server")
    except metadata.PackageNotFoundError:
        return "unknown"
