"""``python -m kvstore.cli`` is the ``kvstore`` program, and this is where both begin.

Ctrl-C is answered from here on, so that neither an import nor the end shows a traceback.
"""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> None:
    """Run the command line."""
    try:
        from kvstore.cli.main import cli

        cli.main(prog_name="kvstore")
    except KeyboardInterrupt:
        _stopped()


def _stopped() -> None:
    """What ``kvstore.cli.main`` would say, before it is there or when it has ended."""
    import json

    from kvstore.errors import fail

    error = fail("CANCELLED", "stopped; nothing was left behind")
    text = f"error: {error.message} [{error.code}]"
    if "--json" in sys.argv:
        text = json.dumps({"type": "error", "error": error.to_json()})
    sys.stderr.write(text + "\n")
    sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
