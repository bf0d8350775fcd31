"""Writes a checkpoint of tests/clients: `python make_model.py FOLDER '{"max_position_embeddings": 4096}'`, or with
`--script '{"\\n": ["first piece", "second piece"]}'` one that always says the same.

`live_server` runs it under the server's interpreter. The random model is that of the server's own tests. In the
scripted one each token leads to one other, whatever came before: a piece is a token of its own, and the prompt's last
character chooses the script. So a test knows what the model says, through all of the real path.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from pathlib import Path

REPO = Path(__file__).parents[2]
TOKENIZER_CONFIG = {
    # Without a class transformers would build the tokenizer of the model's family instead of reading ours.
    "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|endoftext|>", "eos_token": "<|im_end|>",
    "pad_token": "<|endoftext|>", "clean_up_tokenization_spaces": False,
}  # fmt: skip
# A Hermes-like template; the answer to a tool's result begins after a tab instead of a line end.
TEMPLATE = """\
{%- if tools %}<|im_start|>system
Call a function with <tool_call>{"name": "...", "arguments": {}}</tool_call>:
{%- for tool in tools %} {{ tool | tojson }}{% endfor %}<|im_end|>
{% endif %}
{%- for m in messages %}<|im_start|>{{ m['role'] }}
{{ m['content'] or '' }}
{%- for call in m['tool_calls'] or [] %}<tool_call>{{ call['function'] | tojson }}</tool_call>{% endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{%- if messages[-1]['role'] == 'tool' %}{{ '\\t' }}{% else %}{{ '\\n' }}{% endif %}{% endif %}"""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("overrides", type=json.loads, nargs="?", default={})
    parser.add_argument("--script", type=json.loads)
    chosen = parser.parse_args()
    sys.path[:0] = [str(REPO), str(REPO / "tests" / "cpu")]
    from server_process import tiny_model

    if chosen.script is None:
        tiny_model(chosen.folder, **chosen.overrides)
    else:
        # As wide as the vocabulary: each token has a direction of its own.
        wide = {"vocab_size": 320, "hidden_size": 320, "num_hidden_layers": 1, "max_position_embeddings": 4096}
        tiny_model(chosen.folder, **{**wide, **chosen.overrides})
        follow(chosen.folder, chosen.script)
        (chosen.folder / "chat_template.jinja").write_text(TEMPLATE)
    (chosen.folder / "tokenizer_config.json").write_text(json.dumps(TOKENIZER_CONFIG))


def follow(folder: Path, scripts: dict[str, list[str]]) -> None:
    """Make the model in `folder` follow the scripts: from a script's key, a character, to its pieces to <|im_end|>."""
    import torch
    from tokenizers import AddedToken, Tokenizer
    from transformers import LlamaForCausalLM

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    pieces = [AddedToken(piece, normalized=False) for script in scripts.values() for piece in script]
    assert tokenizer.add_tokens(pieces) == len(pieces), "a piece may occur only once"
    tokenizer.save(str(folder / "tokenizer.json"))
    model = LlamaForCausalLM.from_pretrained(folder)
    end = tokenizer.token_to_id("<|im_end|>")
    after = dict.fromkeys(range(model.config.vocab_size), end)
    for start, script in scripts.items():
        chain = [*tokenizer.encode(start).ids, *map(tokenizer.token_to_id, script), end]
        after.update(itertools.pairwise(chain))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.fill_(1.0 if "norm" in name else 0.0)
        model.model.embed_tokens.weight.copy_(torch.eye(model.config.vocab_size))
        for token, following in after.items():
            model.lm_head.weight[following, token] = 2.0
    model.save_pretrained(folder)


if __name__ == "__main__":
    main()
