"""What a model's options come to in pages: floors, ceilings and pins that fit, and those that never can."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from checkpoints import hf_folder
from kernel_cases import open_table

from janus_server.catalogue import OpenedModel, open_models, scratch_pages
from janus_server.config import serve_config
from janus_server.errors import BadConfig

PAGE = 64 << 10
FLAGS = {"page_size": "64KiB", "max_num_batched_tokens": 8, "max_num_seqs": 8}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    hf_folder(folder, num_hidden_layers=4)
    return folder


def opened(checkpoint: Path, tmp_path: Path, pages: int, options: str, *names: str, **flags: Any) -> list[OpenedModel]:
    """The catalogue of models a and b, or those named, on so many pages of 64 KiB beside the one that steps take.

    options are TOML tables.
    """
    file = tmp_path / "janus.toml"
    given = options.replace("PATH", f'path = "{checkpoint}"')
    plain = [
        f'[models.{name}]\npath = "{checkpoint}"\n' for name in names or ("a", "b") if f"[models.{name}]" not in given
    ]
    file.write_text("".join(plain) + given)
    config = serve_config(file=file, flags={**FLAGS, "memory": f"{pages * 64 + 64}KiB", **flags})
    models = list(open_models(config, open_table("cpu", 1)))
    assert scratch_pages(models, PAGE) == 1
    return sorted(models, key=lambda one: one.name)


@pytest.fixture(scope="module")
def weights(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> int:
    """Pages that the weights of one model take."""
    return opened(checkpoint, tmp_path_factory.mktemp("w"), 64, "", "a")[0].weight_pages


def test_what_the_brain_is_told(checkpoint: Path, tmp_path: Path) -> None:
    options = '[models.a]\nPATH\nkv_floor = "100KiB"\nkv_ceiling = "300KiB"\nidle = 30\npin = true\npreload = false\n'
    a, b = opened(checkpoint, tmp_path, 64, options)
    assert (a.floor_pages, a.ceiling_pages) == (2, 4)  # a floor is rounded up, a ceiling down
    known = a.known()
    assert (known.floor_pages, known.idle_s, known.pinned, known.preload) == (2, 30.0, True, False)
    known = b.known()
    assert (b.floor_pages, b.ceiling_pages) == (0, None)
    assert (known.floor_pages, known.idle_s, known.pinned, known.preload) == (0, None, False, True)


def test_room_leaves_the_others_their_floors(checkpoint: Path, tmp_path: Path, weights: int) -> None:
    pages = 2 * weights + 20
    a, b = opened(checkpoint, tmp_path, pages, '[models.a]\nPATH\nkv_floor = "320KiB"\n')
    assert (a.kv_pages, b.kv_pages) == (20, 15)
    plain = opened(checkpoint, tmp_path, pages, "")
    assert [one.kv_pages for one in plain] == [20, 20]


def test_a_ceiling_bounds_the_longest_sequence(checkpoint: Path, tmp_path: Path) -> None:
    (free,) = opened(checkpoint, tmp_path, 64, "", "a")
    assert free.context_tokens == 256
    (bound,) = opened(checkpoint, tmp_path, 64, '[models.a]\nPATH\nkv_ceiling = "64KiB"\n', "a")
    assert (bound.kv_pages, bound.longest_pages) == (1, 1)
    assert bound.context_tokens == min(256, bound.kv.page_tokens)
    with pytest.raises(BadConfig, match=r"max-model-len 256 needs .* tokens fit \(kv_ceiling 64 KiB\)"):
        opened(checkpoint, tmp_path, 64, '[models.a]\nPATH\nkv_ceiling = "64KiB"\nmax_model_len = 256\n', "a")


def test_a_models_own_length_goes_before_the_servers(checkpoint: Path, tmp_path: Path) -> None:
    a, b = opened(checkpoint, tmp_path, 64, "[models.a]\nPATH\nmax_model_len = 50\n", max_model_len=100)
    assert (a.context_tokens, b.context_tokens) == (50, 100)


@pytest.mark.parametrize(
    ("more", "options", "expected"),
    [
        (10, '[models.a]\nPATH\nkv_floor = "1MiB"\n', r"\[models.a\].*kv_floor 1 MiB.*lower kv_floor to 640 KiB"),
        (10, '[models.a]\nPATH\nkv_ceiling = "60KiB"\n', r"\[models.a\].*kv_ceiling 60 KiB holds 0 pages"),
        (
            10,
            '[models.a]\nPATH\nkv_floor = "190KiB"\nkv_ceiling = "191KiB"\n',
            "holds 2 pages .* at least 3 are wanted",
        ),
        (0, "", "a: its weights take .* give more"),
        (10, "[models.a]\nPATH\npin = true\n[models.b]\nPATH\npin = true\n", r"the pinned models \(a, b\) would need"),
        (10, "[models.a]\nPATH\npin = true\n", "b beside the pinned a would need"),
    ],
)
def test_options_that_no_node_of_this_size_can_keep_are_refused(
    checkpoint: Path, tmp_path: Path, weights: int, more: int, options: str, expected: str
) -> None:
    with pytest.raises(BadConfig, match=expected):
        opened(checkpoint, tmp_path, weights + more, options)


def test_pinned_floors_that_do_not_fit_together_are_refused(checkpoint: Path, tmp_path: Path, weights: int) -> None:
    pinned = '[models.a]\nPATH\npin = true\nkv_floor = "{}"\n[models.b]\nPATH\npin = true\nkv_floor = "{}"\n'
    a, b = opened(checkpoint, tmp_path, 2 * weights + 10, pinned.format("320KiB", "320KiB"))
    assert a.kv_pages == b.kv_pages == 5
    with pytest.raises(BadConfig, match="704 KiB of kv_floor"):
        opened(checkpoint, tmp_path, 2 * weights + 10, pinned.format("320KiB", "384KiB"))
