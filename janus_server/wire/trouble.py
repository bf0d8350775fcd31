"""What can go wrong between two nodes, each with the one sentence that says so and what helps.

Only the short code travels: a node prints its own words and nothing that came over the wire. Pure.
"""

from __future__ import annotations

import enum


class Trouble(enum.Enum):
    """Why a link was refused or ended, or a stream on it."""

    sentence: str

    def __new__(cls, code: str, sentence: str) -> Trouble:
        one = object.__new__(cls)
        one._value_ = code
        one.sentence = sentence
        return one

    @classmethod
    def named(cls, code: str | None) -> Trouble | None:
        """That of a code, if it is one."""
        return next((one for one in cls if one.value == code), None)

    # Of the handshake.
    VERSION = "version", "the nodes run different versions of Janus: install the same one on all of them"
    CLUSTER = "cluster", "it belongs to another cluster: give the nodes of one cluster the same cluster name"
    NAME = "name", "both nodes have the same name: give each node a name of its own (--node)"
    TAKEN = "taken", "another process of that name is connected: give each node a name of its own (--node)"
    SECRET = "secret", "the cluster secret is not the same on both nodes: copy the secret file of one to the other"
    ADDRESS = "address", "it was reached at an address that is not the one it advertises: correct what it advertises"
    PEER = "peer", "another process answers at that address: what is known of the node there is old"
    DELAYED = "delayed", "too many attempts of that name failed: correct its cluster secret; it may try again later"
    LATE = "late", "the handshake took too long"

    # Of a link.
    GARBAGE = "garbage", "it sent what is no frame of this protocol"
    TOO_LONG = "too long", "it sent a frame that is too long"
    SILENT = "silent", "nothing has come from it for too long, or nothing reaches it"
    GONE = "gone", "the connection ended"
    REPLACED = "replaced", "its process has connected anew"
    BACKLOG = "backlog", "it takes frames too slowly"
    ORDER = "order", "it broke the order of a stream"
    CREDIT = "credit", "it sent more of a stream than it was allowed"
    NO_ANSWER = "no answer", "it cannot be reached"
    NOBODY = "nobody", "no process listens at its address"
    TLS = "tls", "its TLS certificate is not one that this node trusts: check the certificate and the CA of both"

    # Of a stream.
    UNKNOWN = "unknown", "it does not know the request (any more)"
    SLOW = "slow", "what reads the answer is too slow"
    FAILED = "failed", "the request failed on the node that ran it"
    CROWDED = "crowded", "too many requests are open between the two nodes"
    DRAINING = "draining", "the node takes no new requests"
    UNSOUND = "unsound", "the request is not one that a node may send"
    NOT_HERE = "not here", "the model is not on the device of that node"
    TOO_LATE = "too late", "the request's time had run out when it came"
    LOST = "lost", "the node that ran the request is gone"
    CLOSED = "closed", "this node is closing its links"
