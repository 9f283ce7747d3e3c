"""Lets the tests of this folder share plain modules: `wire`, `twins`, `guarded`, `columnar`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
