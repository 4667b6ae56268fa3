"""``python -m kvstore.cli`` is the ``kvstore`` program."""

from __future__ import annotations

from kvstore.cli.main import main

main()
