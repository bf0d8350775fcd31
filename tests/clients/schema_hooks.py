"""What schemathesis does to each call before it is sent; `test_schemathesis` names this file in SCHEMATHESIS_HOOKS.

Some calls are given the name of the model that is served, so that they get past the look-up, and answers are kept
short, so that they end. What makes a body wrong on purpose is left as it is.
"""

from __future__ import annotations

import os
from typing import Any

import schemathesis

MOST_TOKENS = 8
LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
# Where an answer may be as long as the context when the body names no limit.
UNLIMITED = {"/v1/chat/completions": "max_tokens", "/v1/responses": "max_output_tokens"}


@schemathesis.hook
def before_call(context: Any, case: Any, kwargs: dict[str, Any]) -> None:
    body = case.body
    if not isinstance(body, dict):
        return
    for name in LIMITS:
        value = body.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value > MOST_TOKENS:
            body[name] = MOST_TOKENS
    unlimited = UNLIMITED.get(case.path)
    if unlimited is not None and body.get(unlimited) is None:
        body[unlimited] = MOST_TOKENS
    if isinstance(body.get("model"), str) and len(body["model"]) in (1, 2, 4, 8):
        body["model"] = os.environ["JANUS_TEST_MODEL"]
