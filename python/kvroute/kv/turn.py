"""One request's hold on its conversation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvroute.kv.conversations import Claim

if TYPE_CHECKING:
    from typing_extensions import Self

    from kvroute.kv.conversations import Held, Key, Store


class Turn:
    """A context that claims the conversation's handle and gives back what was sent nowhere.

    Args:
        store: The conversations, None when they are switched off.
        key: The conversation, None when the request belongs to none.

    Attributes:
        claim: What the store gave.
        held: The claimed handle as long as it was sent nowhere.
    """

    __slots__ = ("_store", "claim", "held", "key")

    def __init__(self, store: Store | None, key: Key | None) -> None:
        self._store = store
        self.key = key if store is not None else None
        self.claim = Claim()
        self.held: Held | None = None

    def __enter__(self) -> Self:
        if self._store is not None and self.key is not None:
            self.claim = self._store.claim(self.key)
            self.held = self.claim.held
        return self

    def __exit__(self, *_: object) -> None:
        if self.held is not None and self._store is not None and self.key is not None:
            self._store.give_back(self.key, self.held)

    def spend(self) -> None:
        """The handle is about to be sent, or is given up: it is used once, whatever comes of it."""
        self.held = None

    def finish(self, decode: str, held: Held | None) -> Held | None:
        """Remember the turn's end; returns a handle that the new one replaces and that nobody will use.

        Without a new handle, what was claimed and sent nowhere is still good, and goes back at the end of the context.
        """
        if self._store is None or self.key is None:
            return None
        return self._store.put(self.key, decode, held)
