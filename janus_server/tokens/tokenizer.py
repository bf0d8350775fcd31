"""Text ↔ tokens: one `Tokenizer` per model, on the `tokenizers` library.

The HTTP layer encodes prompts and chats with it (on a thread when long: encoding releases the GIL); `detokenize`
turns ids back into text. Rule held here: what a message *spells* like a control token becomes ordinary tokens; only
the template's own are real. Immutable after construction apart from caches, so any thread may use it. Must never
fetch or run anything from a checkpoint.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from janus_server.errors import BadModel, Refused
from janus_server.tokens.render import Renderers
from janus_server.tokens.source import TokenizerParts, parts_from_folder, parts_from_gguf
from janus_server.tokens.template import ChatInput, ChatTemplate, texts_in

_PRIVATE_USE = range(0xF0000, 0xFFFFE)
_NO_TEMPLATE = "This model has no chat template. Use /v1/completions instead."
_TOO_DEEP = "A message, or what goes with it to the chat template, is nested too deeply."
_ENTANGLED = "A message spells a control token of this model where the chat template rewrites it."


@dataclasses.dataclass(frozen=True, slots=True)
class _Marker:
    """A token that structures a prompt, and whether it swallows white space around it."""

    id: int
    special: bool
    strips_left: bool
    strips_right: bool


class Tokenizer:
    """A model's vocabulary, special tokens and chat template."""

    def __init__(self, parts: TokenizerParts, renderers: Renderers | None = None) -> None:
        """renderers: those of the node, shared by its models; without them this tokenizer has its own."""
        self._parts = parts
        self._backend = parts.backend
        self._longest_token_chars: int | None = None
        added = parts.backend.get_added_tokens_decoder()
        self.vocab_size: int = max([parts.backend.get_vocab_size(with_added_tokens=True), *(i + 1 for i in added)])
        self.bos_id = parts.bos_id
        self.eos_ids = parts.eos_ids
        self.add_bos = parts.bos_id is not None and parts.bos_id in parts.prefix
        self._special_ids = frozenset(i for i, token in added.items() if token.special)
        self._to_bytes, self.strips_first_space = _byte_rule(parts.backend)
        self._bytes: dict[int, bytes] = {}
        shared = renderers or Renderers()
        self._templates = {
            name: ChatTemplate(text, parts.token_texts, shared) for name, text in parts.templates.items()
        }
        self._markers = {
            token.content: _Marker(i, token.special, token.lstrip, token.rstrip)
            for i, token in sorted(added.items())
            if _is_marker(token, parts.templates.values())
        }
        self._marker_pattern = _alternatives(self._markers)
        self._plain_added = {t.content: i for i, t in added.items() if t.content not in self._markers}
        self._plain_added_pattern = _alternatives(self._plain_added)
        self._prepends_first = _state(parts.backend.pre_tokenizer).get("prepend_scheme") == "first"

    @classmethod
    def from_folder(cls, path: Path | str, renderers: Renderers | None = None) -> Tokenizer:
        """Read a Hugging Face checkpoint folder."""
        return cls(parts_from_folder(Path(path)), renderers)

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, object], renderers: Renderers | None = None) -> Tokenizer:
        """Rebuild from the tokenizer.* keys of a GGUF file (arrays as sequences, strings as str)."""
        return cls(parts_from_gguf(metadata), renderers)

    @property
    def has_chat_template(self) -> bool:
        return bool(self._templates)

    @property
    def chat_template(self) -> str | None:
        """The source of the template that plain conversations are written with."""
        return self._parts.templates.get("default")

    @property
    def tool_template(self) -> str | None:
        """The source of the template that conversations with tools are written with."""
        return self._parts.templates.get("tool_use", self.chat_template)

    def added(self, texts: Iterable[str]) -> dict[str, tuple[int, bool]]:
        """Those of the texts that are added tokens: the id, and whether it is special."""
        ids = {text: self._backend.token_to_id(text) for text in texts}
        known = self._backend.get_added_tokens_decoder()
        return {text: (i, i in self._special_ids) for text, i in ids.items() if i in known}

    @property
    def token_texts(self) -> Mapping[str, str]:
        """The texts of bos_token, eos_token, pad_token and unk_token, as far as the checkpoint names them."""
        return self._parts.token_texts

    @property
    def kind(self) -> str:
        """How the vocabulary is cut: BPE, Unigram, WordPiece or WordLevel."""
        return type(self._backend.model).__name__

    def entry(self, token: int) -> str:
        """A token as the vocabulary spells it ("Ġthe"); "" for an id that it does not hold."""
        return (self._backend.id_to_token(token) if 0 <= token < self.vocab_size else None) or ""

    def encode(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """Ids of `text`; add_special puts BOS (and EOS) around it, parse_special reads control tokens in it."""
        text = _valid(text)
        if parse_special or self._marker_pattern is None or not self._marker_pattern.search(text):
            ids = self._encode_as_written(text)
        else:
            ids = self._encode_literally(text, at_start=True)
        return [*self._parts.prefix, *ids, *self._parts.suffix] if add_special else ids

    @property
    def longest_token_chars(self) -> int:
        """No token stands for more characters: a text longer than that many times the context cannot fit."""
        if self._longest_token_chars is None:  # 60 ms for 150 thousand entries, which only very long texts need
            self._longest_token_chars = max(map(len, self._backend.get_vocab()), default=1)
        return self._longest_token_chars

    def compile_templates(self) -> None:
        """Do now what the first chat would wait for (starting a renderer); a bad template is refused then."""
        for template in self._templates.values():
            with contextlib.suppress(Refused):
                template.facts  # noqa: B018

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Any] | None = None,
        add_generation_prompt: bool = True,
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Ids of the conversation as the model's template writes it; Refused when there is none or it objects."""
        template = self._templates.get("tool_use") if tools else None
        template = template or self._templates.get("default")
        if template is None:
            raise Refused(_NO_TEMPLATE, param="messages", code="no_chat_template")
        try:
            chat = template.prepare(messages, tools, add_generation_prompt, kwargs)
            prompt = template.render(chat)
            spelled = self._spelled(texts_in((chat.messages, chat.tools, chat.kwargs)))
            if not spelled:
                return self._encode_as_written(_valid(prompt))
            return self._encode_guarded(template, chat, prompt, spelled)
        except RecursionError:
            raise Refused(_TOO_DEEP, param="messages") from None

    def decode(self, ids: Sequence[int], skip_special: bool) -> str:
        """The text of `ids`; bytes that are not UTF-8 become U+FFFD."""
        special = self._special_ids if skip_special else frozenset()
        text = b"".join([self.token_bytes(i) for i in ids if i not in special]).decode("utf-8", "replace")
        return text.removeprefix(" ") if self.strips_first_space else text

    def token_text(self, token: int) -> str:
        """One token as a client may read it; half a character shows as U+FFFD (its bytes are in token_bytes)."""
        return self.token_bytes(token).decode("utf-8", "replace")

    def token_bytes(self, token: int) -> bytes:
        """The exact bytes that a token adds to the text; b"" for an id that the tokenizer does not know."""
        found = self._bytes.get(token)
        if found is None:
            text = self._backend.id_to_token(token) if 0 <= token < self.vocab_size else None
            found = self._bytes[token] = b"" if text is None else self._to_bytes(text)
        return found

    def is_special(self, token: int) -> bool:
        """True for control tokens, which `skip_special` leaves out of a text."""
        return token in self._special_ids

    def _encode_as_written(self, text: str) -> list[int]:
        # Unlike `encode`, this call lets go of the interpreter lock (1 MB takes 0.2 s) and computes no offsets.
        ids: list[int] = self._backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return ids

    def _encode_literally(self, text: str, at_start: bool) -> list[int]:
        """Encode `text` as if no marker existed: the library's own stages, without its search for added tokens."""
        pieces = [text] if self._plain_added_pattern is None else self._plain_added_pattern.split(text)
        normalizer, splitter, model = self._backend.normalizer, self._backend.pre_tokenizer, self._backend.model
        ids: list[int] = []
        for index, piece in enumerate(pieces):
            if index % 2:  # the pattern's group: an added token that is ordinary content, such as a run of spaces
                ids.append(self._plain_added[piece])
                continue
            normal = normalizer.normalize_str(piece) if normalizer is not None and piece else piece
            words = [word for word, _ in splitter.pre_tokenize_str(normal)] if splitter is not None else [normal]
            if self._prepends_first and words and not (at_start and index == 0) and not normal.startswith((" ", "▁")):
                words[0] = words[0].removeprefix("▁")  # only the start of a whole text gets a space before it
            ids += [token.id for word in words if word for token in model.tokenize(word)]
        return ids

    # Messages that spell markers

    def _spelled(self, texts: Iterable[str]) -> list[str]:
        """The markers that occur in the texts, each once, in a stable order."""
        pattern = self._marker_pattern
        if pattern is None:
            return []
        return list(dict.fromkeys(found for text in texts if text for found in pattern.findall(text)))

    def _encode_guarded(self, template: ChatTemplate, chat: ChatInput, prompt: str, spelled: list[str]) -> list[int]:
        """Encode with every marker that came from a message as ordinary text.

        The template is rendered again with each such spelling swapped for a private-use character. A template that
        looks for a spelling (say `'</think>' in content`) would then write something else, so the result must equal
        `prompt` once swapped back; where it does not, the non-special spellings that the template looks for stay
        visible to it, in the model's own messages first.
        """
        stand_ins = _stand_ins(spelled, (*texts_in((chat.messages, chat.tools, chat.kwargs)), prompt))
        restore = {ord(stand_in): text for text, stand_in in stand_ins.items()}
        looked_for = {
            text
            for text in spelled
            if not self._markers[text].special and any(text in constant for constant in template.facts.inspected)
        }
        for visible_to in ((), ("assistant",), None):
            guarded = template.render(self._swapped(chat, stand_ins, looked_for, visible_to))
            if guarded.translate(restore) == prompt:
                return self._encode_segments(guarded, restore)
        raise Refused(_ENTANGLED, param="messages")

    def _swapped(
        self, chat: ChatInput, stand_ins: Mapping[str, str], looked_for: set[str], visible_to: tuple[str, ...] | None
    ) -> ChatInput:
        """`chat` with spellings swapped; those in looked_for stay in messages of these roles (None: anywhere)."""
        pattern = self._marker_pattern
        if pattern is None:
            return chat

        def swap(value: Any, keep: set[str]) -> Any:
            if isinstance(value, str):
                return pattern.sub(lambda m: m[0] if m[0] in keep else stand_ins[m[0]], value)
            if isinstance(value, Mapping):
                return {swap(key, keep): swap(item, keep) for key, item in value.items()}
            if isinstance(value, list | tuple):
                return [swap(item, keep) for item in value]
            return value

        everywhere = looked_for if visible_to is None else set()
        return ChatInput(
            tuple(swap(m, looked_for if m["role"] in (visible_to or ()) else everywhere) for m in chat.messages),
            None if chat.tools is None else tuple(swap(chat.tools, everywhere)),
            chat.add_generation_prompt,
            swap(chat.kwargs, everywhere),
        )

    def _encode_segments(self, guarded: str, restore: Mapping[int, str]) -> list[int]:
        """Encode rendered text whose stand-ins mean ordinary text; runs without any go to the library whole."""
        pattern = self._marker_pattern
        pieces = pattern.split(guarded) if pattern is not None else [guarded]
        stand_ins = "".join(map(chr, restore))
        held_out = re.compile(f"[{re.escape(stand_ins)}]")
        ids: list[int] = []
        run: list[str] = []
        for index, piece in enumerate(pieces):
            if index % 2 or not held_out.search(piece):
                run.append(piece)
                continue
            ids += self._encode_as_written(_valid("".join(run)))
            run = []
            if index > 0 and self._markers[pieces[index - 1]].strips_right:
                piece = piece.lstrip()
            if index + 1 < len(pieces) and self._markers[pieces[index + 1]].strips_left:
                piece = piece.rstrip()
            ids += self._encode_literally(_valid(piece.translate(restore)), at_start=index == 0)
        return ids + self._encode_as_written(_valid("".join(run)))


