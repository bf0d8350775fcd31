"""Before a frame is read on a line: both ends prove that they know the cluster's secret, as on the wire.

The proofs are `wire/handshake`'s, over this line's addresses, so that none of another connection is worth anything
here; under TLS they hold for the certificate that was shown. Called by `door` and by whoever dials one.
"""

from __future__ import annotations

import re
import secrets
import socket
import ssl
import time
from typing import Final

from janus_server.transfer.frames import PeerTrouble
from janus_server.transfer.line import Line
from janus_server.wire.frames import KNOCK_MOST_BYTES, KNOCKS, Hello, Knock, Refusal, Role, read, write
from janus_server.wire.handshake import NONCE_BYTES, Answerer, Caller, Identity, Met, Secret
from janus_server.wire.tls import digest_of, is_loopback
from janus_server.wire.trouble import Trouble

_ENDPOINT: Final = re.compile(r"(tcp|tls)://(?:\[([0-9A-Fa-f:.]{2,45})\]|([A-Za-z0-9._-]{1,253})):([0-9]{1,5})")


class Refused(PeerTrouble):
    """The other end was not let in, or does not let this one in. name is what it claimed to be, which may be a lie."""

    def __init__(self, why: Trouble, name: str = "") -> None:
        super().__init__(f"it cannot be met: {why.sentence}")
        self.why = why
        self.name = name


def endpoint_of(host: str, port: int, tls: bool) -> str:
    """The address of a door, as members are told of it. Example: tcp://127.0.0.1:4000."""
    return f"{'tls' if tls else 'tcp'}://{f'[{host}]' if ':' in host else host}:{port}"


def dial(me: Identity, peer: Identity, secret: Secret, tls: ssl.SSLContext | None, limit_s: float) -> Line:
    """A line to the door of that process, both ends proved. PeerTrouble. Blocks for limit_s at most."""
    until_s = time.monotonic() + limit_s
    line = _connected(peer.endpoint, tls, limit_s)
    try:
        _prove(line, me, peer, secret, until_s)
    except BaseException:
        line.close()
        raise
    return line


def answered(line: Line, me: Identity, secret: Secret, certificate: bytes, limit_s: float) -> Identity:
    """Who is at the other end. Refused where it is nobody of the cluster; it was told so."""
    until_s = time.monotonic() + limit_s
    answerer, name = Answerer(me, secret, secrets.token_bytes(NONCE_BYTES), certificate), ""
    while True:
        knock = _hear(line, until_s)
        if isinstance(knock, Hello):
            name = knock.node
        step = knock if isinstance(knock, Trouble) else answerer.hear(knock)
        if isinstance(step, Trouble):
            line.send_body(write(Refusal(step)), _left_s(until_s))
            raise Refused(step, name)
        line.send_body(write(step), _left_s(until_s))
        if answerer.met is not None:
            return answerer.met.peer


def _prove(line: Line, me: Identity, peer: Identity, secret: Secret, until_s: float) -> None:
    certificate = b"" if line.certificate is None else digest_of(line.certificate)
    caller = Caller(me, peer, Role.STREAM, secret, secrets.token_bytes(NONCE_BYTES), certificate)
    line.send_body(write(caller.hello), _left_s(until_s))
    while True:
        knock = _hear(line, until_s)
        step = knock if isinstance(knock, Trouble) else caller.hear(knock)
        if isinstance(step, Trouble):
            raise Refused(step, peer.node)
        if isinstance(step, Met):
            return
        line.send_body(write(step), _left_s(until_s))


def _hear(line: Line, until_s: float) -> Knock | Trouble:
    return read(bytes(line.receive_body(KNOCK_MOST_BYTES, _left_s(until_s))), KNOCKS, KNOCK_MOST_BYTES)


def _left_s(until_s: float) -> float:
    return max(until_s - time.monotonic(), 0.0)


def _connected(endpoint: str, tls: ssl.SSLContext | None, limit_s: float) -> Line:
    """Only with TLS to where others could read along."""
    found = _ENDPOINT.fullmatch(endpoint)
    if found is None or not 0 < int(found[4]) < 65536:
        raise PeerTrouble("the peer has no address that weights could come from")
    host, secure = found[2] or found[3], found[1] == "tls"
    if secure is not (tls is not None) or not (secure or is_loopback(host)):
        raise PeerTrouble("the peer and this node do not agree on TLS: give both a certificate, its key and their CA")
    try:
        connection = socket.create_connection((host, int(found[4])), limit_s)
    except OSError:
        raise PeerTrouble("the peer cannot be reached") from None
    if tls is None:
        return Line(connection)
    try:
        connection.settimeout(limit_s)
        return Line(tls.wrap_socket(connection))
    except OSError:
        connection.close()
        raise PeerTrouble("the peer's TLS certificate is not one that this node trusts") from None
