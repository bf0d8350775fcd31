"""Applications: names and keys under which models are served, each with its own promise and priority.

`config` makes them of the settings, `http` asks an `Applications` which one a request counts for. Several share one
copy of a model's weights: deadlines, metrics and attainment are theirs, memory and placement the model's. Pure: it
knows neither which models exist nor which keys.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec

from janus_server.errors import BadConfig
from janus_server.suggest import nearest
from janus_server.types import Promise


class Application(msgspec.Struct, frozen=True):
    """A served name and what is promised under it. priority: higher first. model is the base model's name.

    With `key`, the name of an API key, it is that key's alone: requests of the key for the base model count as this
    application's too, and for other keys there is nothing of its name. One with the name of its model is what is
    promised to requests under the model's own name.
    """

    name: str
    model: str
    promise: Promise = Promise()
    priority: int = 0
    key: str | None = None


class Applications:
    """Which application a request counts for. Never changed once made."""

    def __init__(self, listed: Sequence[Application] = ()) -> None:
        self.listed = tuple(listed)
        self._by_name = {one.name: one for one in self.listed}
        self._by_key = {(one.model, one.key): one for one in self.listed if one.key is not None}

    def resolve(self, name: str, key: str = "", admin: bool = False) -> Application | None:
        """The application of a request for `name`, sent under the API key of that name ("": none).

        A name that is not listed is taken for a model's, without a promise: whether there is such a model is the
        caller's to say. None when the name is another key's; an admin key may use every name.
        """
        own = self._by_key.get((name, key)) if key else None
        if own is not None:
            return own
        found = self._by_name.get(name)
        if found is None:
            return Application(name, name)
        return found if found.key in (None, key) or admin else None

    def names(self, models: Collection[str]) -> list[str]:
        """Every served name: the models' first, in their order, then the applications' that are no model's."""
        return [*models, *(one.name for one in self.listed if one.name not in models)]

    def of_model(self, model: str) -> list[Application]:
        """Those that are listed for a model."""
        return [one for one in self.listed if one.model == model]


def check(listed: Sequence[Application], models: Collection[str]) -> tuple[Application, ...]:
    """The same applications; BadConfig where one cannot be served beside these models and the others."""
    bound: dict[tuple[str, str], str] = {}
    for one in listed:
        where = f"[applications.{one.name}]"
        if one.model not in models:
            served = ", ".join(models)
            hint = nearest(one.model, list(models))
            raise BadConfig(f'{where}: no model "{one.model}" is served{hint}; give model = one of: {served}')
        if one.name in models and one.name != one.model:
            raise BadConfig(f"{where}: a model has that name; call the application otherwise, or give its own promise "
                            f'with model = "{one.name}"')  # fmt: skip
        if one.key is None:
            continue
        if one.name == one.model:
            raise BadConfig(f"{where}: what is promised under a model's own name is promised to every key; to bind it "
                            f'to the key "{one.key}", give the application a name of its own')  # fmt: skip
        other = bound.setdefault((one.model, one.key), one.name)
        if other != one.name:
            raise BadConfig(f'{where}: the key "{one.key}" is bound to the application "{other}" of the same model '
                            "already; a request for the model could not tell them apart")  # fmt: skip
    return tuple(listed)


def check_keys(listed: Sequence[Application], keys: Collection[str]) -> None:
    """BadConfig where an application is bound to a key that nobody has: its promise could never be kept or broken."""
    for one in listed:
        if one.key is not None and one.key not in keys:
            have = f"there are: {', '.join(sorted(keys))}" if keys else "there is none: give --api-key-file"
            hint = nearest(one.key, sorted(keys))
            raise BadConfig(f'[applications.{one.name}]: no API key is called "{one.key}"{hint}; {have}')