def _valid(text: str) -> str:
    """`text` without lone surrogates, which JSON can carry and UTF-8 cannot."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")


def _is_marker(token: tokenizers.AddedToken, templates: Iterable[str]) -> bool:
    """Special tokens, and added ones that look or serve as such: DeepSeek's <｜User｜> is not declared special."""
    text = token.content
    if not text.strip():
        return False
    if token.special or text.startswith(("<|", "<｜")):
        return True
    return text[0] in "<[{" and any(text in template for template in templates)


def _alternatives(texts: Iterable[str]) -> re.Pattern[str] | None:
    """A pattern with one group that finds the longest of `texts` at each place; None when there are none."""
    ordered = sorted((text for text in texts if text), key=len, reverse=True)
    return re.compile("(" + "|".join(map(re.escape, ordered)) + ")") if ordered else None


def _stand_ins(spelled: Sequence[str], texts: Iterable[str]) -> dict[str, str]:
    """A private-use character for each spelling, none of which occurs in the texts."""
    taken = set().union(*map(set, texts))
    free = list(itertools.islice((chr(code) for code in _PRIVATE_USE if chr(code) not in taken), len(spelled)))
    if len(free) < len(spelled):
        raise Refused(_ENTANGLED, param="messages")
    return dict(zip(spelled, free, strict=True))


