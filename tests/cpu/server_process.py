"""A real `janus serve` process on an ephemeral port over a tiny checkpoint, for tests that talk HTTP to it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import TracebackType

from checkpoints import hf_folder
from prometheus_client.parser import text_string_to_metric_families
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

REPO = Path(__file__).parents[2]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tiny_model(folder: Path, seed: int = 0, **overrides: object) -> Path:
    """A random Llama of 3 layers with a byte-level tokenizer of 300 entries and a ChatML template."""
    shape = {
        "vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512,
        "initializer_range": 0.3, "bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 0,
    }  # fmt: skip
    hf_folder(folder, "LlamaForCausalLM", seed=seed, **{**shape, **overrides})
    return tiny_tokenizer(folder)


def tiny_tokenizer(folder: Path) -> Path:
    """A byte-level tokenizer of 300 entries, and a ChatML template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=special, show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    tokenizer.train_from_iterator(["the quick brown fox jumps over the lazy dog " * 20], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>", "bos_token": "<|endoftext|>"}')
    return folder


class Server:
    """`with Server("a=PATH", "--memory", "64MiB") as server:`; `log` is its stderr so far."""

    def __init__(self, *arguments: str, wait: bool = True) -> None:
        self._arguments = arguments
        self._wait = wait
        self.url = ""

    def __enter__(self) -> Server:
        environment = {**os.environ, "PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, *_flags(), "-m", "janus_server", "serve", *self._arguments, "--port", "0"]
        self.process = subprocess.Popen(
            command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, env=environment, cwd=REPO
        )
        self.log = ""
        if self._wait:
            self.read_until(r"ready on (https?://\S+)")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(30)
        if self.process.stderr is not None:
            self.process.stderr.close()

    def read_until(self, pattern: str) -> None:
        """Read the log up to a line that matches; the first group of the ready line is the address."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log += line
            if found := re.search(pattern, line):
                if found.groups():
                    self.url = found[1]
                return
        raise AssertionError(f"the server ended with {self.process.wait()} before {pattern!r}:\n{self.log}")

    def stop(self, number: int = signal.SIGINT) -> int:
        """Send a signal and wait for the exit code."""
        self.process.send_signal(number)
        code = self.process.wait(60)
        if self.process.stderr is not None:
            self.log += self.process.stderr.read()
        return code

    def metrics(self) -> dict[str, float]:
        """Every sample of /metrics by name and labels: `name{key=value,…}` with labels in order."""
        found = {}
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=20) as reply:
            for family in text_string_to_metric_families(reply.read().decode()):
                for sample in family.samples:
                    labels = ",".join(f"{k}={v}" for k, v in sorted(sample.labels.items()))
                    found[f"{sample.name}{{{labels}}}"] = sample.value
        return found

    def until(self, check: object, limit_s: float = 30.0) -> dict[str, float]:
        """Poll /metrics until `check(metrics)` holds."""
        end = time.monotonic() + limit_s
        while time.monotonic() < end:
            metrics = self.metrics()
            if check(metrics):  # type: ignore[operator]
                return metrics
            time.sleep(0.05)
        shown = {k: v for k, v in metrics.items() if "num_requests" in k or "pages" in k or "sampled" in k}
        raise AssertionError(f"it never held; the last metrics: {shown}")


def _flags() -> list[str]:
    """The server runs with -O where the tests do."""
    return ["-O"] * sys.flags.optimize


def post(url: str, body: bytes) -> tuple[int, bytes]:
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as reply:
            return reply.status, reply.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()
