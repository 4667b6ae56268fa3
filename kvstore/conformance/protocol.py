"""Asking a program: the plug-in contract, one process for each case or one for all.

A program is asked the same requests either way (``fixtures/README.md``). What is not a
whole and timely answer is a :class:`NoAnswerError`, never a refusal: a reader that crashes has not
refused anything.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import queue
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

__all__ = ["OWN", "Description", "Implementation", "NoAnswerError", "known_failures", "split_command"]

OWN: Final = (sys.executable, "-m", "kvstore.conformance")
"""The command of our own implementation."""
_SHOWN: Final = 300


class NoAnswerError(Exception):
    """A program crashed, took too long, or said something that is no answer."""


def split_command(text: str) -> tuple[str, ...]:
    """A command line as a shell would split it; ``self`` is our own implementation."""
    return OWN if text == "self" else tuple(shlex.split(text))


@dataclass(frozen=True, slots=True)
class Description:
    """What a program says of itself."""

    name: str
    version: str
    language: str
    roles: frozenset[str]
    features: frozenset[str]
    serve: bool


class Implementation:
    """A program behind the contract. A context manager: it may keep a process.

    Args:
        command: Program and arguments; the contract's own are appended.
        timeout: Seconds that it may take for an answer.
        serve: Whether to use ``serve`` where the program offers it.
    """

    def __init__(self, command: Sequence[str], *, timeout: float = 10.0, serve: bool = True) -> None:
        self.command = tuple(command)
        self._timeout = timeout
        self._server: _Server | None = None
        self.description = _description(self._once({"command": "describe"}))
        self._serve = serve and self.description.serve

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """End the process, if there is one."""
        if self._server is not None:
            self._server.close()
            self._server = None

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The reply to a request.

        Raises:
            NoAnswerError: where there is none.
        """
        if not self._serve:
            return self._once(request)
        if self._server is None:
            self._server = _Server(self.command)
        try:
            return self._server.ask(request, self._timeout)
        except NoAnswerError:
            # Whatever state it is in, the next case gets a fresh process.
            self.close()
            raise

    def _once(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """One process for one request."""
        args, data = _as_arguments(request)
        process = _start([*self.command, *args], stderr=subprocess.PIPE)
        try:
            out, err = process.communicate(data, timeout=self._timeout)
        except subprocess.TimeoutExpired:
            _kill(process)
            process.communicate()
            raise NoAnswerError(f"no answer within {self._timeout:g} seconds") from None
        if process.returncode not in (0, 1):
            raise NoAnswerError(f"exit code {process.returncode}: {_tail(err)}")
        return _reply(request, out, accepted=process.returncode == 0)


class _Server:
    """A process that answers a request a line."""

    def __init__(self, command: Sequence[str]) -> None:
        # Its messages go where ours go: a pipe that nobody reads would fill up and stop it.
        self._process = _start([*command, "serve"], stderr=None)
        self._lines: queue.Queue[bytes] = queue.Queue()
        threading.Thread(target=self._listen, daemon=True).start()

    def ask(self, request: Mapping[str, Any], timeout: float) -> dict[str, Any]:
        assert self._process.stdin is not None  # noqa: S101 - opened as a pipe
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
            line = self._lines.get(timeout=timeout)
        except OSError as error:
            raise NoAnswerError(f"the process has ended: {error}") from None
        except queue.Empty:
            raise NoAnswerError(f"no answer within {timeout:g} seconds") from None
        if not line:
            raise NoAnswerError(f"the process has ended its output, {self._ending()}")
        return _object(line)

    def _ending(self) -> str:
        """How it ended, if it did: it may have closed its output and live on."""
        try:
            return f"exit code {self._process.wait(timeout=1)}"
        except subprocess.TimeoutExpired:
            return "but not itself"

    def close(self) -> None:
        _kill(self._process)
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        self._process.wait()

    def _listen(self) -> None:
        assert self._process.stdout is not None  # noqa: S101 - opened as a pipe
        with contextlib.suppress(ValueError):
            for line in self._process.stdout:
                self._lines.put(line)
        self._lines.put(b"")


def _start(command: Sequence[str], *, stderr: int | None) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(  # noqa: S603 - the user named the program that is to be tested
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, start_new_session=True
        )
    except OSError as error:
        raise NoAnswerError(f"{command[0]} cannot be started: {error.strerror}") from None


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End a process and all that it started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def _as_arguments(request: Mapping[str, Any]) -> tuple[list[str], bytes]:
    """A request as arguments and standard input."""
    match request["command"]:
        case "canon":
            return ["canon", "--as", request["as"]], base64.b64decode(request["data"])
        case "read":
            return ["read", "--context", request["context"], request["bundle"]], b""
        case "write":
            return ["write", "--out", request["out"]], json.dumps(request["recipe"]).encode()
        case "prefix":
            return ["prefix"], json.dumps(request["input"]).encode()
    return ["describe"], b""


def _reply(request: Mapping[str, Any], out: bytes, *, accepted: bool) -> dict[str, Any]:
    """What a process wrote as the reply that ``serve`` would give, its exit code taken into account."""
    command = request["command"]
    if accepted and command == "canon":
        return {"data": base64.b64encode(out).decode(), "verdict": "accept"}
    value = _object(out)
    if command == "describe":
        return value
    if command == "prefix" and accepted:
        value.setdefault("verdict", "accept")
    if value.get("verdict") != ("accept" if accepted else "reject"):
        raise NoAnswerError(f"exit code {0 if accepted else 1} with verdict {value.get('verdict')!r}")
    return value


def _object(data: bytes) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except ValueError:
        raise NoAnswerError(f"no JSON: {_tail(data)}") from None
    if not isinstance(value, dict):
        raise NoAnswerError(f"no object: {_tail(data)}")
    return value


def _description(value: Mapping[str, Any]) -> Description:
    if value.get("protocol") != 1:
        raise NoAnswerError(f"protocol {value.get('protocol')!r} is not known; this runner speaks 1")
    try:
        return Description(
            name=str(value["name"]).encode("ascii", "replace").decode(), version=str(value["version"]),
            language=str(value["language"]),
            roles=frozenset(value["roles"]), features=frozenset(value["features"]), serve=bool(value.get("serve")),
        )  # fmt: skip
    except (KeyError, TypeError) as error:
        raise NoAnswerError(f"the description lacks a field or has a wrong one: {error}") from None


def _tail(data: bytes) -> str:
    text = data.decode(errors="replace").strip()
    return text if len(text) <= _SHOWN else "..." + text[-_SHOWN:]


def known_failures(command: Sequence[str]) -> Path:
    """The file of known failures beside a program."""
    return Path(f"{command[0]}.xfails")
