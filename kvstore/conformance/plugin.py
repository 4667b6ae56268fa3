"""Our own implementation behind the plug-in contract of ``fixtures/README.md``.

``kvstore conformance describe|canon|read|write|prefix|serve``, and the same as
``python -m kvstore.conformance``. One process for each case, or one for all with ``serve``.
"""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Final

from kvstore import __version__
from kvstore.conformance.canon import FORMS, canon
from kvstore.conformance.chain import chain_document
from kvstore.conformance.context import Context, parse_context
from kvstore.conformance.files import load_bundle, write_bundle
from kvstore.conformance.inputs import parse_input
from kvstore.conformance.reader import read_bundle
from kvstore.conformance.recipe import make_entry
from kvstore.conformance.result import rejected
from kvstore.errors import KVStoreError, fail

__all__ = ["COMMANDS", "PROTOCOL", "answer", "main"]

PROTOCOL: Final = 1
COMMANDS: Final = ("describe", "canon", "read", "write", "prefix", "serve")


def main(args: list[str]) -> int:
    """Run one command with the process's standard streams; gives the exit code: 0 accepted, 1 refused.

    Raises:
        UsageError: USAGE, for arguments that are none of the contract's.
    """
    match args:
        case ["serve"]:
            return _serve(sys.stdin.buffer, sys.stdout.buffer)
        case ["describe"]:
            request: dict[str, Any] = {"command": "describe"}
        case ["canon", "--as", form]:
            request = {"command": "canon", "as": form, "data": _text(sys.stdin.buffer.read())}
        case ["read", "--context", context, bundle]:
            request = {"command": "read", "context": context, "bundle": bundle}
        case ["write", "--out", folder]:
            request = {"command": "write", "recipe": sys.stdin.buffer.read(), "out": folder}
        case ["prefix"]:
            request = {"command": "prefix", "input": sys.stdin.buffer.read()}
        case _:
            raise fail("USAGE", "conformance " + " ".join(args), expected="a command of fixtures/README.md")
    reply = answer(request)
    if "error" in reply:
        raise fail("USAGE", reply["error"])
    if reply.get("verdict") == "accept" and "data" in reply:
        sys.stdout.buffer.write(base64.b64decode(reply["data"]))
    else:
        sys.stdout.write(json.dumps(reply) + "\n")
    return 1 if reply.get("verdict") == "reject" else 0


def answer(request: Any) -> dict[str, Any]:
    """The reply to one request of ``serve``; one without a verdict to what is no request."""
    command = request.get("command") if isinstance(request, dict) else None
    if not isinstance(command, str) or command not in _ANSWERS:
        return {"error": "no request of fixtures/README.md"}
    try:
        return _ANSWERS[command](request)
    except KVStoreError as error:
        return {"error": error.message} if error.phase == "usage" else rejected(error).to_json()
    except KeyError as error:
        return {"error": f"a request lacks {error}"}


def _describe(_: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "features": ["layout", "payload", "receipt", "tar"], "language": "Python", "name": "kvstore",
        "protocol": PROTOCOL, "roles": ["canon", "prefix", "reader", "writer"], "serve": True, "spec": ["1.0"],
        "version": __version__,
    }  # fmt: skip


def _canon(request: Mapping[str, Any]) -> dict[str, Any]:
    if request["as"] not in FORMS:
        raise fail("USAGE", "--as", expected="one of " + ", ".join(FORMS), found=request["as"])
    return {"data": _text(canon(request["as"], base64.b64decode(request["data"]))), "verdict": "accept"}


def _read(request: Mapping[str, Any]) -> dict[str, Any]:
    context = _context(request["context"])
    try:
        bundle = load_bundle(Path(request["bundle"]))
    except KVStoreError as error:
        return rejected(error).to_json()
    return read_bundle(bundle, context).to_json()


def _context(name: str) -> Context:
    """The receiving side. What is wrong in it is no verdict on the bundle."""
    try:
        return parse_context(parse_input(Path(name).read_bytes()))
    except KVStoreError as error:
        raise fail("USAGE", f"the context {name}: {error.message}") from None


def _write(request: Mapping[str, Any]) -> dict[str, Any]:
    made = make_entry(_input(request["recipe"]))
    write_bundle(Path(request["out"]), made)
    entry = made.manifest.entry_id
    return {"entry": entry, "verdict": "accept"}


def _prefix(request: Mapping[str, Any]) -> dict[str, Any]:
    return {**chain_document(_input(request["input"])), "verdict": "accept"}


_ANSWERS: Final[Mapping[str, Callable[[Mapping[str, Any]], dict[str, Any]]]] = {
    "canon": _canon, "describe": _describe, "prefix": _prefix, "read": _read, "write": _write,
}  # fmt: skip


def _input(value: Any) -> Any:
    """An input as it stood in a request, or the bytes of one."""
    return parse_input(value) if isinstance(value, bytes) else value


def _serve(requests: BinaryIO, replies: BinaryIO) -> int:
    """Answer requests, a line each, until the input ends."""
    for line in requests:
        replies.write(json.dumps(_served(line)).encode() + b"\n")
        replies.flush()
    return 0


def _served(line: bytes) -> dict[str, Any]:
    try:
        return answer(parse_input(line))
    except KVStoreError as error:
        return {"error": error.message}


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()
