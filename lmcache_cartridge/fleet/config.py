"""Config: the servers that a fleet's service follows, and how it picks among them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from ..errors import SettingsError
from .affinity import Naming

_Seconds = Annotated[float, Field(gt=0, le=3600)]


class PodConfig(BaseModel):
    """One server."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Annotated[str, Field(min_length=1, max_length=253)]
    url: Annotated[str, Field(pattern=r"^https?://[^/]+/?$")]
    """Of vLLM's API server; requests are sent to its host and port."""
    events: str | None = None
    """ZMQ endpoint that its events are read from, `tcp://HOST:PORT`. Without it `GET /kv_event_sources` is asked."""
    replay: str | None = None
    """ZMQ endpoint that past events are asked of, vLLM's `replay_endpoint`."""

    @property
    def address(self) -> str:
        """Host and port."""
        scheme, _, rest = self.url.rstrip("/").partition("://")
        return rest if ":" in rest.rpartition("]")[2] else f"{rest}:{443 if scheme == 'https' else 80}"


class FleetConfig(BaseModel):
    """The file of `lmcache-cartridge fleet serve`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    pods: Annotated[tuple[PodConfig, ...], Field(min_length=1)]
    listen: str = "127.0.0.1:9300"
    """Host and port of the service. It answers anybody who reaches it."""
    api_key_env: str = "VLLM_API_KEY"
    """Environment variable with the servers' API key, where they want one."""
    prefix_weight: Annotated[float, Field(ge=0)] = 2.0
    """Of the share of a prompt that a server has."""
    load_weight: Annotated[float, Field(ge=0)] = 1.0
    """Of how few requests wait at it: 0.5 (1 - min(waiting, 128) / 128), llm-d's."""
    naming: dict[str, Any] = {}
    """The servers' own settings that give requests cartridges: `router`, `label_field`, `static`, `composites`,
    `model_aliases`, and `models`, the names that are served."""
    names_ttl_s: _Seconds = 60.0
    """How long the tokens of a name are used before a server is asked again, meanwhile with those that are known."""
    poll_s: _Seconds = 1.0
    """How often a server's health, load and models are asked for."""
    verify_s: _Seconds = 5.0
    """How often a server is asked for its last event again, by which a restart or a loss is found while it is idle."""
    timeout_s: _Seconds = 2.0
    """How long a server may take for an answer."""

    @field_validator("pods")
    @classmethod
    def _differ(cls, pods: tuple[PodConfig, ...]) -> tuple[PodConfig, ...]:
        for what in ("name", "address"):
            if len({getattr(pod, what) for pod in pods}) < len(pods):
                raise ValueError(f"two servers have one {what}")
        return pods

    @field_validator("naming")
    @classmethod
    def _names(cls, naming: dict[str, Any]) -> dict[str, Any]:
        if unknown := set(naming) - set(Naming._fields):
            raise ValueError(f"unknown: {', '.join(sorted(unknown))}")
        return naming

    @property
    def api_key(self) -> str | None:
        """The key in the environment now; None without one."""
        return os.environ.get(self.api_key_env) or None

    @property
    def host_port(self) -> tuple[str, int]:
        """Where to listen."""
        host, _, port = self.listen.rpartition(":")
        if not port.isdigit():
            raise SettingsError(f"listen: {self.listen!r} is no HOST:PORT")
        return host or "0.0.0.0", int(port)


def read_config(path: Path) -> FleetConfig:
    """Return what a YAML file says. Raises `SettingsError` that names the first wrong key, `OSError` as `open`."""
    import yaml

    try:
        return of_mapping(yaml.safe_load(path.read_text(encoding="utf-8")))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path}: {error}") from None
    except SettingsError as error:
        raise SettingsError(f"{path}: {error}") from None


def of_mapping(values: Any) -> FleetConfig:
    """Return the configuration in a parsed file. Raises `SettingsError`."""
    try:
        return FleetConfig.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"])) or "the file"
        raise SettingsError(f"{place}: {first['msg']}") from None
