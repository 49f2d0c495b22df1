"""What commands share: options, the settings and registry of `--home`, where artefacts lie, and checks without torch."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..artifact.location import is_remote
from ..errors import ArtifactError, CartridgeError
from .show import say, working

if TYPE_CHECKING:
    from ..artifact.manifest import Manifest
    from ..artifact.model import Fingerprint
    from ..library.registry import Registry
    from ..make.model import CausalModel
    from ..settings import Settings

Verb = Callable[[str, Callable[[argparse.Namespace], int | None], str, str], argparse.ArgumentParser]
"""Called with (name, what runs it, summary, example); returns its parser."""
NAME = "id (the version it means), id@version or label"


def add_made(parser: Any) -> None:
    """Add what every command that makes and registers a cartridge of a model's KV is told of it; see `check_made`."""
    option = parser.add_argument
    option("--model", required=True, help="directory or cached Hub id of a causal language model")
    add_lora(parser)
    option("--id", required=True, help="name of the cartridge; another content of it is a new version")
    option("--chunk-size", type=int, default=256, help="tokens a chunk, as the engine's (default 256)")
    option("--dtype", default="auto", help="of the KV, as the engine's: bfloat16, float16, float32 (default auto)")
    option(
        "--payload",
        choices=("plain", "int8"),
        default="plain",
        help="store KV as it is, or in int8 at half the bytes of bfloat16; served in the model's dtype either way",
    )
    add_max_model_len(parser)
    add_device(parser)
    add_no_promote(parser)


def add_max_model_len(parser: Any) -> None:
    """Add the option by which models with longrope are settled."""
    parser.add_argument(
        "--max-model-len", type=int, metavar="N",
        help="as the engine's, for models with longrope (Phi-3 and 4): by it engines take the short or the long factors "
        "(default: the short ones)",
    )  # fmt: skip


def add_lora(parser: Any, when: str = "") -> None:
    """Add the option that names a LoRA adapter for the model to compute with."""
    parser.add_argument(
        "--lora", type=Path, metavar="DIR",
        help=f"{when}PEFT LoRA adapter that the model computes with; the cartridge is for requests to that adapter alone",
    )  # fmt: skip


def add_server_model(parser: Any) -> None:
    """Add the option that says what a server is asked for."""
    parser.add_argument(
        "--server-model",
        metavar="NAME",
        help="its model, or the LoRA adapter of the cartridge (default: the first it serves)",
    )


def add_no_promote(parser: Any) -> None:
    """Add the option that leaves an id where it is; `arguments.promote` is False with it."""
    parser.add_argument(
        "--no-promote",
        dest="promote",
        action="store_false",
        help="the new version is had as id@version alone, until `lmcache-cartridge label ID ID@VERSION`; the id means what it meant",
    )


def add_library(parser: Any, *, required: bool = False) -> None:
    """Add what names a published library, and the server of S3."""
    parser.add_argument(
        "--library",
        required=required,
        metavar="WHERE",
        help="published library: s3://bucket/prefix, or an absolute directory that machines share"
        + ("" if required else " (default: the registry of --home)"),
    )
    add_s3(parser)


def add_s3(parser: Any) -> None:
    """Add which S3 server it is."""
    parser.add_argument(
        "--endpoint-url",
        help="S3 server (default: $AWS_ENDPOINT_URL_S3, or AWS). Credentials come from the environment, a profile "
        "or a role, as for every AWS tool",
    )
    parser.add_argument("--region", help="S3 region (default: that of the environment or profile)")


def add_device(parser: Any, when: str = "") -> None:
    """Add the option that says where torch computes."""
    parser.add_argument(
        "--device", default="auto", help=f"{when}where to compute: cpu, cuda, cuda:1 (default: cuda where there is one)"
    )


def add_length(parser: Any, option: str, *, required: bool) -> None:
    """Add `option`, by how much to compress, and `--positions`, of which one is given at most."""
    length = parser.add_mutually_exclusive_group(required=required)
    length.add_argument(
        option, type=factor, metavar="4x", help="p as a fraction of the document's tokens, rounded to whole chunks"
    )
    length.add_argument("--positions", type=int, help="p, rounded likewise")


def add_accept(parser: Any, of_what: str) -> None:
    """Add the share of `of_what` that a cartridge must keep to be registered; None where it is not given."""
    parser.add_argument(
        "--accept", type=float, metavar="SHARE",
        help=f"register it if it keeps at least this share of what the document adds to {of_what}; 0: in any case "
        "(default 0.8)",
    )  # fmt: skip


def factor(text: str) -> float:
    """Return the number in `4x`, for argparse."""
    try:
        found = float(text.removesuffix("x"))
    except ValueError:
        found = 0.0
    if not 1 <= found < 1e6:
        raise argparse.ArgumentTypeError(f"{text!r} is no factor; write 4x")
    return found


def settings_of(arguments: argparse.Namespace, **values: Any) -> Settings:
    """Return the settings of a command: `values`, the directory that `--home` names, a library and its server."""
    from ..settings import from_mapping

    given = {"library": "library", "endpoint_url": "s3_endpoint_url", "region": "s3_region"}
    values |= {name: value for option, name in given.items() if (value := getattr(arguments, option, None)) is not None}
    if arguments.home is not None:
        values["home"] = arguments.home.expanduser().absolute()
    return from_mapping(values)


