"""Lets the tests of this folder share plain modules: `wire`, `twins`, `guarded` and their like."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
