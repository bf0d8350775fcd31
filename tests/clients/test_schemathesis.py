"""schemathesis reads /openapi.json and calls every route of it, with bodies that fit the schemas and ones that do not.

Whatever it sends: no 5xx, no hang, and statuses, content types, headers and shapes as the document tells of them.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from live_server import LiveServer, idle

HOOKS = Path(__file__).with_name("schema_hooks.py")
CALL_LIMIT_S, RUN_LIMIT_S = 20, 60
EXAMPLES = 15
NOT_PROMISED = (
    # A body that fits its schema may be refused for what no schema says: an unknown model, ids outside the vocabulary.
    "positive_data_acceptance",
    # aiohttp's Allow gathers every route that a path fits, and /v1/responses/{id} fits /v1/responses/input_tokens too.
    "allow_header_conformance",
)


@pytest.mark.timeout(RUN_LIMIT_S + 60)
def test_every_route_keeps_what_the_document_promises(server: LiveServer, tmp_path: Path) -> None:
    server.until(idle)
    command = [
        sys.executable, "-m", "schemathesis.cli", "run", f"{server.url}/openapi.json", "--no-color",
        "--phases", "examples,coverage,fuzzing", "--max-examples", str(EXAMPLES), "--seed", "1",
        "--request-timeout", str(CALL_LIMIT_S), "--max-time", str(RUN_LIMIT_S), "--max-failures", "5",
        "--exclude-checks", ",".join(NOT_PROMISED), "--warnings", "off",
    ]  # fmt: skip
    environment = {
        **os.environ, "SCHEMATHESIS_HOOKS": "schema_hooks", "PYTHONPATH": str(HOOKS.parent), "JANUS_TEST_MODEL": "tiny",
    }  # fmt: skip
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=RUN_LIMIT_S + 40, cwd=tmp_path, env=environment, check=False
    )
    assert done.returncode == 0, done.stdout[-16000:] + done.stderr[-2000:]
    tested = re.search(r"Tested: (\d+)", done.stdout)
    assert tested is not None and int(tested[1]) > 10
    server.until(idle)
    assert server.get("/health")[0] == 200
    assert "Traceback" not in server.log
    # Bodies were good enough to be answered, not only refused.
    assert any("status=200" in name and "/v1/completions" in name for name in server.metrics() if "janus_http" in name)
