"""`python -m duramen`."""

from __future__ import annotations

from duramen.cli import main

if __name__ == "__main__":
    main()
