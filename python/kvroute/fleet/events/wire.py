"""ZMQ sockets of KV events, read by the event loop without ever waiting in one.

A socket is drained by calls that return at once, and the loop watches its descriptor only while there is nothing to
read. Futures per message, as `zmq.asyncio` makes them, cost three times as much under load, and lose a message whose
receiver is cancelled.

Needs the extra ``kvroute[events]``: imported only where events are heard.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Literal, TypeAlias

import zmq
from zmq.utils.monitor import parse_monitor_message

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self

Connection: TypeAlias = Literal["connecting", "connected", "over"]

# As plain numbers: enumerations are half of the cost of a call.
_NOBLOCK, _EVENTS, _POLLIN = int(zmq.NOBLOCK), int(zmq.EVENTS), int(zmq.POLLIN)
# A batch with all blocks of a prompt of a million tokens is less than half of this.
_MAX_MESSAGE_BYTES = 16 * 2**20
# Live batches that wait here while missed ones are fetched. What is more waits in TCP and in the engine; only what that
# drops, 100,000 batches later as vLLM is by default, is a gap.
_LIVE_MESSAGES = 1000
# The engine's socket drops what a replay has beyond its own high-water mark, so this end takes all of the usual buffer.
_REPLAY_MESSAGES = 10_000
# Half-open connections are found by pings, which libzmq answers by itself.
_HEARTBEAT_MILLISECONDS, _HEARTBEAT_TIMEOUT_MILLISECONDS = 2000, 6000
_RECONNECT_MILLISECONDS, _RECONNECT_MOST_MILLISECONDS = 100, 5000


class Wire:
    """All sockets of one listener."""

    def __init__(self) -> None:
        self._context = zmq.Context()
        self._context.set(zmq.BLOCKY, 0)
        # A feed takes three with its monitor: by libzmq's default 341 ranks would be all.
        self._context.set(zmq.MAX_SOCKETS, self._context.get(zmq.SOCKET_LIMIT))

    def feed(self, address: str, topic: str) -> Feed:
        """A subscription; batches come once it is connected."""
        socket = self._socket(zmq.SUB, _LIVE_MESSAGES)
        socket.setsockopt(zmq.SUBSCRIBE, topic.encode())
        return Feed(socket, address)

    def dealer(self, address: str) -> Inbox:
        """A connection to a replay socket."""
        socket = self._socket(zmq.DEALER, _REPLAY_MESSAGES)
        socket.connect(address)
        return Inbox(socket)

    def _socket(self, kind: int, messages: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.RCVHWM, messages),
            (zmq.MAXMSGSIZE, _MAX_MESSAGE_BYTES),
            (zmq.IPV6, 1),
            (zmq.HEARTBEAT_IVL, _HEARTBEAT_MILLISECONDS),
            (zmq.HEARTBEAT_TIMEOUT, _HEARTBEAT_TIMEOUT_MILLISECONDS),
            # libzmq adds a random part to each wait.
            (zmq.RECONNECT_IVL, _RECONNECT_MILLISECONDS),
            (zmq.RECONNECT_IVL_MAX, _RECONNECT_MOST_MILLISECONDS),
        ):
            socket.setsockopt(option, value)
        return socket

    async def close(self) -> None:
        """End; all sockets must be closed."""
        # Waits for libzmq's thread.
        await asyncio.to_thread(self._context.term)


class Inbox:
    """A socket; a context manager that closes it."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self.descriptor: int = socket.FD

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def send(self, frames: list[bytes]) -> bool:
        """Send a message; False when there is no room for it."""
        try:
            self._socket.send_multipart(frames, flags=zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def take(self) -> list[bytes] | None:
        """The next message, None when there is none now."""
        if not self.is_readable:
            return None
        # `recv_multipart` asks for an option after each frame, which costs more than the frame.
        frame = self._socket.recv(_NOBLOCK, copy=False)
        frames = [frame.bytes]
        while frame.more:
            frame = self._socket.recv(_NOBLOCK, copy=False)
            frames.append(frame.bytes)
        return frames

    @property
    def is_readable(self) -> bool:
        """Whether there is a message."""
        events = self._socket.get(_EVENTS)
        assert isinstance(events, int)
        return bool(events & _POLLIN)

    def close(self) -> None:
        """Close the socket, whatever is still in it."""
        self._socket.close(linger=0)


class Feed(Inbox):
    """A subscription, for as long as its first connection lasts.

    What libzmq makes of a connection that ends depends on how: it connects again, but not to a peer that broke the
    protocol or sent more than allowed. And in between, batches may have been missed. So the next one is another feed.
    """

    def __init__(self, socket: zmq.Socket[bytes], address: str) -> None:
        super().__init__(socket)
        self._state: Connection = "connecting"
        self.monitor = Inbox(socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED))
        socket.connect(address)

    def look(self) -> Connection:
        """How the connection is now."""
        while (message := self.monitor.take()) is not None:
            if parse_monitor_message(message)["event"] != zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._state = "over"
            elif self._state == "connecting":
                self._state = "connected"
        return self._state

    def close(self) -> None:
        """Close the socket, whatever is still in it."""
        self._socket.disable_monitor()
        self.monitor.close()
        super().close()


async def readable(*inboxes: Inbox) -> None:
    """Return when any of the sockets may have a message."""
    # Asking a socket for its state also takes back the signal on its descriptor; each must be asked.
    if any([inbox.is_readable for inbox in inboxes]):  # noqa: C419
        return
    loop = asyncio.get_running_loop()
    signal = loop.create_future()
    try:
        for inbox in inboxes:
            loop.add_reader(inbox.descriptor, _set, signal)
        await signal
    finally:
        for inbox in inboxes:
            loop.remove_reader(inbox.descriptor)


def _set(signal: asyncio.Future[None]) -> None:
    if not signal.done():
        signal.set_result(None)
