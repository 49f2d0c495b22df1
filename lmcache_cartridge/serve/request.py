"""Request: what a client says of cartridges, read strictly, and what it is told where that cannot be had.

Knows no vLLM, and reads nothing but the request.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError

from ..engine.contract import ADAPTER, GRANT, MAX_OFFLOAD, SKIP_SAVE, TAG, TENANT
from ..settings import Settings

MAX_CHAIN = 16
REQUIRED = (
    "the request gets no cartridge, and the setting `required` of this server, the header X-Cartridges-Required or the "
    "field `cartridges_required` refuses an answer without; name one in `cartridges` or the header X-Cartridges"
)
REQUIRED_FIELD = "cartridges_required"
_TAG = re.compile(r"[A-Za-z0-9._-]{1,128}")
"""Tags as LMCache's keys can carry them."""
_PATHS = re.compile(r"(?:s3:/|(?<![^\s'\"(\[=]))/(?:[^/:;,'\"\n]*/)+")
"""Directories of paths, which may have spaces in them."""


class Refusal(Exception):
    """A request that is answered with an error: an HTTP status and a message fit for the client."""

    def __init__(self, status: int, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after_s = retry_after_s


class Unservable(Refusal):
    """What the engine will not serve, and which cartridge is at fault: an older version of it may stand in."""

    def __init__(self, status: int, message: str, digest: str | None) -> None:
        super().__init__(status, message)
        self.digest = digest


def without_paths(reason: str, places: Mapping[str, str]) -> str:
    """Return a reason fit for a client: names in place of the `places` they have, and no directories."""
    for place, name in sorted(places.items(), key=lambda pair: -len(pair[0])):
        reason = reason.replace(place, name)
    return _PATHS.sub("", reason)


def unreadable(error: Exception) -> Refusal:
    """Return what a client is told where the registry cannot be read."""
    return Refusal(503, f"the registry cannot be read now: {without_paths(str(error), {})}", retry_after_s=5)


class Reference(BaseModel):
    """One cartridge as a request names it."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    id: Annotated[str, Field(min_length=1, max_length=1024)]
    source: Literal["registry", "local", "s3"] | None = None
    force_redownload: bool = False

    def where(self) -> str:
        """Return the source: as given, or as the form of the id tells."""
        if self.source is not None:
            return self.source
        if self.id.startswith("s3://"):
            return "s3"
        return "local" if self.id.startswith("/") else "registry"


class NeedsReading(Exception):
    """A cartridge's manifest must be read first, which may take long or hang."""

    def __init__(self, reference: Reference, location: str) -> None:
        super().__init__(location)
        self.reference, self.location = reference, location


class StillMade(Refusal):
    """A context that is being made, of a tenant who may name it."""


_references = TypeAdapter(
    Annotated[
        list[Annotated[Reference, BeforeValidator(lambda v: {"id": v} if isinstance(v, str) else v)]],
        Field(min_length=1, max_length=MAX_CHAIN),
    ]
)


def check_params(kv_params: Any) -> None:
    """Raise `Refusal` for `kv_transfer_params` that a client may not send.

    Only what is known to be harmless passes: LMCache 0.5.6 looks into `disagg_spec` and `ret_first_tok` inside vLLM's
    scheduler and hashes every `lmcache.*` value, and what it does not expect there ends the engine.
    """
    if kv_params is None:
        return
    if not isinstance(kv_params, Mapping):
        raise Refusal(400, "kv_transfer_params must be an object")
    for key, value in kv_params.items():
        name = f"kv_transfer_params.{shorten(str(key))}"
        if key in (TAG, TENANT, ADAPTER, GRANT):
            raise Refusal(400, f"{name} is set by the server; name cartridges in `cartridges`")
        if str(key).startswith("lmcache.tag."):
            if not isinstance(value, str) or not _TAG.fullmatch(value) or not _TAG.fullmatch(str(key)):
                raise Refusal(400, f"{name} must be a string, and it and the name 1 to 128 of A-Z a-z 0-9 . _ -")
        elif key == SKIP_SAVE:
            if not isinstance(value, bool):
                raise Refusal(400, f"{name} must be a boolean")
        elif key == MAX_OFFLOAD:
            if type(value) is not int or not 0 <= value < 1 << 31:
                raise Refusal(400, f"{name} must be a number of tokens from 0 on")
        elif key != "cartridge_id":
            raise Refusal(
                400, f"{name} is not for this server; clients may send cartridge_id, lmcache.tag.*, {SKIP_SAVE}, "
                f"{MAX_OFFLOAD}",
            )  # fmt: skip


def read_header(values: Sequence[str]) -> tuple[str, ...]:
    """Return the ids that `X-Cartridges: handbook, legal@2` names, in order; several headers count as one.

    Raises `Refusal` for one without a name, and for ids that are no visible ASCII.
    """
    return _ids(",".join(values), "the header X-Cartridges") if values else ()


def _ids(text: str, what: str) -> tuple[str, ...]:
    ids = [name.strip() for name in text.split(",")]
    if not all(name.isascii() and name.isprintable() and " " not in name and name for name in ids):
        raise Refusal(400, f"{what} must be names of cartridges, with commas between them")
    return tuple(reference.id for reference in _validated(ids, what))


def read_flag(value: Any, what: str) -> bool:
    """Return what a boolean means, or the text true, false, 1 or 0. Raises `Refusal` for anything else."""
    flag = {"true": True, "1": True, "false": False, "0": False}.get(str(value).strip().lower())
    if flag is None or not isinstance(value, str | bool):
        raise Refusal(400, f"{what} must be true or false")
    return flag


def read_references(fields: Mapping[str, Any], kv_params: Mapping[str, Any] | None) -> list[Reference]:
    """Return the cartridges a request names in `cartridges` or `kv_transfer_params.cartridge_id`; empty if none.

    Raises `Refusal` for anything malformed, and for keys that only this server may set.
    """
    check_params(kv_params)
    named, by_param = fields.get("cartridges"), (kv_params or {}).get("cartridge_id")
    if by_param is not None:
        if named is not None:
            raise Refusal(400, "name cartridges in `cartridges` or in kv_transfer_params.cartridge_id, not in both")
        named = [by_param] if isinstance(by_param, str) else by_param
    return [] if named is None else _validated(named, "cartridges")


def _validated(named: Any, what: str) -> list[Reference]:
    try:
        return _references.validate_python(named)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise Refusal(400, f"{what}{'.' if place else ''}{place}: {first['msg']}") from None


class Router:
    """Chooses cartridges for requests: those they name, or those that `settings.router` gives to the others."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.models: Sequence[str] = ()
        """The names of the model that is served."""

    def named_by(self, model: Any) -> tuple[str, ...]:
        """Return the ids in a model name `BASE:handbook,legal@2`, of those that are served, or of an alias.

        A name that is served itself, and any other, has none. Raises `Refusal` for a base with a colon and no ids behind it.
        """
        aliases = self._settings.model_aliases
        if not isinstance(model, str) or model in self.models:
            return ()
        if model in aliases:
            return tuple(aliases[model])
        base = max((base for base in self.models if model.startswith(f"{base}:")), key=len, default=None)
        return () if base is None else _ids(model[len(base) + 1 :], "the cartridges in `model`")

    def choose(
        self, fields: Mapping[str, Any], kv_params: Mapping[str, Any] | None, model: str | None,
        header: Sequence[str] = (),
    ) -> list[Reference]:  # fmt: skip
        """Return the references of a request, with composites taken apart; empty if it gets no cartridge.

        `fields` are the request fields that vLLM does not know, `header` the ids that a header names. Raises `Refusal`
        for malformed ones, and where header, model and body name different cartridges.
        """
        named, by_model = read_references(fields, kv_params), self.named_by(model)
        in_body = tuple(reference.id for reference in named)
        told = {"the header X-Cartridges": tuple(header), "`model`": by_model, "the body": in_body}
        told = {what: ids for what, ids in told.items() if ids}
        if len(set(told.values())) > 1:
            raise Refusal(400, f"{' and '.join(told)} name different cartridges")
        named = named or [Reference(id=name) for name in header or by_model] or self._default(fields, model)
        chain = [part for reference in named for part in self._parts(reference)]
        if len(chain) > MAX_CHAIN:
            raise Refusal(400, f"{len(chain)} cartridges in one request; at most {MAX_CHAIN}")
        return chain

    def _default(self, fields: Mapping[str, Any], model: str | None) -> list[Reference]:
        settings = self._settings
        if settings.router in ("label", "composite"):
            label = fields.get(settings.label_field)
            if label is None:
                return []
            if not isinstance(label, str) or not 1 <= len(label) <= 128 or not label.isprintable():
                raise Refusal(400, f"{settings.label_field} must be a string of 1 to 128 printable characters")
            if settings.router == "composite" and label not in settings.composites:
                raise Refusal(404, f"no composite is called {label!r}")
            return [Reference(id=label, source="registry")]
        if settings.router == "static":
            for key in (f"model:{model}", "*"):
                if key in settings.static:
                    return [Reference(id=settings.static[key])]
        return []

    def _parts(self, reference: Reference) -> list[Reference]:
        names = self._settings.composites.get(reference.id) if reference.where() == "registry" else None
        if names is None:
            return [reference]
        return [Reference(id=name, force_redownload=reference.force_redownload) for name in names]


def shorten(text: str) -> str:
    """Return text that a response can carry: shortened, and without what is no Unicode (JSON's lone surrogates)."""
    text = text if len(text) <= 80 else text[:77] + "..."
    return text.encode("utf-8", "backslashreplace").decode()
