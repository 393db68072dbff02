"""Short messages between machines: limited in length and time, and proven by the run's secret.

Nothing of PyTorch, so that machines with different versions, or between which Gloo does not work, can still talk. Both
ends say which protocol they speak and give a random number. Every message after that carries a keyed hash (HMAC-SHA256)
of itself, its place in the conversation and both numbers.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import socket
import struct
import time
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as pydantic_dataclass

from lowbit.terminal import printable

PROTOCOL = 1
"""Number of the protocol. Messages may gain keys without a new one: unknown keys are ignored."""
_NAME = "lowbit doctor"
_MOST_BYTES = 1 << 20
_HEAD = struct.Struct(">I16s")
_HELLO_SECONDS = 5.0
_LONGEST = 500  # characters of a text of a peer
_Class = TypeVar("_Class")
_RULES = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)


class StrangerError(ConnectionError):
    """The other end is no `lowbit doctor`, or sent what cannot be read."""


class SecretError(ConnectionError):
    """The other end does not know the secret of this one."""


class Channel:
    """Messages over a connection. Every wait has a limit.

    Args:
        connection: is closed if the other end is no `lowbit doctor`.
        accepted: which end this is. secret: of the run; empty without one.

    Raises:
        StrangerError: what answers is something else.
        OSError: no answer in time, or the connection is gone.
    """

    def __init__(self, connection: socket.socket, *, accepted: bool, secret: bytes) -> None:
        self.connection = connection
        self._key, self._sent, self._taken = b"", 0, 0
        self._ends = (b"accepted", b"connected") if accepted else (b"connected", b"accepted")
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        own = secrets.token_hex(16)
        try:
            self.send({_NAME: PROTOCOL, "number": own})
            hello = self.receive(_HELLO_SECONDS)
            protocol, number = hello.get(_NAME), hello.get("number")
            if not isinstance(protocol, int) or not isinstance(number, str):
                raise StrangerError("what answers is no `lowbit doctor`")
            if protocol != PROTOCOL:
                raise StrangerError(
                    f"it speaks protocol {protocol} of `lowbit doctor`, this machine {PROTOCOL}; "
                    "allowed: the same version of lowbit on all machines"
                )
        except TimeoutError:
            connection.close()
            raise StrangerError("it takes connections and says nothing") from None
        except BaseException:
            connection.close()
            raise
        numbers = (number, own) if accepted else (own, number)
        self._key = hmac.new(secret, "|".join(numbers).encode(), hashlib.sha256).digest()

    def send(self, message: Mapping[str, Any], limit: float = _HELLO_SECONDS) -> None:
        """Send a message."""
        body = json.dumps(message).encode()
        self.connection.settimeout(limit)
        self.connection.sendall(_HEAD.pack(len(body), self._proof(self._ends[0], self._sent, body)) + body)
        self._sent += 1

    def receive(self, limit: float) -> dict[str, Any]:
        """The next message, whole, within `limit` seconds.

        Raises:
            StrangerError: it cannot be read. SecretError: the first one does not fit the secret.
            OSError: it did not come in time, or the connection is gone.
        """
        deadline = time.monotonic() + limit
        length, proof = _HEAD.unpack(self._exactly(_HEAD.size, deadline))
        if length > _MOST_BYTES:
            raise StrangerError("it sent bytes that are no message of `lowbit doctor`")
        body = self._exactly(length, deadline)
        if not hmac.compare_digest(proof, self._proof(self._ends[1], self._taken, body)):
            if self._taken == 1:
                raise SecretError("it does not know the secret of this run")
            raise StrangerError("it sent a message that somebody has changed")
        self._taken += 1
        try:
            message = _clean(json.loads(body))
        except (ValueError, RecursionError):
            message = None
        if not isinstance(message, dict):
            raise StrangerError("it sent bytes that are no message of `lowbit doctor`")
        return message

    def close(self) -> None:
        """Close the connection."""
        self.connection.close()

    def _proof(self, end: bytes, number: int, body: bytes) -> bytes:
        return hmac.new(self._key, b"%s %d %s" % (end, number, body), hashlib.sha256).digest()[:16]

    def _exactly(self, count: int, deadline: float) -> bytes:
        parts: list[bytes] = []
        while count:
            self.connection.settimeout(max(0.001, deadline - time.monotonic()))
            part = self.connection.recv(min(count, 1 << 16))
            if not part:
                raise ConnectionResetError("the other end closed the connection")
            parts.append(part)
            count -= len(part)
        return b"".join(parts)


@typing.dataclass_transform(frozen_default=True, kw_only_default=True)
def message(cls: type[_Class]) -> type[_Class]:
    """Make a class a message: frozen, keyword-only, and checked where it is read."""
    return typing.cast("type[_Class]", pydantic_dataclass(cls, frozen=True, kw_only=True, config=_RULES))


def read(cls: type[_Class], values: Any) -> _Class:
    """A message from a peer's values; unknown keys are ignored.

    Raises:
        StrangerError: other values than it can have.
    """
    try:
        return TypeAdapter(cls).validate_json(json.dumps(values))
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "a message"
        raise StrangerError(f"it sent {place} with a value that it cannot have ({first['type']})") from None


def _clean(value: Any) -> Any:
    """A peer's value with short texts in printable characters."""
    if isinstance(value, str):
        return printable(value[:_LONGEST])
    if isinstance(value, list):
        return [_clean(item) for item in value]
    if isinstance(value, dict):
        return {printable(key[:_LONGEST]): _clean(item) for key, item in value.items()}
    return value
