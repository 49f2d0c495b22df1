"""`compact`, and `build --compact`: a cartridge much shorter than its document, in seconds and without training."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import CartridgeError
from .options import (
    NAME,
    Verb,
    add_accept,
    add_device,
    add_length,
    add_lora,
    add_no_promote,
    check_accept,
    check_files,
    check_numbers,
    keep,
    load_model,
    next_version,
    registry_of,
)
from .show import bars, fields, say, show, size

if TYPE_CHECKING:
    from ..artifact.manifest import Manifest
    from ..library.registry import Registry
    from ..make.compact.wanted import Wanted


def add(verb: Verb) -> None:
    """Add the command to the command line."""
    smaller = verb(
        "compact", _compact, "Make a short cartridge of a registered prefill cartridge, in seconds and without training.",
        "compact handbook --model ./llama --id handbook-4x --compact 4x",
    )  # fmt: skip
    option = smaller.add_argument
    option("name", help=f"{NAME}; it stays as it is")
    option("--model", required=True, help="directory or cached Hub id of the model it was built with")
    add_lora(smaller)
    option("--id", required=True, help="name of the new cartridge")
    option("--chunk-size", type=int, help="tokens a chunk, as the engine's (default: the cartridge's)")
    option(
        "--payload", choices=("plain", "int8"), default="plain", help="store KV as it is, or in int8 at half the bytes"
    )
    add_device(smaller)
    add_no_promote(smaller)
    add_options(smaller, required=True)


def add_options(parser: argparse.ArgumentParser, *, required: bool = False) -> None:
    """Add the options that say what to compact to, which may be `required`, and how."""
    group = parser.add_argument_group("compaction: fewer positions than the document has tokens")
    add_length(group, "--compact", required=required)
    group.add_argument(
        "--questions", type=Path, metavar="FILE",
        help='what to be good at: JSON lines {"question": ...} (default: the document, read once more behind itself)',
    )  # fmt: skip
    group.add_argument(
        "--held-out", type=Path, metavar="FILE",
        help="questions to measure it by, never to make it for (default: a tenth of the others)",
    )  # fmt: skip
    group.add_argument(
        "--ask-as", choices=("chat", "text"), help="as for train (default: chat, if the model has a template)"
    )
    group.add_argument(
        "--refine", type=int, metavar="N",
        help="with questions: N gradient steps for each layer alone, kept where a tenth of the questions, set apart, is "
        "answered better so; 0: none (default 30)",
    )  # fmt: skip
    add_accept(group, "the answers of the questions kept apart or, without any, to the model's first choices")


def is_wanted(arguments: argparse.Namespace) -> bool:
    """Whether a command line asks to compact."""
    return arguments.compact is not None or arguments.positions is not None


def check(arguments: argparse.Namespace) -> None:
    """Raise `CartridgeError` for options that do not go together, or are too small."""
    check_numbers(arguments, at_least_one=("positions", "chunk_size"), at_least_zero=("refine",))
    check_files(arguments.questions, arguments.held_out)
    check_accept(arguments)
    names = ("questions", "held_out", "ask_as", "refine", "accept")
    given = [name for name in names if getattr(arguments, name) is not None]
    if given and not is_wanted(arguments):
        raise CartridgeError(f"--{given[0].replace('_', '-')} is for a compaction; say how short: --compact 4x")
    if arguments.refine and not arguments.questions:
        raise CartridgeError("--refine goes by --questions: without any it made cartridges that answer less")
    if is_wanted(arguments) and getattr(arguments, "canary", None):
        raise CartridgeError("--canary is for a cartridge as long as its document; leave it out with --compact")


def build(arguments: argparse.Namespace, registry: Registry) -> None:
    """Carry out `build --compact`."""
    model = load_model(arguments)
    from ..make.compact.job import build_compact

    version, root = next_version(arguments, registry)
    with bars(arguments.format) as progress:
        manifest = build_compact(
            model, arguments.document, root, partial(_wanted, arguments, arguments.chunk_size),
            cartridge_id=arguments.id, version=version, chunk_tokens=arguments.chunk_size, encoding=arguments.payload,
            say=partial(say, form=arguments.format), progress=progress,
        )  # fmt: skip
    _register(arguments, registry, root, manifest)


def _compact(arguments: argparse.Namespace) -> None:
    from ..artifact import reading
    from ..artifact.manifest import check_id

    check_id(arguments.id)
    check(arguments)
    registry = registry_of(arguments)
    location = registry.find(arguments.name)
    source = location.local_root()
    before = reading.load_manifest(source, location.digest)
    chunk = arguments.chunk_size or before.stored.chunk_tokens
    model = load_model(arguments, before.fingerprint)
    from ..make.compact.job import compact_cartridge

    version, root = next_version(arguments, registry)
    with bars(arguments.format) as progress:
        manifest = compact_cartridge(
            model, source, root, partial(_wanted, arguments, chunk), cartridge_id=arguments.id, version=version,
            chunk_tokens=chunk, encoding=arguments.payload, say=partial(say, form=arguments.format), progress=progress,
        )  # fmt: skip
    _register(arguments, registry, root, manifest)


def _wanted(arguments: argparse.Namespace, chunk: int, tokens: int) -> Wanted:
    from ..make import questions
    from ..make.compact.wanted import Wanted
    from ..make.train.initial import positions_of

    positions = positions_of(tokens, chunk, compress=arguments.compact, positions=arguments.positions)
    say(f"p = {positions} positions for a document of {tokens} tokens, {tokens / positions:.1f}x", arguments.format)
    asked, held_out = (questions.read(path) if path else [] for path in (arguments.questions, arguments.held_out))
    given = {name: value for name in ("refine", "accept") if (value := getattr(arguments, name)) is not None}
    return Wanted(positions, asked, held_out, arguments.ask_as, **given)


def _register(arguments: argparse.Namespace, registry: Registry, root: Path, manifest: Manifest) -> None:
    import msgspec

    manifest, result = keep(arguments, registry, manifest, root)
    about, tokens = manifest.provenance.compaction, manifest.document
    assert about is not None and tokens is not None, "compaction writes both"
    result |= {
        "compression": round(tokens.count / manifest.positions, 2),
        "queries": about.queries,
        "query_tokens": about.query_tokens,
        "refine": about.refine,
        "measured": msgspec.to_builtins(about.measured),
        "seconds": about.seconds,
    }
    show(result, fields(result | {"bytes": size(manifest.payload_bytes)}), arguments.format)
