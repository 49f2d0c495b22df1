"""Settings: what can be configured, parsed once at the edges (plugin, command line)."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from blake3 import blake3
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from .artifact.location import SCHEME, parse
from .errors import SettingsError

HOME_VARIABLE = "LMCACHE_CARTRIDGE_HOME"
CACHE_VARIABLE = "LMCACHE_CARTRIDGE_CACHE"
SECRET_VARIABLE = "LMCACHE_CARTRIDGE_SALT_SECRET"
_LEAST_SECRET_BYTES = 32
UNPROVEN_VARIABLE = "LMCACHE_CARTRIDGE_UNPROVEN_VERSIONS"
_UNITS = {"": 1, "B": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}


def default_home() -> Path:
    """Return `$LMCACHE_CARTRIDGE_HOME`, or `lmcache-cartridge` under the user's data directory (XDG)."""
    return _directory(HOME_VARIABLE, "XDG_DATA_HOME", "~/.local/share")


def _directory(variable: str, xdg: str, otherwise: str) -> Path:
    if named := os.environ.get(variable):
        return Path(named).expanduser().absolute()
    return Path(os.environ.get(xdg) or otherwise).expanduser() / "lmcache-cartridge"


def parse_bytes(value: Any) -> Any:
    """Return the number of bytes in `512MiB`, `1.5 GiB` or a plain number; other values unchanged."""
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"\s*([0-9]{1,18}(?:\.[0-9]*)?)\s*([A-Za-z]*)\s*", value)
    if not match or match[2].upper() not in _UNITS:
        raise ValueError(f"{value!r} is no size; write bytes, or a number with KiB, MiB, GiB or TiB")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def memory_bytes() -> int:
    """Return the memory that processes here may have: the machine's, or less where a container has a limit."""
    size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for limit in ("memory.max", "memory/memory.limit_in_bytes"):  # of cgroups 2 and 1
        with suppress(OSError, ValueError):  # the other kind's; "max"
            size = min(size, int(Path("/sys/fs/cgroup", limit).read_text()))
    return size


def _endpoint(url: str) -> str:
    try:
        parts = urlsplit(url)
        sound = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        sound = False
    if not sound or parts.path.strip("/") or parts.query or "@" in parts.netloc:
        raise ValueError("write http://HOST:PORT or https://HOST; credentials do not belong in it")
    return url


def _published(library: str) -> str:
    if library.startswith(SCHEME):
        parse(library := library.rstrip("/"))
        return library
    if not library.startswith("/") or "\0" in library:
        raise ValueError("write s3://BUCKET/PREFIX or an absolute directory")
    return os.path.normpath(library)


Bytes = Annotated[int, BeforeValidator(parse_bytes), Field(ge=0)]


