"""The control channel: messages over one TCP connection, each behind its length in four bytes.

A plain socket and not NIXL's notifications, because a connection closes when its process dies: each
end learns of a dead peer at once, and NIXL's agents have to be introduced to each other by some
other channel anyway.
"""

from __future__ import annotations

import contextlib
import socket
import struct

from trtllm_kvmap.errors import KvMapError, UnavailableError
from trtllm_kvmap.exchange.messages import MAX_MESSAGE_BYTES, MalformedMessageError, Message
from trtllm_kvmap.exchange.messages import decode as decode_message
from trtllm_kvmap.exchange.messages import encode as encode_message

_LENGTH = struct.Struct(">I")
SEND_SECONDS = 5.0


class PeerLostError(KvMapError):
    """The other end closed the connection, died, or does not take what it is sent."""


class Channel:
    """One end of a connected stream socket."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._held = bytearray()

    def send(self, message: Message) -> None:
        """Raises PeerLostError."""
        data = encode_message(message)
        try:
            self._socket.settimeout(SEND_SECONDS)
            self._socket.sendall(_LENGTH.pack(len(data)) + data)
        except OSError as error:
            raise PeerLostError(f"a message could not be sent: {error}") from error

    def receive(self, timeout: float) -> Message | None:
        """The next message, or None when none is whole after ``timeout`` seconds.

        Raises PeerLostError and MalformedMessageError.
        """
        while (message := self._next()) is None:
            try:
                self._socket.settimeout(timeout)
                data = self._socket.recv(1 << 16)
            except (TimeoutError, BlockingIOError):
                return None
            except OSError as error:
                raise PeerLostError(f"the connection broke: {error}") from error
            if not data:
                middle = " in the middle of a message" if self._held else ""
                raise PeerLostError(f"the connection was closed{middle}")
            self._held += data
        return message

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.close()

    def _next(self) -> Message | None:
        if len(self._held) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._held)
        if not 0 < length <= MAX_MESSAGE_BYTES:
            raise MalformedMessageError(
                f"A message of {length} bytes was announced; at most {MAX_MESSAGE_BYTES} are taken."
            )
        end = _LENGTH.size + length
        if len(self._held) < end:
            return None
        data = bytes(self._held[_LENGTH.size : end])
        del self._held[:end]
        return decode_message(data)


class Listener:
    """Where a target waits for offers; ``address`` is (host, port). Close it when done.

    Whoever reaches the port can offer, so listen on an interface of the cluster alone.
    """

    def __init__(self, host: str = "127.0.0.1", port: int = 0) -> None:
        self._socket = socket.create_server((host, port))
        self.address: tuple[str, int] = self._socket.getsockname()[:2]

    def accept(self, timeout: float) -> Channel | None:
        """The next connection, or None after ``timeout`` seconds."""
        self._socket.settimeout(timeout)
        try:
            connected, _ = self._socket.accept()
        except (TimeoutError, BlockingIOError):
            return None
        return Channel(_without_delay(connected))

    def close(self) -> None:
        self._socket.close()


def connect(address: tuple[str, int], timeout: float) -> Channel:
    """To a Listener. Raises UnavailableError when nobody listens there."""
    try:
        connected = socket.create_connection(address, timeout)
    except OSError as error:
        raise UnavailableError(
            f"No target listens at {address[0]}:{address[1]} ({error}); start its worker, or give "
            f"its address."
        ) from error
    return Channel(_without_delay(connected))


def _without_delay(connected: socket.socket) -> socket.socket:
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connected
