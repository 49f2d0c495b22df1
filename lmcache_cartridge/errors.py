"""Every error this package raises, as one tree.

Each is also a builtin error, so a caller may catch either. A message says what went wrong, for which cartridge, chunk or
file, and what to do.
"""

from __future__ import annotations

ENGINE = (
    "without a GPU: `lmcache-cartridge config requirements-cpu.lock > cpu.lock`, then `pip install --no-deps -r cpu.lock`; "
    "with one: `pip install vllm==0.32.0 lmcache==0.5.6`"
)
"""How to install what serves cartridges, for messages that it lacks."""


class CartridgeError(Exception):
    """Base of every error of this package."""

    digest: str | None = None
    """Content digest of the cartridge at fault, where whoever raised it knew."""

    # KeyError prints the repr of its argument; every message here is a sentence.
    __str__ = Exception.__str__


class SettingsError(CartridgeError, ValueError):
    """A setting is unknown, malformed or contradicts another."""


class ManifestError(CartridgeError, ValueError):
    """A manifest is missing, malformed, or of an unknown format."""


class ArtifactError(CartridgeError, ValueError):
    """An artefact cannot be written or read as it stands."""


class TruncatedPayload(ArtifactError):
    """The payload is shorter than its manifest says."""


class CorruptChunk(ArtifactError):
    """Bytes of a chunk do not have the checksum its manifest names."""


class NonFiniteKV(ArtifactError):
    """A chunk holds NaN or infinity, which attention would spread over the whole answer."""


class ReplacedArtifact(ArtifactError):
    """Another artefact lies where this one was registered."""


class ForeignFormatError(ArtifactError):
    """A checkpoint that another program wrote is not what its format says, or is not safe to read."""


class CartridgeNotFound(CartridgeError, KeyError):
    """No cartridge has this id, version or label."""


class CartridgeExists(CartridgeError, FileExistsError):
    """The id and version are taken; versions are written once."""


class RegistryError(CartridgeError, RuntimeError):
    """The registry cannot be opened, or a newer release wrote it."""


class ModelMismatch(CartridgeError, ValueError):
    """The cartridge was made for another model than the one being served."""


class UnsupportedModel(CartridgeError, ValueError):
    """The model's KV cannot be held in a cartridge; the message says why."""


class UnsupportedEngine(CartridgeError, RuntimeError):
    """This engine configuration would corrupt or lose cartridges; the message says how to fix it."""


class CanaryFailed(CartridgeError, RuntimeError):
    """The model with the stored KV does not predict what it predicts with the document."""


class TrainingDiverged(CartridgeError, ArithmeticError):
    """The loss of a training is no longer finite; its learning rate is too high."""


class SourceError(CartridgeError, OSError):
    """A byte source failed."""


class SourceNotFound(SourceError, FileNotFoundError):
    """There is no such file or object."""


class SourceDenied(SourceError, PermissionError):
    """The source may not be read, or not with the credentials found, or its bucket is not there."""


class SourceTimeout(SourceError, TimeoutError):
    """A read did not end by its deadline."""


class MalformedLocation(SourceError, ValueError):
    """A location is neither an absolute path nor `s3://bucket/prefix`."""


class OverBudget(CartridgeError, MemoryError):
    """A tier's byte budget cannot hold what was asked of it."""


class FleetError(CartridgeError):
    """The service that picks servers cannot do what was asked of it; `status` is that of its HTTP answer."""

    status = 400


class NoTokens(FleetError, ValueError):
    """There is nothing in the request whose blocks could be looked for."""


class NotReplayed(FleetError, RuntimeError):
    """What the servers hold is not known yet: their events were not replayed since the service was started."""

    status = 503


class NoPod(FleetError, RuntimeError):
    """No healthy server is there to pick."""

    status = 503
