"""Prompts of an exact size: from the keys and lengths of a `Drawn` prompt to token ids or to a text.

The client calls `render` shortly before a request is sent. A segment's tokens depend on its key, the run's seed and
nothing else, so equal keys give equal prefixes, in ids and in text. Ids need no tokenizer; a text of an exact number of
tokens needs one; without it a text is only about right, and `exact` says so.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np

from janus_server.errors import BadConfig

from .records import Drawn
from .traces import open_text

# Ids that every vocabulary has and that are no special token in the usual ones: those sit at its ends.
DEFAULT_IDS: Final = (16, 250)
_REPAIRS: Final = 64
_POOL: Final = 4096
# Common words that the tokenizers of today's models keep in one piece.
_WORDS: Final = tuple(
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work government number night point home water room mother "
    "area money story fact month lot right study book eye job word business issue side kind head house service friend "
    "father power hour game line end member law car city community name president team minute idea body information "
    "back parent face others level office door health person art war history party result change morning reason "
    "research girl guy moment air teacher force education".split()
)


class Wording(Protocol):
    exact: bool

    def render(self, prompt: Drawn) -> list[int] | str: ...


class Tokenizer(Protocol):
    """What is used of a `tokenizers.Tokenizer`."""

    def encode(self, sequence: str, *, add_special_tokens: bool) -> Any: ...

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str: ...

    def get_vocab_size(self, with_added_tokens: bool = True) -> int: ...

    def num_special_tokens_to_add(self, is_pair: bool) -> int: ...


class IdWording:
    """Token ids from low … high-1: what a server that takes ids counts is exact without any tokenizer."""

    exact = True

    def __init__(self, low: int, high: int, seed: int) -> None:
        if not 0 <= low < high:
            raise BadConfig(f"--random-ids: {low}:{high} is no range of ids; write LOW:HIGH with LOW below HIGH")
        self._low = low
        self._span = high - low
        self._seed = seed

    def render(self, prompt: Drawn) -> list[int]:
        drawn = [draw(self._seed, s.key, s.tokens, self._span) for s in prompt.segments]
        return [i + self._low for part in drawn for i in part.tolist()]


class SliceWording:
    """Token ids of slices of a real text: for models whose speed depends on what they read (experts, drafts)."""

    exact = True

    def __init__(self, tokenizer: Tokenizer, text: str, seed: int) -> None:
        self._ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        self._seed = seed
        if not self._ids:
            raise BadConfig("--text-file: the file has no text")

    def render(self, prompt: Drawn) -> list[int]:
        return [i for segment in prompt.segments for i in self._slice(segment.key, segment.tokens)]

    def _slice(self, key: int, tokens: int) -> list[int]:
        size = len(self._ids)
        start = int(draw(self._seed, key, 1, size)[0])
        # A slice that runs over the end goes on at the beginning.
        return (self._ids[start:] + self._ids * (tokens // size + 1))[:tokens]


class WordWording:
    """Text of words that are one token each with the space before them, measured and mended with the tokenizer.

    adds_special: whether the server will put its special tokens in front (completions) and they count.
    """

    exact = True

    def __init__(self, tokenizer: Tokenizer, seed: int, *, adds_special: bool) -> None:
        self._tokenizer = tokenizer
        self._seed = seed
        self._special = tokenizer.num_special_tokens_to_add(False) if adds_special else 0
        self._words = _single_tokens(tokenizer, seed)

    def render(self, prompt: Drawn) -> str:
        words = [self._words[i] for s in prompt.segments for i in draw(self._seed, s.key, s.tokens, len(self._words))]
        wanted = max(1, prompt.tokens - self._special)
        words = words[:wanted]
        # A tokenizer may still join or split at a border. The end is mended, so that shared prefixes stay shared.
        for _ in range(_REPAIRS):
            text = "".join(words)
            excess = len(self._tokenizer.encode(text, add_special_tokens=False).ids) - wanted
            if excess == 0:
                return text
            if excess > 0:
                # A single word may have to give up its space, which some tokenizers add anyway.
                words = words[: len(words) - excess] if len(words) > excess else [words[0].lstrip()]
            else:
                words += [self._words[(len(words) + i) % len(self._words)] for i in range(-excess)]
        raise BadConfig(f"no text of exactly {wanted} tokens was found with this tokenizer; send ids instead")


class RoughWording:
    """Text of about the wanted number of tokens, for servers that take no ids when there is no tokenizer."""

    exact = False

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def render(self, prompt: Drawn) -> str:
        return "".join(f" {_WORDS[i]}" for s in prompt.segments for i in draw(self._seed, s.key, s.tokens, len(_WORDS)))


def load_tokenizer(path: Path) -> Tokenizer:
    """From a tokenizer.json (gzipped or not) or the folder that holds one."""
    choices = (path / "tokenizer.json", path / "tokenizer.json.gz") if path.is_dir() else (path,)
    file = next((choice for choice in choices if choice.is_file()), None)
    if file is None:
        raise BadConfig(f"--tokenizer: {path} is neither a tokenizer.json nor a folder with one")
    # Loaded only here: most runs send ids and need none.
    import tokenizers

    with open_text(file) as text:
        content = text.read()
    try:
        loaded: Tokenizer = tokenizers.Tokenizer.from_str(content)
    # The library raises the bare class for every fault of the file.
    except Exception as error:  # noqa: BLE001
        raise BadConfig(f"--tokenizer: {file} cannot be read ({error})") from None
    return loaded


def draw(seed: int, key: int, count: int, span: int) -> np.ndarray:
    """[count] int64 in 0 … span-1: a hash of (seed, key, position), so that a shorter draw is a prefix of a longer."""
    with np.errstate(over="ignore"):
        start = _mixed(np.array([key & _MASK], np.uint64) + _mixed(np.array([seed & _MASK], np.uint64)))
        x = _mixed(start + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15))
    return (x >> np.uint64(11)).astype(np.int64) % span


_MASK: Final = (1 << 64) - 1


def _mixed(x: np.ndarray) -> np.ndarray:
    """[n] u64 to [n] u64: the finaliser of SplitMix64, by which every input bit reaches every output bit."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: np.ndarray = x ^ (x >> np.uint64(31))
    return mixed


def _single_tokens(tokenizer: Tokenizer, seed: int) -> list[str]:
    """Words with a leading space each of which adds exactly one token to a text."""
    size = tokenizer.get_vocab_size()
    words: list[str] = []
    for i in np.random.default_rng(seed).permutation(size).tolist():
        text = tokenizer.decode([i], skip_special_tokens=True)
        if not re.fullmatch(r" [a-zA-Z]{2,}", text):
            # SentencePiece drops the space of a first word when it decodes; the text needs it.
            text = f" {text}"
        if re.fullmatch(r" [a-zA-Z]{2,}", text) and _adds_one(tokenizer, text):
            words.append(text)
            if len(words) == _POOL:
                break
    if len(words) < 2:
        raise BadConfig("--tokenizer: it has no words of one token to build prompts from; send ids instead")
    return words


def _adds_one(tokenizer: Tokenizer, text: str) -> bool:
    """Told from the growth, since the first word of a text may bring a token for its space."""
    sizes = [len(tokenizer.encode(text * n, add_special_tokens=False).ids) for n in (1, 2, 3)]
    return sizes[2] - sizes[1] == sizes[1] - sizes[0] == 1
