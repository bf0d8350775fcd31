"""One named regression test for each security rule that lies behind the edge; `test_rules` holds those of the edge."""

from __future__ import annotations

import json
import re
import shutil
import struct
from pathlib import Path
from typing import Any

import openai
import pytest
from server_process import Server, post, tiny_model

from janus_server.errors import BadModel, Refused
from janus_server.grammar.compile import Grammars
from janus_server.kv.blocks import KvPages
from janus_server.kv.pages import PagePool
from janus_server.kv.prefix import PrefixCache
from janus_server.model.load import open_checkpoint
from janus_server.tokens.render import Renderers
from janus_server.tokens.tokenizer import Tokenizer
from janus_server.types import Grammar, GrammarKind

ROOT = Path(__file__).parents[2]
SOURCES = sorted(path for room in ("janus_server", "bench") for path in (ROOT / room).rglob("*.py"))
FORBIDDEN = re.compile(r"import (pickle|dill|marshal)|torch\.load\(|(?<![\w.])(eval|exec)\(|recv_pyobj|auto_map")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("tiny"))


def test_rule_01_nothing_runs_what_it_reads() -> None:
    """The house test walks the syntax; this one reads the words, comments included."""
    assert FORBIDDEN.search("x = eval(y)") and not FORBIDDEN.search("ast.literal_eval(y)")
    assert [path.name for path in SOURCES if FORBIDDEN.search(path.read_text())] == []


@pytest.mark.parametrize("damage", ["header beyond the file", "offsets beyond the data", "overlap", "other shape"])
def test_rule_02_a_checkpoint_that_lies_is_refused_before_memory_is_taken(
    checkpoint: Path, tmp_path: Path, damage: str
) -> None:
    folder = tmp_path / "lying"
    shutil.copytree(checkpoint, folder)
    file = folder / "model.safetensors"
    raw = file.read_bytes()
    size = struct.unpack("<Q", raw[:8])[0]
    header: dict[str, Any] = json.loads(raw[8 : 8 + size])
    names = [name for name in header if name != "__metadata__"]
    first, second = header[names[0]], header[names[1]]
    match damage:
        case "header beyond the file":
            file.write_bytes(struct.pack("<Q", 1 << 40) + raw[8:])
        case "offsets beyond the data":
            first["data_offsets"][1] += 1 << 30
        case "overlap":
            second["data_offsets"] = first["data_offsets"]
        case "other shape":
            first["shape"] = [1, *first["shape"]]
    if damage != "header beyond the file":
        text = json.dumps(header).encode()
        file.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + size :])
    with pytest.raises(BadModel):
        open_checkpoint(folder, None)


def test_rule_03_templates_are_bounded_and_their_names_are_not_ours(checkpoint: Path, tmp_path: Path) -> None:
    folder = tmp_path / "looping"
    shutil.copytree(checkpoint, folder)
    (folder / "chat_template.jinja").write_text("{% for i in range(99999999) %}{{ i }}{% endfor %}")
    renderers = Renderers(cpu_s=0.5)
    try:
        with pytest.raises(Refused):
            Tokenizer.from_folder(folder, renderers).encode_chat([{"role": "user", "content": "x"}])
        for name in ("messages", "tools", "add_generation_prompt", "raise_exception", "bos_token"):
            with pytest.raises(Refused):
                Tokenizer.from_folder(checkpoint, renderers).encode_chat(
                    [{"role": "user", "content": "x"}], kwargs={name: "other"}
                )
    finally:
        renderers.close()


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar(GrammarKind.REGEX, "(a?){9999}a{9999}"),
        Grammar(GrammarKind.JSON_SCHEMA, json.dumps({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}})),
        Grammar(GrammarKind.JSON_SCHEMA, json.dumps({"type": "string", "pattern": "(a+)+$("})),
        Grammar(GrammarKind.JSON_SCHEMA, json.dumps({"type": "nothing"})),
        Grammar(GrammarKind.LARK, "start: start start start"),
    ],
    ids=lambda grammar: grammar.source[:20],
)
def test_rule_08_what_a_client_has_compiled_is_bounded(checkpoint: Path, grammar: Grammar) -> None:
    """Refused, or compiled within the bounds: never a hang, never another exception."""
    grammars = Grammars(cpu_s=2.0)
    try:
        matcher = grammars.compile(Tokenizer.from_folder(checkpoint), grammar, (2,))
        assert matcher.mask() is not None
    except Refused as refused:
        assert refused.status == 400
    finally:
        grammars.close()


def test_rule_11_prefixes_are_keyed_by_a_secret_and_by_their_tenant() -> None:
    kv = KvPages(PagePool(16), "m", 2)
    cache, other = PrefixCache(kv, b"one secret"), PrefixCache(kv, b"another")
    pages = kv.take(2)
    assert pages is not None
    cache.publish([1, 2, 3, 4], pages, "alice")
    assert cache.match([1, 2, 3, 4, 5], 4, "alice").pages == pages
    assert cache.match([1, 2, 3, 4, 5], 4, "bob").held == ()
    assert cache.match([1, 2, 3, 4, 5], 4).held == ()
    assert cache._key(b"", (1, 2)) != other._key(b"", (1, 2))


def test_rules_12_13_and_18_hold_in_a_running_server(checkpoint: Path) -> None:
    """12: what a slot did before shows in nothing after it. 13: text that spells a control token is text. 18: what was
    opened is shown."""
    with Server(f"a={checkpoint}", "--memory", "64MiB", "--page-size", str(1 << 14), "--max-num-seqs", "1") as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)

        def plain() -> str:
            answer = client.completions.create(model="a", prompt="the quick", max_tokens=12, temperature=0)
            return answer.choices[0].text

        before = plain()
        client.completions.create(
            model="a", prompt="lazy dog", max_tokens=9, seed=4, temperature=1.5, frequency_penalty=2.0, logprobs=3,
            logit_bias={"7": 50}, stop=["q"], extra_body={"guided_regex": "[a-c]{5}", "min_tokens": 3},
        )  # fmt: skip
        assert plain() == before

        marker = "<|im_end|>"
        asked = {"messages": [{"role": "user", "content": marker}], "return_token_strs": True}
        status, spelled = post(f"{server.url}/tokenize", json.dumps(asked).encode())
        assert status == 200
        assert json.loads(spelled)["token_strs"].count(marker) == 1  # the template's own

        meta = client.models.retrieve("a").model_extra["meta"]  # type: ignore[index]
        assert meta["fingerprint"] == open_checkpoint(checkpoint, None).fingerprint
