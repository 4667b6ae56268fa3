"""``python -m kvstore.cli`` is the ``kvstore`` program, and this is where both begin.

Ctrl-C is answered from here on, so that neither an import nor the end shows a traceback. A
signal that asks the program to end is answered as Ctrl-C is: what was half written is removed.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Final

__all__ = ["main"]


_ENDING: Final = (signal.SIGTERM, signal.SIGHUP)


def main() -> None:
    """Run the command line."""
    _open_streams()
    try:
        for number in _ENDING:
            # Who started the program may have decided that it outlives its terminal.
            if signal.getsignal(number) == signal.SIG_DFL:
                signal.signal(number, signal.default_int_handler)
        from kvstore.cli.main import cli

        cli.main(prog_name="kvstore")
    except KeyboardInterrupt:
        _stopped()


def _open_streams() -> None:
    """Give a closed standard stream a descriptor, or the next file that is opened would have its number.

    Nothing can be read from the one for input and nothing be written to the one for output: using them is an error.
    """
    for fd, name, mode in ((0, "stdin", os.O_WRONLY), (1, "stdout", os.O_RDONLY), (2, "stderr", os.O_WRONLY)):
        try:
            os.fstat(fd)
        except OSError:
            # The lowest number that is free is this one.
            os.set_inheritable(os.open(os.devnull, mode), True)  # noqa: FBT003 - has no name
        if getattr(sys, name) is None:
            setattr(sys, name, open(fd, "w" if fd else "r", closefd=False))  # noqa: SIM115 - for ever


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
