"""Every error this package raises, as one tree.

    CartridgeError
    ├── SettingsError       (ValueError)        a setting is unknown, malformed or contradicts another
    ├── ManifestError       (ValueError)        a manifest is missing, malformed, or of an unknown format
    ├── ArtifactError       (ValueError)        an artefact cannot be written or read as it stands
    │   ├── TruncatedPayload                    the payload is shorter than its manifest says
    │   ├── CorruptChunk                        bytes of a chunk do not have the manifest's checksum
    │   ├── WrongShape                          the payload holds tensors of other shapes than its manifest says
    │   ├── WrongDtype                          the payload holds tensors of another dtype than its manifest says
    │   ├── NonFiniteKV                         a chunk holds NaN or infinity
    │   ├── ReplacedArtifact                    another artefact lies where this one was registered
    │   └── ForeignFormatError                  a checkpoint of others is not what its format says, or not safe
    ├── CartridgeNotFound   (KeyError)          no such id, version or label
    ├── CartridgeExists     (FileExistsError)   the id and version are taken
    ├── RegistryError       (RuntimeError)      the registry cannot be opened or is of a newer schema
    ├── ModelMismatch       (ValueError)        the cartridge was made for another model
    ├── ChunkSizeMismatch   (ValueError)        p does not fit the engine's chunk size
    ├── UnsupportedModel    (ValueError)        the model's KV cannot be a cartridge, with the reason
    ├── UnsupportedEngine   (RuntimeError)      this engine would corrupt or lose cartridges, with the fix
    ├── CanaryFailed        (RuntimeError)      the stored KV does not answer as the document does
    ├── TrainingDiverged    (ArithmeticError)   the loss of a training is not finite
    ├── SourceError         (OSError)           a byte source failed; the foreign error is the cause
    │   ├── SourceNotFound  (FileNotFoundError) there is no such file, object or bucket
    │   ├── SourceDenied    (PermissionError)   the source may not be read, or without other credentials
    │   ├── SourceTimeout   (TimeoutError)      a read did not end by its deadline
    │   └── MalformedLocation (ValueError)      neither an absolute path nor `s3://bucket/prefix`
    └── OverBudget          (MemoryError)       a tier's byte budget cannot hold what was asked

Each is also the builtin in brackets, so a caller may catch either. A message says what went wrong, for which
cartridge, chunk or file, and what to do.
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


class WrongShape(ArtifactError):
    """The payload's header names tensors of other shapes than the manifest."""


class WrongDtype(ArtifactError):
    """The payload's header names tensors of another dtype than the manifest."""


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


class ChunkSizeMismatch(CartridgeError, ValueError):
    """A trained cartridge's p is no multiple of the engine's chunk size."""


class UnsupportedModel(CartridgeError, ValueError):
    """The model's KV cannot be held in a cartridge; the message says why."""


class UnsupportedEngine(CartridgeError, RuntimeError):
    """This engine configuration would corrupt or lose cartridges; the message says how to fix it."""


class CanaryFailed(CartridgeError, RuntimeError):
    """The model with the stored KV does not predict what it predicts with the document."""


class TrainingDiverged(CartridgeError, ArithmeticError):
    """The loss of a training is no longer finite; its learning rate is too high."""


class SourceError(CartridgeError, OSError):
    """A byte source failed; `__cause__` is the foreign error."""


class SourceNotFound(SourceError, FileNotFoundError):
    """There is no such file, object or bucket."""


class SourceDenied(SourceError, PermissionError):
    """The source may not be read, or not with the credentials found."""


class SourceTimeout(SourceError, TimeoutError):
    """A read did not end by its deadline."""


class MalformedLocation(SourceError, ValueError):
    """A location is neither an absolute path nor `s3://bucket/prefix`."""


class OverBudget(CartridgeError, MemoryError):
    """A tier's byte budget cannot hold what was asked of it."""