class Settings(BaseModel):
    """Settings of one serving process. In LMCache's `extra_config` each is `storage_plugin.<name>.<setting>`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    home: Path = Field(default_factory=default_home)
    """Directory of the registry and of cartridges built here; by default `$LMCACHE_CARTRIDGE_HOME`, or
    `lmcache-cartridge` under `$XDG_DATA_HOME` (`~/.local/share`)."""
    device_bytes: Bytes | None = None
    """Budget of the device tier; 0 switches it off. By default 1 GiB, or a quarter of what vLLM leaves free where that is
    less."""
    cpu_bytes: Bytes = Field(default_factory=lambda: max(1 << 30, memory_bytes() // 32))
    """Budget of the cpu tier, in each worker; by default a 32nd of the machine's or container's memory, at least 1 GiB. A
    start says how many tokens that holds."""
    disk_bytes: Bytes = 16 << 30
    """Budget of the disk tier, which all processes with the same `disk_dir` share; 0 switches it off."""
    disk_local: bool = False
    """Whether the disk tier also copies artefacts from directories, as of slow network storage."""
    disk_dir: Path | None = None
    """Directory of the disk tier; by default `$LMCACHE_CARTRIDGE_CACHE`, or `lmcache-cartridge` under `$XDG_CACHE_HOME`
    (`~/.cache`)."""
    lookup_timeout_s: float = Field(default=0.0, ge=0, le=60)
    """How long the scheduler, and so every request, may wait in a lookup for chunks to be loaded."""
    lease_s: float = Field(default=300.0, gt=0)
    """How long a chunk that was found stays in memory where no request reads it."""
    load_threads: int = Field(default=4, ge=1, le=256)
    """Chunks read at once from directories; from S3 as many as `s3_connections`."""
    reload_s: float = Field(default=1.0, ge=0)
    """Time between two looks for changes of the registry or the `library`; 0 means never."""
    library: Annotated[str, AfterValidator(_published)] | None = None
    """Published library to serve in place of the registry: `s3://bucket/prefix`, or an absolute directory."""

    unproven_versions: bool = Field(
        default_factory=lambda: os.environ.get(UNPROVEN_VARIABLE, "") not in ("", "0", "false")
    )
    """Whether untried versions of vLLM and LMCache may run, which may answer wrongly; by default
    `$LMCACHE_CARTRIDGE_UNPROVEN_VERSIONS`."""

    accept_weights: bool = False
    """Whether cartridges of a model with other weights are served: another quantisation, a fine-tune. With
    `canary: required` those that answer otherwise are refused."""

    # S3. Credentials come from the environment, profiles and roles as for every AWS tool, never from here.

    s3_endpoint_url: Annotated[str, AfterValidator(_endpoint)] | None = None
    """Server for `s3://` locations; by default `$AWS_ENDPOINT_URL_S3`, a profile's, or AWS."""
    s3_region: str | None = None
    """Region; by default that of the environment or profile."""
    s3_connections: int = Field(default=16, ge=1, le=256)
    """Connections to S3 at once."""
    s3_part_bytes: Annotated[int, BeforeValidator(parse_bytes), Field(ge=1 << 16, le=1 << 30)] = 8 << 20
    """Size of one request to S3."""
    s3_timeout_s: float = Field(default=60.0, gt=0, le=3600)
    """A read fails that gets less than 64 KiB in this time, retries included."""

    # What requests may ask for; read by the API server.

    roots: tuple[Path, ...] = ()
    """Directories under which requests may name artefacts by absolute path."""
    buckets: tuple[Annotated[str, AfterValidator(lambda bucket: parse(f"s3://{bucket}/x") and bucket)], ...] = ()
    """`bucket` or `bucket/prefix` under which requests may name artefacts by `s3://` location."""
    imported_bytes: Bytes = 16 << 30
    """Budget, under `disk_dir`, of what is made of `.pt` files that requests name; 0 refuses such files."""
    router: Literal["explicit", "label", "static", "composite"] = "explicit"
    """What a request gets that names no cartridge: nothing, the label in its `label_field`, that of `static`, or the
    chain in `composites` that its `label_field` names."""
    label_field: str = "cartridge_label"
    """Request field that holds a label."""
    static: dict[Annotated[str, Field(pattern=r"^(model:.+|\*)$")], str] = {}
    """Cartridge by `model:NAME`, and `*` for everybody else."""
    composites: dict[str, Annotated[list[str], Field(min_length=1, max_length=16)]] = {}
    """Names for chains of cartridges, used like a cartridge's."""
    model_aliases: dict[str, Annotated[list[str], Field(min_length=1, max_length=16)]] = {}
    """Model names by which a request gets these cartridges; `MODEL:CARTRIDGE` needs no alias."""
    required: bool = False
    """Whether a request that generates without a cartridge, named or from the router, is refused with 400."""
    on_miss: Literal["error", "document"] = "error"
    """What a request gets whose trained cartridge cannot be loaded: an error, or an answer from the document's text,
    where the cartridge carries it."""
    ready_timeout_s: float = Field(default=30.0, gt=0)
    """How long a request waits until its cartridges are in memory."""
    retry_status: Literal[503, 425] = 503
    """Status that tells clients to ask again later; 425 behind a router that retries 503 itself."""
    drain_s: float = Field(default=0.0, ge=0, le=600)
    """How long a server still takes requests after SIGTERM, while `GET /health` says 503."""
    canary: bool | Literal["required"] = True
    """Whether the engine must first answer each cartridge's own questions right. `required` refuses cartridges
    without."""
    plain_prompts: Literal["trusted", "all", "none"] = "trusted"
    """Which prefill cartridges answer prompts that begin with their text and name none: those whose canary this engine
    has answered right, every sound one, or none."""
    kv_events: bool = False
    """Whether vLLM's KV events also tell which cartridges are whole in memory and on the local disk."""
    contexts: bool = False
    """Whether clients have cartridges made of texts: everybody's, without API keys. LMCache has to save (`--l1-bytes`)."""
    contexts_bytes: Bytes = 16 << 30
    """Budget of what all clients together had made."""
    contexts_count: int = Field(default=1000, ge=1)
    """How many of those there may be."""
    contexts_ttl_s: float = Field(default=30 * 86400.0, gt=0)
    """The longest time for which a client may keep one."""
    admin: bool = False
    """Whether `POST /v1/cartridges/...` may preload, pin, unpin and evict."""

    def salt_secret(self) -> bytes | None:
        """Return the secret that salts are made with; None where each server makes one. Raises `SettingsError`."""
        if not (secret := os.environ.get(SECRET_VARIABLE, "").encode()):
            return None
        if len(secret) < _LEAST_SECRET_BYTES:
            raise SettingsError(
                f"${SECRET_VARIABLE} has {len(secret)} bytes; a secret has {_LEAST_SECRET_BYTES} or more: openssl rand -hex 32"
            )
        return secret

    @property
    def s3(self) -> dict[str, Any]:
        """The arguments of `S3Source`."""
        names = ("endpoint_url", "region", "connections", "part_bytes", "timeout_s")
        return {name: getattr(self, f"s3_{name}") for name in names}

    @property
    def registry_path(self) -> Path:
        """The registry file; of a `library` the copy that this machine follows."""
        if self.library is None:
            return self.home / "registry.sqlite"
        whose = blake3(f"{self.s3_endpoint_url or ''} {self.library}".encode()).hexdigest(8)
        return self.cache_dir / "libraries" / f"{whose}.sqlite"

    @property
    def cartridges_dir(self) -> Path:
        """Where `build` puts artefacts: `<id>/<version>`."""
        return self.home / "cartridges"

    @property
    def contexts_dir(self) -> Path:
        """What clients had made; with a `library` until it is published."""
        return self.registry_path.parent / "contexts"

    @property
    def quarantine_dir(self) -> Path:
        """Where quarantined cartridges are noted."""
        return self.home / "quarantine"

    @property
    def manifests_dir(self) -> Path:
        """Where manifests and token ids of remote artefacts are kept."""
        return self.cache_dir / "manifests"

    @property
    def cache_dir(self) -> Path:
        """Where the disk tier lies."""
        return self.disk_dir or _directory(CACHE_VARIABLE, "XDG_CACHE_HOME", "~/.cache")


