"""What commands share: how they are declared, their options, the settings and registry of `--home`, and checks."""

from __future__ import annotations

import inspect
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from contextvars import ContextVar
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from typer import Argument, BadParameter, Exit, Option, Typer

from ..artifact.location import is_remote
from ..errors import CartridgeError, SettingsError
from .show import FORM, say, show

if TYPE_CHECKING:
    from ..artifact.manifest import Manifest
    from ..artifact.model import Fingerprint
    from ..library.registry import Registry
    from ..make.model import CausalModel
    from ..settings import Settings

NAMED = "id (the version it means), id@version or label"
_HOME: ContextVar[Path | None] = ContextVar("home", default=None)

app = Typer(
    name="lmcache-cartridge",
    help="Prepare KV caches of documents once and serve them through unmodified vLLM and LMCache.",
    epilog="State lives under --home, by default $LMCACHE_CARTRIDGE_HOME or ~/.local/share/lmcache-cartridge. S3's server and "
    "credentials come from the environment, as for every AWS tool. Exit status: 0 done; 1 an error, told in one line, or a "
    "check that found something; 2 wrong usage; 130 interrupted. example: lmcache-cartridge demo",
    rich_markup_mode=None,
)


def option(help: str, *names: str, **more: Any) -> Any:
    """Return what Typer is told of an option."""
    return Option(*names, help=help, **more)


def file(help: str) -> Any:
    """Return what Typer is told of an option that names a file, which must be there."""
    return Option(help=help, metavar="FILE", exists=True, dir_okay=False)


def valid_id(id: str | None) -> str | None:
    """Return the id of a cartridge to be made. Raises `ManifestError` for one that may name none."""
    from ..artifact.manifest import check_id

    return None if id is None else check_id(id)


_COMMON = [
    inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)
    for name, default, kind in (
        ("home", None, Annotated[Path | None, option("where the registry and cartridges are kept")]),
        ("form", "text", Annotated[Literal["text", "json"], option("for people or programs", "--format")]),
    )
]

Name = Annotated[str, Argument(help=NAMED)]
Corpus = Annotated[
    list[str],
    Argument(help="many documents in place of --document and --id: text files, directories of them, patterns, or .jsonl "
                  "files of {id, text}; ids are names without suffixes. What is there already is not made again"),
]  # fmt: skip
Id = Annotated[str | None, option("name of the cartridge; another content of it is a new version", callback=valid_id)]
Model = Annotated[str | None, option("directory or cached Hub id of a causal language model")]
Lora = Annotated[
    Path | None,
    option(
        "PEFT LoRA adapter that the model computes with; the cartridge is for requests to that adapter alone",
        metavar="DIR",
    ),
]
ChunkSize = Annotated[int, option("tokens a chunk, as the engine's", min=1)]
ServedChunk = Annotated[int, option("tokens a chunk, as the server's", min=16)]
Dtype = Annotated[
    Literal["auto", "bfloat16", "float16", "float32"],
    option("of the KV, as the engine's; auto: as the model was saved"),
]
Payload = Annotated[
    Literal["plain", "int8"],
    option("store KV as it is, or in int8 at half the bytes of bfloat16; served in the model's dtype either way"),
]
MaxModelLen = Annotated[
    int | None,
    option("as the engine's, for models with longrope (Phi-3 and 4): by it engines take the short or the long factors "
           "(default: the short ones)", min=1),
]  # fmt: skip
Device = Annotated[str, option("where to compute: cpu, cuda, cuda:1; auto: cuda where there is one")]
NoPromote = Annotated[
    bool, option("the new version is had as id@version alone, until `label ID ID@VERSION`", "--no-promote")
]
Library = Annotated[
    str | None,
    option("published library: s3://bucket/prefix, or an absolute directory that machines share (default: the registry of "
           "--home)", metavar="WHERE"),
]  # fmt: skip
Publish = Annotated[
    str | None,
    option("with many documents: a published library that they go to, s3://bucket/prefix or an absolute directory that "
           "machines share (default: the registry of --home)", metavar="WHERE"),
]  # fmt: skip
Ray = Annotated[
    str | None,
    option("with --publish: make them on this Ray cluster, HOST:PORT or auto; its machines have the model and this "
           "package", metavar="ADDRESS"),
]  # fmt: skip
OneDocument = Annotated[Path | None, file("UTF-8 text file")]
Url = Annotated[str | None, option("running server; its key is that in $VLLM_API_KEY")]
ServerModel = Annotated[
    str | None,
    option("what the server is asked for: its model, or the cartridge's LoRA adapter (default: the first it serves)"),
]  # fmt: skip
Vllm = Annotated[
    str,
    option("vLLM's options for servers that are started: --vllm='--max-model-len 8192' (default on CPU --enforce-eager)"),
]  # fmt: skip
AskAs = Annotated[
    Literal["chat", "text"] | None,
    option("a question is a user message, or text as it is (default: chat, if the model has a template)"),
]
Accept = Annotated[
    float | None,
    option("register it if it keeps at least this share of what the document adds to the answers of questions kept apart or, "
           "without any, to the model's first choices; 0: in any case (default 0.8)", min=0, max=1),
]  # fmt: skip
HeldOut = Annotated[
    Path | None,
    file("questions to measure it by, never to make it for or to choose by (default: a tenth of the others)"),
]


