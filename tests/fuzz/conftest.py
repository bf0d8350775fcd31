"""The fuzz tier uses the fake node and the served process of the cpu tier; nothing here may import torch at its top."""

from __future__ import annotations

import sys
from pathlib import Path

# Where the tier runs alone, pytest has not put the cpu tier's helpers on the path.
sys.path.append(str(Path(__file__).resolve().parents[1] / "cpu"))
