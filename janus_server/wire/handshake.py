"""How two nodes prove to each other that they know the cluster's secret, which itself never travels. Pure.

    a → b  Hello      who a is, where it listens, which address of b it dialled, for which role, and a random number
    b → a  Challenge  who b is, and its random number
    a → b  Proof      HMAC-SHA256 over all of the above, as the one who dialled
    b → a  Welcome    the same as the one who answers

Whoever dials proves first, so that a port scan learns nothing to guess the secret by. A proof holds for one connection
only: both random numbers are in it; and for these two processes, addresses and this role; and, under TLS, for the
certificate that was shown. The two proofs have different labels, so that neither can be sent back as the other.
"""

from __future__ import annotations

import hmac
from typing import Final

import msgspec

from janus_server.wire.frames import VERSION, Challenge, Hello, Knock, Proof, Refusal, Role, Welcome
from janus_server.wire.trouble import Trouble

NONCE_BYTES: Final = 32
_DIALLED: Final = "janus wire: proof of who dialled"
_ANSWERS: Final = "janus wire: proof of who answers"


class Identity(msgspec.Struct, frozen=True):
    """One process of a node. incarnation is drawn anew by each, endpoint is the address that it is to be dialled at."""

    cluster: str
    node: str
    incarnation: str
    endpoint: str


class Secret:
    """The cluster's secret, as the key of proofs. It shows itself to nobody."""

    def __init__(self, text: str) -> None:
        self._key = hmac.digest(b"janus wire: key of proofs", text.encode("utf-8", "surrogateescape"), "sha256")

    def __repr__(self) -> str:
        return "Secret()"

    def derived(self, purpose: str) -> bytes:
        """A key of 32 bytes for another purpose, which tells nothing of this one."""
        return hmac.digest(self._key, b"janus wire: key of " + purpose.encode(), "sha256")

    def proof(self, label: str, dialling: Identity, answering: Identity, hello: Hello, nonce: bytes,
              certificate: bytes) -> bytes:  # fmt: skip
        """Over every word of the handshake. msgpack says how long each one is: no two sets of words look the same."""
        words = (
            label, VERSION, hello.cluster, hello.role.value, hello.dialled, certificate,
            dialling.cluster, dialling.node, dialling.incarnation, dialling.endpoint, hello.nonce,
            answering.cluster, answering.node, answering.incarnation, answering.endpoint, nonce,
        )  # fmt: skip
        return hmac.digest(self._key, msgspec.msgpack.encode(words), "sha256")


class Met(msgspec.Struct, frozen=True):
    """The other end has proved itself."""

    peer: Identity
    role: Role


class Caller:
    """The end that dials. `peer` is whom it means to reach; an empty incarnation means whichever runs there.

    nonce is new for each connection; certificate is a digest of the one that the other end showed, empty without TLS.
    """

    def __init__(
        self, me: Identity, peer: Identity, role: Role, secret: Secret, nonce: bytes, certificate: bytes = b""
    ):
        self._me = me
        self._peer = peer
        self._secret = secret
        self._certificate = certificate
        self._challenge: Challenge | None = None
        self.hello = Hello(me.cluster, me.node, me.incarnation, me.endpoint, peer.endpoint, role, nonce)

    def hear(self, frame: Knock) -> Proof | Met | Trouble:
        """What to say next, or that the link is open, or why there is none."""
        match frame:
            case Refusal(why):
                return why
            case Challenge() if self._challenge is None:
                return self._challenged(frame)
            case Welcome(mac) if self._challenge is not None:
                expected = self._proof(_ANSWERS, self._challenge)
                if not hmac.compare_digest(mac, expected):
                    return Trouble.SECRET
                return Met(self._peer, self.hello.role)
        return Trouble.GARBAGE

    def _challenged(self, challenge: Challenge) -> Proof | Trouble:
        if challenge.node == self._me.node:
            return Trouble.NAME
        if challenge.node != self._peer.node or self._peer.incarnation not in ("", challenge.incarnation):
            return Trouble.PEER
        if hmac.compare_digest(challenge.nonce, self.hello.nonce):
            return Trouble.GARBAGE
        self._peer = msgspec.structs.replace(self._peer, incarnation=challenge.incarnation)
        self._challenge = challenge
        return Proof(self._proof(_DIALLED, challenge))

    def _proof(self, label: str, challenge: Challenge) -> bytes:
        return self._secret.proof(label, self._me, self._peer, self.hello, challenge.nonce, self._certificate)


class Answerer:
    """The end that is dialled. nonce and certificate as in Caller: its own here."""

    def __init__(self, me: Identity, secret: Secret, nonce: bytes, certificate: bytes = b"") -> None:
        self._me = me
        self._secret = secret
        self._nonce = nonce
        self._certificate = certificate
        self._hello: Hello | None = None
        self.met: Met | None = None

    def hear(self, frame: Knock) -> Challenge | Welcome | Trouble:
        """What to say next, or why there is no link. After Welcome it is open, and `met` says with whom."""
        match frame:
            case Hello() if self._hello is None:
                return self._greeted(frame)
            case Proof(mac) if self._hello is not None and self.met is None:
                return self._proved(self._hello, mac)
        return Trouble.GARBAGE

    def _greeted(self, hello: Hello) -> Challenge | Trouble:
        if hello.cluster != self._me.cluster:
            return Trouble.CLUSTER
        if hello.node == self._me.node:
            return Trouble.NAME
        if hello.dialled != self._me.endpoint:
            return Trouble.ADDRESS
        self._hello = hello
        return Challenge(self._me.node, self._me.incarnation, self._nonce)

    def _proved(self, hello: Hello, mac: bytes) -> Welcome | Trouble:
        peer = Identity(hello.cluster, hello.node, hello.incarnation, hello.endpoint)

        def proof(label: str) -> bytes:
            return self._secret.proof(label, peer, self._me, hello, self._nonce, self._certificate)

        if not hmac.compare_digest(mac, proof(_DIALLED)):
            return Trouble.SECRET
        self.met = Met(peer, hello.role)
        return Welcome(proof(_ANSWERS))
