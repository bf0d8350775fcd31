"""The socket that the server listens on, and what is checked about it before anything slow begins.

Called by `serve`. Every mistake is a BadConfig that says what to do: an address that others reach without a key, a
certificate that cannot be used, a port that is taken.
"""

from __future__ import annotations

import errno
import os
import resource
import socket
from typing import TYPE_CHECKING

from janus_server.config import ServeConfig
from janus_server.errors import BadConfig
from janus_server.keys import ADMIN_VARIABLE, USER_VARIABLE, KeyRing

if TYPE_CHECKING:
    import ssl

# Descriptors that are no client's: the listening socket, models, helper processes, logs.
_OWN_FILES = 256


def bind(host: str, port: int) -> socket.socket:
    """A socket bound to that address; BadConfig when it cannot be had."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family, backlog=1024)
    except socket.gaierror:
        raise BadConfig(f"--host {host}: no such address; 127.0.0.1 is this machine, 0.0.0.0 every network") from None
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            reason = "is in use by another process; choose another with --port (0 takes any free one)"
        else:
            reason = f"cannot be listened on: {os.strerror(error.errno or 0)}"
        raise BadConfig(f"{host} port {port} {reason}") from None


def inherited(number: int) -> socket.socket:
    """The socket that whoever started this process listens on, to accept its connections.

    It outlives this process and is never shut down here: who connects while no process accepts waits for the next one.
    """
    try:
        listening = socket.socket(fileno=number)
        if listening.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            listening.set_inheritable(False)
            return listening
        listening.detach()
    except OSError:
        pass
    raise BadConfig(f"--listen-fd {number}: that is no listening socket of whoever started this process")


def check_exposure(config: ServeConfig, keys: KeyRing, address: str) -> str | None:
    """Refuse to be reached from other machines without a key; a warning when the key travels in the clear."""
    if is_local(address):
        return None
    if not len(keys) and not config.insecure:
        raise BadConfig(
            f"--host {config.host} can be reached from other machines and no API key is set: set {USER_VARIABLE} (and "
            f"{ADMIN_VARIABLE}) or --api-key-file, or say --insecure to serve everybody"
        )
    if config.ssl_certfile is None and len(keys):
        return f"{config.host} is served without TLS: keys and texts can be read on the way (--ssl-certfile)"
    return f"{config.host} is served to everybody who reaches it (--insecure)" if not len(keys) else None


def is_local(address: str) -> bool:
    """Whether a numeric address is reached from this machine alone."""
    import ipaddress

    parsed = ipaddress.ip_address(address.partition("%")[0])
    return (getattr(parsed, "ipv4_mapped", None) or parsed).is_loopback


def tls_context(config: ServeConfig) -> ssl.SSLContext | None:
    """What HTTPS is served with: TLS 1.2 or later. None for plain HTTP."""
    if config.ssl_certfile is None or config.ssl_keyfile is None:
        return None
    import ssl

    for flag, path in (("--ssl-certfile", config.ssl_certfile), ("--ssl-keyfile", config.ssl_keyfile)):
        if not os.access(path, os.R_OK):
            raise BadConfig(f"{flag} {path}: there is no such file, or it cannot be read")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    try:
        # Without an answer to its question, OpenSSL would ask the terminal for a passphrase and wait.
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile, password="")
    except (ssl.SSLError, ValueError):
        raise BadConfig(
            f"--ssl-certfile {config.ssl_certfile} and --ssl-keyfile {config.ssl_keyfile} are not a certificate and "
            "its key, both in PEM form and the key without a passphrase"
        ) from None
    return context


def connections_to_have(wanted: int) -> int:
    """How many connections the process can have, of those wanted: each takes a descriptor, whose limit is raised."""
    needed = wanted + _OWN_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return wanted
    most = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return max(1, most - _OWN_FILES)