def from_mapping(values: Mapping[str, Any], prefix: str = "") -> Settings:
    """Return settings from plain values. Raises `SettingsError` naming each wrong or unknown key with `prefix`."""
    try:
        return Settings(**values)
    except ValidationError as error:
        told = "; ".join(f"{prefix}{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        told = told.replace("Value error, ", "").replace("Extra inputs are not permitted", "no such setting")
        if told.endswith("no such setting"):
            told += f". Settings are: {', '.join(Settings.model_fields)}"
        raise SettingsError(told) from None


def from_extra_config(extra_config: Mapping[str, Any] | None, class_name: str = "CartridgeBackend") -> Settings:
    """Return the settings of the plugin `class_name` in LMCache's `extra_config`.

    Raises `SettingsError` naming the full key of whatever is wrong, and when there is not exactly one such plugin.
    """
    extra = extra_config if isinstance(extra_config, Mapping) else {}
    names = [
        key.removeprefix("storage_plugin.").removesuffix(".class_name")
        for key, value in extra.items()
        if str(key).startswith("storage_plugin.") and key.endswith(".class_name") and value == class_name
    ]
    if len(names) != 1:
        raise SettingsError(
            f"{len(names)} storage plugins have class_name {class_name} in extra_config; there must be one: {names}. LMCache "
            "takes flat keys alone, as `lmcache-cartridge config lmcache.yaml` shows them"
        )
    prefix = f"storage_plugin.{names[0]}."
    own = {key.removeprefix(prefix): value for key, value in extra.items() if key.startswith(prefix)}
    return from_mapping({k: v for k, v in own.items() if k not in ("module_path", "class_name")}, prefix)


def from_environment() -> Settings:
    """Return the settings in `LMCACHE_EXTRA_CONFIG`, or else in the YAML that `LMCACHE_CONFIG_FILE` names, as LMCache
    takes them. Raises `SettingsError`."""
    return from_extra_config(_extra_config())


def _extra_config() -> Any:
    import yaml

    extra: Any = os.environ.get("LMCACHE_EXTRA_CONFIG", "").strip("'\"")
    where = "LMCACHE_EXTRA_CONFIG" if extra else os.environ.get("LMCACHE_CONFIG_FILE")
    if not where:
        raise SettingsError("LMCACHE_CONFIG_FILE is not set; the cartridge settings stand in that YAML's extra_config")
    try:
        if not extra:
            extra = (yaml.safe_load(Path(where).read_text()) or {}).get("extra_config")
        return yaml.safe_load(extra) if isinstance(extra, str) else extra
    except (OSError, UnicodeDecodeError, AttributeError, yaml.YAMLError) as error:
        raise SettingsError(f"{where}: {error}") from error
