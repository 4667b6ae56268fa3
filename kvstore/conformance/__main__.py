"""``python -m kvstore.conformance``: the plug-in contract for our own implementation."""

import sys

from kvstore.conformance.plugin import main
from kvstore.errors import KVStoreError

try:
    sys.exit(main(sys.argv[1:]))
except KVStoreError as error:
    sys.stderr.write(f"error: {error.message} [{error.code}]\n")
    sys.exit(2)
