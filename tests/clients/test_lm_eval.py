"""lm-eval scores the served model over HTTP, and finds what it finds with transformers on the same folder in float32.

Its `local-completions` model reads `echo` with `logprobs`; its answers are compared request by request with those of
its own `hf` model: log probabilities to 1e-3, "is greedy" and generated texts exactly.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lm_eval
import pytest
from live_server import LiveServer, serving
from lm_eval.tasks import TaskManager

pytestmark = pytest.mark.timeout(240)

CHOICES = Path(__file__).with_name("choices.jsonl")
NEAR = 1e-3
# The API model keeps one token of its length for the answer, and rolls windows of one less.
API_LENGTH, HF_LENGTH = 402, 400
LONG_TEXT = " ".join(f"Line {i}: the quick brown fox jumps over {i * 7 % 11} lazy dogs." for i in range(40))

WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "lazy", "dog", "Zebra", "42", "größer", "def f():", "(", "~")

# What one task's requests came to, in order: (log probability, is greedy) of each choice, the text, or the sum.
Answers = dict[str, list[Any]]


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """One model alone: lm-eval's remote tokenizer cannot say which one it means."""
    with serving(tmp_path_factory.mktemp("server"), f"tiny={model}", "--memory", "256MiB") as running:
        yield running


@pytest.fixture(scope="module")
def tasks(server: LiveServer, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Three small tasks, one of each kind of request. The choices are those of the file and some that are greedy."""
    folder = tmp_path_factory.mktemp("tasks")
    choices = folder / "choices.jsonl"
    choices.write_text(CHOICES.read_text(encoding="utf-8") + "".join(_greedy_items(server)), encoding="utf-8")
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"text": f"{word} and then"}) + "\n" for word in WORDS))
    texts = folder / "texts.jsonl"
    texts.write_text("".join(json.dumps({"text": text}) + "\n" for text in ("a short text", "é", LONG_TEXT)))
    base = {"dataset_path": "json", "test_split": "test", "num_fewshot": 0}
    return [
        {
            **base, "task": "janus_choice", "dataset_kwargs": {"data_files": {"test": str(choices)}},
            "output_type": "multiple_choice", "doc_to_text": "{{question}}", "doc_to_target": "{{answer}}",
            "doc_to_choice": "{{choices}}", "target_delimiter": "",
            "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
        },
        {
            **base, "task": "janus_generate", "dataset_kwargs": {"data_files": {"test": str(prompts)}},
            "output_type": "generate_until", "doc_to_text": "{{text}}", "doc_to_target": "{{text}}",
            "generation_kwargs": {"until": ["e", "\n\n"], "max_gen_toks": 12, "do_sample": False, "temperature": 0},
            "metric_list": [{"metric": "bypass", "aggregation": "bypass", "higher_is_better": True}],
        },
        {
            **base, "task": "janus_rolling", "dataset_kwargs": {"data_files": {"test": str(texts)}},
            "output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}",
            "metric_list": [
                {"metric": "word_perplexity", "aggregation": "weighted_perplexity", "higher_is_better": False}
            ],
        },
    ]  # fmt: skip


@pytest.fixture(scope="module")
def reference(model: Path, tasks: list[dict[str, Any]]) -> Answers:
    """What lm-eval's own model makes of the folder."""
    arguments = {"pretrained": str(model), "dtype": "float32", "max_length": HF_LENGTH, "device": "cpu"}
    return _answers("hf", arguments, tasks)


def _greedy_items(server: LiveServer) -> Iterator[str]:
    """Items whose first choice is what the model itself would say, where that is plain text."""
    for word in WORDS:
        status, raw = server.post(
            "/v1/completions", {"model": "tiny", "prompt": word, "max_tokens": 1, "temperature": 0}
        )
        assert status == 200
        text = json.loads(raw)["choices"][0]["text"]
        if text.isascii() and text.isprintable() and text:
            yield json.dumps({"question": word, "choices": [text, text + "~", "?"], "answer": 0}) + "\n"


def _answers(model: str, arguments: dict[str, Any], tasks: list[dict[str, Any]], **options: Any) -> Answers:
    found = lm_eval.simple_evaluate(
        model=model, model_args=arguments, tasks=tasks, task_manager=TaskManager(include_defaults=False),
        bootstrap_iters=0, log_samples=True, **options,
    )  # fmt: skip
    assert found is not None
    samples = {name: sorted(all_of, key=lambda one: one["doc_id"]) for name, all_of in found["samples"].items()}
    return {name: [one["resps"] for one in all_of] for name, all_of in samples.items()}


def _served(server: LiveServer, model: Path, **more: Any) -> dict[str, Any]:
    return {
        "model": "tiny", "base_url": f"{server.v1}/completions", "tokenizer_backend": "huggingface",
        "tokenizer": str(model), "max_length": API_LENGTH, "max_retries": 1, "timeout": 60, **more,
    }  # fmt: skip


def _assert_alike(served: Answers, reference: Answers) -> None:
    assert served.keys() == reference.keys()
    greedy = 0
    for mine, theirs in zip(served["janus_choice"], reference["janus_choice"], strict=True):
        for ((logprob, is_greedy),), ((expected, expected_greedy),) in zip(mine, theirs, strict=True):
            assert logprob == pytest.approx(expected, abs=NEAR)
            assert is_greedy == expected_greedy
            greedy += is_greedy
    assert greedy >= 3, "too few greedy choices to tell anything"
    assert served["janus_generate"] == reference["janus_generate"]
    for mine, theirs in zip(served["janus_rolling"], reference["janus_rolling"], strict=True):
        assert mine[0][0] == pytest.approx(theirs[0][0], rel=1e-5, abs=NEAR)


@pytest.mark.parametrize(
    "more",
    [
        {"batch_size": 1},
        {"batch_size": 8},
        {"num_concurrent": 4},
        {"tokenized_requests": False, "batch_size": 4},
        # Named, since in this mode lm-eval takes the id 0 for none.
        {"tokenizer_backend": "remote", "tokenizer": None, "custom_prefix_token_id": 0},
    ],
    ids=["one at a time", "batches of ids", "four at once", "batches of texts", "remote tokenizer"],
)
def test_scores_are_those_of_transformers(
    server: LiveServer, model: Path, tasks: list[dict[str, Any]], reference: Answers, more: dict[str, Any]
) -> None:
    _assert_alike(_answers("local-completions", _served(server, model, **more), tasks), reference)


def test_chat_completions_generate_what_transformers_generates(
    server: LiveServer, model: Path, tasks: list[dict[str, Any]]
) -> None:
    generate = [task for task in tasks if task["output_type"] == "generate_until"]
    arguments = {"pretrained": str(model), "dtype": "float32", "max_length": HF_LENGTH, "device": "cpu"}
    reference = _answers("hf", arguments, generate, apply_chat_template=True)
    chat = {"model": "tiny", "base_url": f"{server.v1}/chat/completions", "max_retries": 1, "timeout": 60}
    served = _answers("local-chat-completions", chat, generate, apply_chat_template=True)
    assert served == reference
    assert len({str(one) for one in served["janus_generate"]}) > len(WORDS) // 2
