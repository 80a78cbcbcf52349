"""All engines of the gateway."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvroute.fleet.endpoint import Declared, Endpoint
from kvroute.upstream import Origin

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvroute.config import Role, Settings


class Fleet:
    """The engines, by role and model."""

    def __init__(self, endpoints: Iterable[Endpoint]) -> None:
        self.endpoints: tuple[Endpoint, ...] = tuple(endpoints)
        self._by_url = {endpoint.url: endpoint for endpoint in self.endpoints}

    @classmethod
    def from_settings(cls, settings: Settings) -> Fleet:
        """The fleet that the settings describe."""
        return cls(
            Endpoint(
                item.url,
                Origin.parse(item.url),
                item.role,
                api_key=item.api_key.get_secret_value() if item.api_key is not None else None,
                models=item.models,
                declared=Declared(item.bidirectional_kv_xfer, item.kv_layout, item.data_parallel_size),
                max_waiting=settings.selective_kv.max_waiting_requests if settings.selective_kv is not None else 0,
                max_age=settings.signals.max_age_seconds,
                use_ranks=settings.routing.data_parallel_ranks == "auto",
            )
            for item in settings.endpoints
        )

    def get(self, url: str) -> Endpoint | None:
        """The engine of that URL, if it belongs to the fleet."""
        return self._by_url.get(url)

    def of_role(self, role: Role) -> list[Endpoint]:
        """All engines of a role, whatever their state."""
        return [endpoint for endpoint in self.endpoints if endpoint.role == role]

    def knows(self, model: str) -> bool:
        """Whether any engine, up or down, serves the model, or may serve it because its models are not known yet."""
        return any(endpoint.serves(model) for endpoint in self.endpoints)

    def able(self, role: Role, model: str | None) -> list[Endpoint]:
        """Healthy engines of a role that serve the model."""
        return [
            endpoint
            for endpoint in self.endpoints
            if endpoint.role == role and endpoint.healthy and endpoint.serves(model)
        ]

    def model_names(self) -> set[str]:
        """The models of all engines, whatever their state."""
        return {name for endpoint in self.endpoints for name in endpoint.models}

    def models(self) -> list[dict[str, Any]]:
        """The merged model list: every model of a healthy engine once, as the first engine that has it describes it."""
        merged: dict[str, dict[str, Any]] = {}
        for endpoint in self.endpoints:
            if endpoint.healthy:
                for name, entry in endpoint.models.items():
                    merged.setdefault(name, entry)
        return list(merged.values())

    def usable(self) -> bool:
        """Whether any request can be served: by an engine of role both, or by a decode engine."""
        return any(endpoint.healthy and endpoint.role != "prefill" for endpoint in self.endpoints)