def command(example: str, name: str | None = None, group: Typer = app, **settings: Any) -> Callable[[Any], Any]:
    """Return a decorator that makes a command of a function, whose result is its exit status, with --home and --format.

    `example` begins with the command; its help ends with it.
    """

    def add(run: Callable[..., int | None]) -> Callable[..., int | None]:
        @wraps(run)
        def command(home: Path | None, form: str, **given: Any) -> None:
            _HOME.set(home), FORM.set(form)
            if status := run(**given):
                raise Exit(status)

        shape = inspect.signature(run, eval_str=True)
        command.__signature__ = shape.replace(parameters=[*shape.parameters.values(), *_COMMON])  # type: ignore[attr-defined]
        group.command(name, epilog=f"example: lmcache-cartridge {example}", context_settings=settings)(command)
        return run

    return add


def check(given: Mapping[str, Any], *rules: str) -> None:
    """Raise `CartridgeError` with the first of `rules` that the options given break.

    A rule is `--a, --b need --c or --d`, `--a excludes --b, --c`, `build takes one of --a, --b`, or `build needs --a`,
    with a reason behind a semicolon.
    """

    def there(text: str) -> list[bool]:
        names = [name.replace("-", "_") for name in re.findall(r"--([\w-]+)", text)]
        values = [given.get(name, given.get(f"{name}_")) for name in names]
        unsaid = {"payload": "plain"}
        return [value not in (None, False, "", [], unsaid.get(n)) for n, value in zip(names, values, strict=True)]

    for rule in rules:
        first, *rest = map(there, re.split(" needs? | excludes? ", rule.partition(";")[0]))
        if not rest:
            is_met = sum(first) == 1
        elif " exclude" in rule:
            is_met = not (any(first) and any(rest[0]))
        else:
            is_met = any(rest[0]) or (bool(first) and not any(first))
        if not is_met:
            raise CartridgeError(rule)


def listed(text: str) -> list[str]:
    """Return the parts of a list with commas, without spaces around them and without empty ones."""
    return [part.strip() for part in text.split(",") if part.strip()]


def length(text: str) -> tuple[float | None, int | None]:
    """Return what `4x` or `512` says: by how much to compress, or to how many positions."""
    with suppress(ValueError):
        if text.endswith("x") and 1 <= float(text[:-1]) < 1e6:
            return float(text[:-1]), None
        if int(text) >= 1:
            return None, int(text)
    raise BadParameter(f"{text!r} is no length; write 4x, or a number of positions")


