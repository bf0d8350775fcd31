"""The cluster's secret and the certificates of its links: read from files, checked before anything listens.

Called by whoever opens the links. Every mistake is a BadConfig that names the setting and what helps. The secret is
neither logged nor shown; its file must be closed to everybody else.
"""

from __future__ import annotations

import contextlib
import hashlib
import ipaddress
import os
import re
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

import msgspec

from janus_server.errors import BadConfig
from janus_server.secretfile import read_secret_file
from janus_server.wire.handshake import Secret

if TYPE_CHECKING:
    import ssl

_SECRET: Final = re.compile(r"[\x21-\x7e]{32,512}")
_ENDPOINT: Final = re.compile(r"wss?://(?:[A-Za-z0-9._-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\]):[0-9]{1,5}")
_WANTED: Final = "one line of 32 to 512 printable characters without spaces (openssl rand -hex 32 makes a good one)"


class TlsFiles(msgspec.Struct, frozen=True):
    """PEM files: this node's certificate and key, and the CA that signed those of all nodes."""

    certificate: Path
    key: Path
    ca: Path


def read_secret(path: Path) -> Secret:
    """The secret of a file that nobody but its owner can read."""
    text = read_secret_file(path, "the cluster's secret").decode("latin-1")
    if not _SECRET.fullmatch(text):
        raise BadConfig(f"the cluster's secret {path} must hold {_WANTED}")
    return Secret(text)


def shared_secret(path: Path) -> Secret:
    """The secret of that file, which is made where it is not there yet: by one of those that come at the same time."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    if not path.exists():
        try:
            file = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise BadConfig(f"cannot make the cluster's secret {path}: {error.strerror}") from None
        try:
            os.write(file, secrets.token_hex(32).encode())
            # It has its name only once it is whole, and whoever comes second keeps what is there.
            with contextlib.suppress(FileExistsError):
                os.link(draft, path)
        finally:
            os.close(file)
            os.unlink(draft)
    return read_secret(path)


def check_endpoint(endpoint: str) -> None:
    """BadConfig for an address that no link may use: of another form, or without TLS where others could read along."""
    if not _ENDPOINT.fullmatch(endpoint) or not 0 < (_port(endpoint) or 0) < 65536:
        raise BadConfig("the address of a node is ws://127.0.0.1:PORT on one machine and wss://HOST:PORT beyond it")
    if endpoint.startswith("ws://") and not is_loopback(urlsplit(endpoint).hostname or ""):
        raise BadConfig("nodes on other machines are reached with TLS alone: give a certificate, its key and their CA")


def is_loopback(host: str) -> bool:
    """Whether a numeric address is reached from this machine alone. Names are not looked up: they may change."""
    try:
        parsed = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return (getattr(parsed, "ipv4_mapped", None) or parsed).is_loopback


def answering_context(files: TlsFiles) -> ssl.SSLContext:
    """For who is dialled: only nodes with a certificate of the CA get as far as the handshake."""
    import ssl

    return _context(files, ssl.PROTOCOL_TLS_SERVER)


def dialling_context(files: TlsFiles) -> ssl.SSLContext:
    """For who dials.

    The name in the certificate is not compared with the address: who is there is proved by the secret, and that proof
    holds for the certificate that was shown. So one certificate may serve all nodes.
    """
    import ssl

    return _context(files, ssl.PROTOCOL_TLS_CLIENT)


def digest_of(certificate: bytes | None) -> bytes:
    """Of a certificate in DER form; empty for none."""
    return b"" if certificate is None else hashlib.sha256(certificate).digest()


def own_digest(files: TlsFiles) -> bytes:
    """Of the certificate that this node shows."""
    import ssl

    found = re.search(r"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", _text(files.certificate), re.DOTALL)
    if found is None:
        raise _not_pem(files)
    return digest_of(ssl.PEM_cert_to_DER_cert(found.group()))


def _context(files: TlsFiles, protocol: int) -> ssl.SSLContext:
    import ssl

    for path in (files.certificate, files.key, files.ca):
        _text(path)
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        # Without an answer to its question, OpenSSL would ask the terminal for a passphrase and wait.
        context.load_cert_chain(files.certificate, files.key, password="")
        context.load_verify_locations(files.ca)
    except (ssl.SSLError, ValueError):
        raise _not_pem(files) from None
    return context


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError as error:
        raise BadConfig(f"cannot read {path}, which links with other machines need: {error.strerror}") from None


def _not_pem(files: TlsFiles) -> BadConfig:
    return BadConfig(
        f"{files.certificate}, {files.key} and {files.ca} are not a certificate, its key (without a passphrase) and a "
        "CA, all in PEM form"
    )


def _port(endpoint: str) -> int | None:
    try:
        return urlsplit(endpoint).port
    except ValueError:
        return None
