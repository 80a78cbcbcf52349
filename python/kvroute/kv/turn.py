"""One request's hold on its conversation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvroute.kv.conversations import Claim

if TYPE_CHECKING:
    from typing_extensions import Self

    from kvroute.kv.conversations import Store
    from kvroute.kv.held import Held
    from kvroute.kv.names import Names
    from kvroute.plan.place import Place


class Turn:
    """A context that claims the conversation's handle and gives back what was sent nowhere.

    Args:
        store: The conversations, None when they are switched off.
        names: The request's names, None when it belongs to no conversation.

    Attributes:
        claim: What the store gave.
        held: The claimed handle as long as it was sent nowhere.
        spent: The claimed handle afterwards.
    """

    __slots__ = ("_names", "_store", "claim", "held", "spent")

    def __init__(self, store: Store | None, names: Names | None) -> None:
        self._store = store
        self._names = names if store is not None else None
        self.claim = Claim()
        self.held: Held | None = None
        self.spent: Held | None = None

    def __enter__(self) -> Self:
        if self._store is not None and self._names is not None:
            self.claim = self._store.claim(self._names)
            self.held = self.claim.held
        return self

    def __exit__(self, *_: object) -> None:
        if self.held is not None and self._store is not None:
            self._store.give_back(self.claim)

    @property
    def continuable(self) -> bool:
        """Whether a later turn could come for a handle that this one leaves."""
        return self._names is not None and self._names.kept is not None

    @property
    def proven(self) -> bool:
        """Whether the conversation has gone on before, or has an id, which is a promise to go on."""
        return self.claim.match == "prefix" or (self._names is not None and self._names.own is not None)

    def spend(self) -> Held:
        """Take the handle, which is there, to send it or to give it up: it is used once, whatever comes of it."""
        held, self.held = self.held, None
        assert held is not None
        self.spent = held
        return held

    def finish(self, decode: Place, held: Held | None, response: str | None = None) -> None:
        """Remember the turn's end.

        Without a new handle, what was claimed and sent nowhere is still good, and goes back at the end of the context.

        Args:
            decode: The engine that served it, and its data-parallel rank if that was chosen.
            held: The handle that it left.
            response: The id that the engine gave a response, None on other APIs.
        """
        if self._store is not None and self._names is not None:
            self._store.put(self._names, self.claim, decode, held, response=response, again=self.held is not None)
