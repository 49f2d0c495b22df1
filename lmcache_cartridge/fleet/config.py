"""Config: the servers that a fleet's service follows, and how it picks among them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from ..errors import SettingsError
from .affinity import EXPLICIT, Naming

_Seconds = Annotated[float, Field(gt=0, le=3600)]


class PodConfig(BaseModel):
    """One server."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Annotated[str, Field(min_length=1, max_length=253)]
    url: Annotated[str, Field(pattern=r"^https?://[^/]+/?$")]
    """Of vLLM's API server; requests are sent to its host and port."""
    replay: str | None = None
    """ZMQ endpoint that its events are asked of, vLLM's `replay_endpoint`. Without it `GET /kv_event_sources` is asked."""

    @property
    def address(self) -> str:
        """Host and port."""
        parts = urlsplit(self.url)
        return parts.netloc if parts.port else f"{parts.netloc}:{443 if parts.scheme == 'https' else 80}"


class FleetConfig(BaseModel):
    """The file of `lmcache-cartridge fleet serve`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    pods: Annotated[tuple[PodConfig, ...], Field(min_length=1)]
    listen: Annotated[str, Field(pattern=r":\d{1,5}$")] = "127.0.0.1:9300"
    """Host and port of the service. It answers anybody who reaches it."""
    api_key_env: str = "VLLM_API_KEY"
    """Environment variable with the servers' API key, where they want one."""
    prefix_weight: Annotated[float, Field(ge=0)] = 2.0
    """Of the share of a prompt that a server has."""
    load_weight: Annotated[float, Field(ge=0)] = 1.0
    """Of how few requests wait at it: 0.5 (1 - min(waiting, 128) / 128), llm-d's."""
    naming: Naming = EXPLICIT
    """The servers' own settings that give requests cartridges, and `models`, the names that are served."""
    poll_s: _Seconds = 1.0
    """How often a server's health, load and events are asked for."""
    timeout_s: _Seconds = 2.0
    """How long a server may take for an answer."""

    @field_validator("pods")
    @classmethod
    def _differ(cls, pods: tuple[PodConfig, ...]) -> tuple[PodConfig, ...]:
        for what in ("name", "address"):
            if len({getattr(pod, what) for pod in pods}) < len(pods):
                raise ValueError(f"two servers have one {what}")
        return pods


def read_config(path: Path) -> FleetConfig:
    """Return what a YAML file says. Raises `SettingsError` that names the first wrong key, `OSError` as `open`."""
    import yaml

    try:
        return of_mapping(yaml.safe_load(path.read_text(encoding="utf-8")))
    except (yaml.YAMLError, UnicodeDecodeError, SettingsError) as error:
        raise SettingsError(f"{path}: {error}") from None


def of_mapping(values: Any) -> FleetConfig:
    """Return the configuration in a parsed file. Raises `SettingsError`."""
    try:
        return FleetConfig.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise SettingsError(f"{'.'.join(map(str, first['loc'])) or 'the file'}: {first['msg']}") from None