# How a vocabulary spells bytes


def _byte_rule(backend: tokenizers.Tokenizer) -> tuple[Callable[[str], bytes], bool]:
    """How a vocabulary entry becomes bytes, and whether a text loses the space before its first word."""
    state = _state(backend.decoder)
    kinds = {step.get("type"): step for step in state.get("decoders", [state])}
    if "ByteLevel" in kinds:
        alphabet = {character: byte for byte, character in enumerate(_byte_alphabet())}
        return lambda text: _byte_level_bytes(text, alphabet), False
    if "Metaspace" in kinds:
        return _sentencepiece_bytes, kinds["Metaspace"].get("prepend_scheme") != "never"
    if "ByteFallback" in kinds:
        return _sentencepiece_bytes, kinds.get("Strip", {}).get("start", 0) > 0
    raise BadModel(f"the tokenizer's decoder {state.get('type')!r} is not supported (byte-level and sentencepiece are)")


def _state(part: Any) -> dict[str, Any]:
    """A stage of the tokenizer as the JSON that the library keeps of it; {} for none."""
    return {} if part is None else dict(json.loads(part.__getstate__()))


def _byte_alphabet() -> list[str]:
    """GPT-2's printable stand-in for each byte: itself where printable, else from U+0100 on."""
    shown = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = iter(range(0x100, 0x200))
    return [chr(byte) if byte in shown else chr(next(hidden)) for byte in range(256)]


def _byte_level_bytes(text: str, alphabet: Mapping[str, int]) -> bytes:
    try:
        return bytes([alphabet[character] for character in text])
    except KeyError:  # an added token is spelled as it is
        return text.encode()


def _sentencepiece_bytes(text: str) -> bytes:
    if len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
        try:
            return bytes([int(text[3:5], 16)])
        except ValueError:
            pass
    return text.replace("▁", " ").encode()