def registry_of(arguments: argparse.Namespace, *, read_only: bool = False) -> Registry:
    """Return the registry of a command."""
    from ..library.registry import Registry

    return Registry(settings_of(arguments).registry_path, read_only=read_only)


@contextmanager
def opened(arguments: argparse.Namespace) -> Iterator[Registry]:
    """Lend the registry of a command: the published one of `--library`, as it is now, or that of `--home`."""
    if arguments.library is None:
        yield registry_of(arguments)
        return
    from ..sources.published import Library

    with Library(settings_of(arguments)) as library:
        library.registry.follow()
        yield library.registry


def next_version(arguments: argparse.Namespace, registry: Registry) -> tuple[int, Path]:
    """Return the version that `--id` gets next, and where its artefact goes."""
    directory = settings_of(arguments).cartridges_dir
    version = registry.next_version(arguments.id, directory)
    return version, directory / arguments.id / str(version)


def keep(
    arguments: argparse.Namespace, registry: Registry, made: Manifest, root: Path
) -> tuple[Manifest, dict[str, Any]]:
    """Register what was made at `root`, and return what the id has of it now, and what programs are told of it.

    Where a whole version of the id has the same content and canary already, what was made is deleted.
    """
    import shutil

    from ..artifact.reading import load_manifest

    unchanged = False
    for row in registry.having([made.digest]):
        with suppress(CartridgeError):  # one that is broken, or elsewhere, is no reason to have none
            if row.id == made.id and load_manifest(row.local_root()).canary == made.canary:
                shutil.rmtree(root)
                root, unchanged = row.local_root(), True
                say(f"{row.name} is there already, with this content; nothing was added", arguments.format)
                break
    manifest = registry.register(root, promote=arguments.promote)
    if unchanged and arguments.promote:
        registry.promote(manifest.name)
    return manifest, told(registry, manifest) | {"unchanged": unchanged}


def copy_of(arguments: argparse.Namespace, location: str) -> Path:
    """Return a local copy of the manifest and token ids of an artefact on S3, as they are there now."""
    from ..library.manifest_cache import ManifestCache
    from ..sources.s3 import S3Source
    from ..sources.sources import Sources

    settings = settings_of(arguments)
    with closing(Sources(S3Source(**settings.s3))) as sources:
        return ManifestCache(settings.manifests_dir, sources).fetch(location, force=True)


def root_of(arguments: argparse.Namespace, location: str) -> Path:
    """Return the directory that holds the manifest of what lies at a location."""
    return copy_of(arguments, location) if is_remote(location) else Path(location)


def load_model(arguments: argparse.Namespace, made: Fingerprint | None = None) -> CausalModel:
    """Return the model of `--model`, `--dtype`, `--max-model-len` and `--device`, or as one was `made`. Loads torch."""
    with working("load the model", arguments.format):
        from ..make.model import CausalModel

        options = ("dtype", "device", "lora", "max_model_len")
        given = {name: value for name in options if (value := getattr(arguments, name, None)) is not None}
        if made is not None:
            given |= {"dtype": made.dtype, "max_model_len": made.max_model_len}
        return CausalModel(arguments.model, **given)


def load_config(arguments: argparse.Namespace) -> CausalModel:
    """Return what is known of the model of `--model` and `--lora` without its weights, for KV of `--dtype`."""
    from ..make.light import ConfigModel

    return ConfigModel(arguments.model, dtype=arguments.dtype, lora=arguments.lora)


def check_files(*paths: Path | None) -> None:
    """Raise `ArtifactError` for a path that is given and no file."""
    for path in paths:
        if path is not None and not path.is_file():
            raise ArtifactError(f"{path}: no such file")


def check_accept(arguments: argparse.Namespace) -> None:
    """Raise `CartridgeError` for an `--accept` that is no share."""
    if not 0 <= (arguments.accept or 0) <= 1:
        raise CartridgeError(f"--accept {arguments.accept:g} must be a share from 0 to 1")


def check_numbers(
    arguments: argparse.Namespace, *, at_least_one: tuple[str, ...], at_least_zero: tuple[str, ...] = ()
) -> None:
    """Raise `ArtifactError` for an option that is given and too small."""
    for least, names in ((1, at_least_one), (0, at_least_zero)):
        for name in names:
            value = getattr(arguments, name)
            if value is not None and value < least:
                raise ArtifactError(f"--{name.replace('_', '-')} {value} must be at least {least}")


def check_made(arguments: argparse.Namespace, *files: Path | None) -> None:
    """Check the options of `add_made` before torch is loaded. Raises `ArtifactError`, also for files that are not there."""
    from ..artifact.manifest import check_id
    from ..artifact.model import DTYPE_BYTES

    check_id(arguments.id)
    check_numbers(arguments, at_least_one=("chunk_size",))
    check_files(*files)
    if arguments.dtype not in ("auto", *DTYPE_BYTES):
        raise ArtifactError(f"--dtype {arguments.dtype} is not one of auto, {', '.join(DTYPE_BYTES)}")


def told(registry: Registry, manifest: Manifest) -> dict[str, Any]:
    """Return what programs are told of every cartridge that was made and registered."""
    return {
        "name": manifest.name, "promoted": manifest.name in registry.current([manifest.id]),
        "positions": manifest.positions, "bytes": manifest.payload_bytes, "digest": manifest.digest,
    }  # fmt: skip