def assignment(text: str) -> tuple[str, Any]:
    """Return the name and value in `NAME=VALUE`; a value that is JSON counts as what it says."""
    name, equals, value = text.partition("=")
    if not equals:
        raise SettingsError(f"--set {text}: write --set NAME=VALUE")
    with suppress(json.JSONDecodeError):
        return name, json.loads(value)
    return name, value


def home() -> Path | None:
    """Return what `--home` says."""
    return _HOME.get()


def settings_of(**values: Any) -> Settings:
    """Return the settings of a command: `values` that are not None, and the directory that `--home` names.

    The environment's S3 server is a value too, so that one with credentials in it is refused and never printed.
    """
    from ..settings import from_mapping

    values.setdefault("s3_endpoint_url", os.environ.get("AWS_ENDPOINT_URL_S3") or None)
    if (directory := home()) is not None:
        values["home"] = directory.expanduser().absolute()
    return from_mapping({name: value for name, value in values.items() if value is not None})


def registry_of(*, read_only: bool = False) -> Registry:
    """Return the registry of a command."""
    from ..library.registry import Registry

    return Registry(settings_of().registry_path, read_only=read_only)


@contextmanager
def opened(library: str | None) -> Iterator[Registry]:
    """Lend the registry of a command: the published one of `--library`, as it is now, or that of `--home`."""
    if library is None:
        yield registry_of()
        return
    from ..sources.published import Library

    with Library(settings_of(library=library)) as published:
        published.registry.follow()
        yield published.registry


def stored(name: str) -> tuple[Manifest, Path]:
    """Return a registered cartridge's manifest and directory. Raises `ArtifactError` for one on S3, or one that was replaced."""
    from ..artifact.reading import load_manifest

    found = registry_of(read_only=True).find(name)
    root = found.local_root()
    return load_manifest(root, found.digest), root


def next_version(cartridge_id: str, registry: Registry) -> tuple[int, Path]:
    """Return the version that `--id` gets next, and where its artefact goes."""
    directory = settings_of().cartridges_dir
    version = registry.next_version(cartridge_id, directory)
    return version, directory / cartridge_id / str(version)


def finish(registry: Registry, made: Manifest, root: Path, *, promote: bool, **more: Any) -> None:
    """Register what was made at `root`, and tell of it, and `more`.

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
                say(f"{row.name} is there already, with this content; nothing was added")
                break
    manifest = registry.register(root, promote=promote)
    if unchanged and promote:
        registry.promote(manifest.name)
    tell(registry, manifest, unchanged=unchanged, **more)


def tell(registry: Registry, manifest: Manifest, **more: Any) -> None:
    """Tell of a cartridge that was made and registered."""
    result = {
        "name": manifest.name, "promoted": manifest.name in registry.current([manifest.id]),
        "positions": manifest.positions, "bytes": manifest.payload_bytes, "digest": manifest.digest, **more,
    }  # fmt: skip
    show(result)


def root_of(location: str) -> Path:
    """Return the directory of the manifest of what lies at a location: on S3, of a copy of it as it is there now."""
    if not is_remote(location):
        return Path(location)
    from ..library.manifest_cache import ManifestCache
    from ..sources.s3 import S3Source
    from ..sources.sources import Sources

    settings = settings_of()
    with closing(Sources(S3Source(**settings.s3))) as sources:
        return ManifestCache(settings.manifests_dir, sources).fetch(location, force=True)


def load_model(model: str, made: Fingerprint | None = None, *, weights: bool = True, **options: Any) -> CausalModel:
    """Return a model for `options` that are not None, or for KV as it was `made`. Loads torch.

    Without `weights` it is what its config tells, which computes nothing.
    """
    if made is not None:
        options |= {"dtype": made.dtype, "max_model_len": made.max_model_len}
    options = {name: value for name, value in options.items() if value is not None}
    from ..make.model import CausalModel

    return CausalModel(model, weights=weights, **options)
