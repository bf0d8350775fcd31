"""A model's vocabulary as the grammar library walks it: the bytes of every token, in a tree.

`compile` builds one per tokenizer, on first use. Building costs 0.1 s and 20 MB for 49 thousand tokens, 0.5 s and 50 MB
for 151 thousand, most of it with the interpreter lock held: never on the event loop.
"""

from __future__ import annotations

from typing import Final, Protocol

import llguidance

# Pieces of ordinary text whose tokens are looked up together. The library's own set without its white space, of which
# no grammar here allows just any amount.
_SLICES: Final = tuple(llguidance.LLTokenizer.json_slices()[1:])


class TokenSource(Protocol):
    """What is needed of a tokenizer."""

    vocab_size: int

    def token_bytes(self, token: int) -> bytes: ...

    def is_special(self, token: int) -> bool: ...


class TokenTable:
    """`tree` has one token more than the model, which ends a text; `tokens` is how many the model's tokenizer knows."""

    def __init__(self, source: TokenSource) -> None:
        self.tokens = source.vocab_size
        self.tree = llguidance.LLTokenizer(_Vocabulary(source), slices=list(_SLICES))  # type: ignore[arg-type]


class _Vocabulary:
    """What the library asks of a tokenizer. Control tokens are marked, so that no text is ever spelled with one."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, source: TokenSource) -> None:
        ids = range(source.vocab_size)
        self.tokens = [*map(source.token_bytes, ids), b"<end>"]
        # The model's own end tokens are several, and known to the matcher alone.
        self.eos_token_id = source.vocab_size
        self.special_token_ids = [*filter(source.is_special, ids), self.eos_token_id]

    def __call__(self, text: str) -> list[int]:
        raise TypeError("no text is encoded here")
