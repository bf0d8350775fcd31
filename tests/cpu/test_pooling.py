"""Where a checkpoint's own way of pooling is found, and that nothing else about it can do harm."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import MappingProxyType

import pytest
from checkpoints import hf_folder

from janus_server.model.checkpoint import open_checkpoint
from janus_server.model.pooling import pooling_of
from janus_server.types import Pooling

LAST = json.dumps({"word_embedding_dimension": 64, "pooling_mode_lasttoken": True}).encode()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model")
    hf_folder(made)
    return made


def said(folder: Path, raw: bytes) -> Pooling:
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_bytes(raw)
    return pooling_of(open_checkpoint(folder))


def test_without_a_word_it_is_the_mean(folder: Path) -> None:
    assert not (folder / "1_Pooling").exists()
    assert pooling_of(open_checkpoint(folder)) is Pooling.MEAN


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (LAST, Pooling.LAST),
        (b'{"pooling_mode_lasttoken": false, "pooling_mode_mean_tokens": true}', Pooling.MEAN),
        (b'{"pooling_mode_lasttoken": 1}', Pooling.MEAN),
        (b"[]", Pooling.MEAN),
        (b"not json", Pooling.MEAN),
        (b'{"a": "' + b"x" * (64 << 10) + b'", "pooling_mode_lasttoken": true}', Pooling.MEAN),
    ],
)
def test_what_the_file_says(folder: Path, raw: bytes, expected: Pooling) -> None:
    assert said(folder, raw) is expected


def test_a_link_out_of_the_folder_is_not_followed(folder: Path, tmp_path: Path) -> None:
    said(folder, LAST)
    (tmp_path / "config.json").write_bytes(LAST)
    (folder / "1_Pooling" / "config.json").unlink()
    (folder / "1_Pooling" / "config.json").symlink_to(tmp_path / "config.json")
    assert pooling_of(open_checkpoint(folder)) is Pooling.MEAN


@pytest.mark.parametrize(("kind", "expected"), [(3, Pooling.LAST), (1, Pooling.MEAN), (None, Pooling.MEAN)])
def test_gguf_has_a_key_for_it(folder: Path, kind: int | None, expected: Pooling) -> None:
    metadata = MappingProxyType({"general.architecture": "qwen3", "qwen3.pooling_type": kind})
    checkpoint = dataclasses.replace(open_checkpoint(folder), is_gguf=True, metadata=metadata)
    assert pooling_of(checkpoint) is expected
