"""Commands that make cartridges and write them for others: `build`, `import`, `compress` and `export`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import CartridgeError
from . import compact
from .options import (
    NAME,
    Verb,
    add_made,
    add_no_promote,
    check_made,
    keep,
    load_config,
    load_model,
    next_version,
    registry_of,
    told,
)
from .show import bars, fields, show, size, warn, working

if TYPE_CHECKING:
    from ..artifact.manifest import Manifest
    from ..library.registry import Registry, RegistryEntry
    from ..make.document import Document
    from ..make.model import CausalModel

USUAL_CHUNKS = 16, 256
"""Chunk sizes of servers: the smallest that is usual, and the default."""


def add(verb: Verb) -> None:
    """Add the commands to the command line."""
    build = verb(
        "build",
        _build,
        "Compute a document's KV with its model, check it, and register it.",
        "build --model ./llama --document handbook.txt --id handbook",
    )
    add_made(build)
    build.add_argument("--document", type=Path, help="UTF-8 text file")
    build.add_argument(
        "--chat", nargs="?", const="system", metavar="ROLE",
        help="the document is a message of this role (default system) in the model's chat template; what requests send "
        "as messages goes on behind it",
    )  # fmt: skip
    build.add_argument(
        "--messages", type=Path, metavar="FILE",
        help="the first messages of a chat in place of a document, as a JSON list of {role, content}. With "
        "--url the server's template makes tokens of them, and prompts go on behind those as they are",
    )  # fmt: skip
    build.add_argument(
        "--chat-template", type=Path, metavar="FILE", help="chat template in the place of the model's, as vLLM is given"
    )
    build.add_argument(
        "--chat-arguments",
        type=_object,
        metavar="JSON",
        help="arguments of the template, as requests' chat_template_kwargs",
    )
    build.add_argument(
        "--token-ids", type=Path, metavar="FILE",
        help="token ids made elsewhere, as JSON, .npy or numbers with spaces; --document is what they were made of",
    )  # fmt: skip
    build.add_argument(
        "--url", metavar="URL",
        help="have this server compute the KV, in its dtype and with its kernels; it runs `serve --l1-bytes` in-process "
        "with the setting admin. --model makes the canary. Its key is that in $VLLM_API_KEY",
    )  # fmt: skip
    build.add_argument(
        "--no-compare", dest="compare", action="store_false",
        help="with --url: do not load the model's weights, as of a quantised model that servers alone can compute; "
        "the fingerprints are compared all the same, and the cartridge gets no canary",
    )  # fmt: skip
    build.add_argument("--canary", help="text after the document whose prediction must not change")
    compact.add_options(build)

    brought = verb(
        "import",
        _import,
        "Make a cartridge of KV that PEFT, HazyResearch's code or others trained or saved.",
        "import ./adapter --model ./llama --id handbook",
    )
    option = brought.add_argument
    option(
        "path",
        help="PEFT CARTRIDGE or PREFIX_TUNING directory or its Hub id; .pt file of trainable_keys and frozen_keys or "
        "fixed_keys, of a list of (K, V), or of token_ids and kv_cache; a JSON file of token ids",
    )
    add_made(brought)
    option("--label", help="also point this label at it")
    option("--document", type=Path, help="text that a trained cartridge stands for, for the setting on_miss=document")
    option("--round", action="store_true", help="allow a KV dtype that does not hold every value")
    option("--axes", choices=("HTD", "THD"), help="heads before positions or after, where shapes leave that open")
    option(
        "--no-compare",
        dest="compare",
        action="store_false",
        help="do not load the model's weights: KV counts as trained, its token ids as its document, and it gets no canary",
    )
    option(
        "--drop-frozen", action="store_true", help="leave frozen positions out: distractors of joint training, no sink"
    )

    smaller = verb(
        "compress",
        _compress,
        "Make a cartridge in int8 of one that is registered, at half the bytes of bfloat16.",
        "compress handbook --id handbook-int8",
    )
    smaller.add_argument("name", help=f"{NAME}; it stays as it is")
    smaller.add_argument("--id", required=True, help="name of the new cartridge, or the same for a new version of it")
    add_no_promote(smaller)

    export = verb(
        "export",
        _export,
        "Write a cartridge's KV as a PEFT adapter or a HazyResearch checkpoint.",
        "export handbook --to peft --output ./adapter",
    )
    export.add_argument("name", help=NAME)
    export.add_argument("--to", required=True, choices=("peft", "hazy"), help="what to write")
    export.add_argument("--output", required=True, type=Path, help="directory to make; must be new or empty")
    export.add_argument("--base-model", help="Hub id of the model, for the model card (default: as the cartridge says)")


def _build(arguments: argparse.Namespace) -> None:
    _check_what(arguments)
    compact.check(arguments)
    check_made(arguments, arguments.document, arguments.messages, arguments.token_ids, arguments.chat_template)
    if arguments.url is not None and arguments.lora is not None:
        raise CartridgeError("--url has the base model compute; leave --lora or --url out")
    if arguments.url is not None and compact.is_wanted(arguments):
        raise CartridgeError("a compaction reads the document itself; leave --url out")
    if compact.is_wanted(arguments) and not arguments.compare:
        raise CartridgeError("a compaction computes with the model's weights; leave --no-compare out")
    if arguments.url is None and not arguments.compare:
        raise CartridgeError("--no-compare has a server compute the KV; it goes with --url")
    if compact.is_wanted(arguments):
        compact.build(arguments, registry_of(arguments))
        return
    registry = registry_of(arguments)
    model = load_model(arguments) if arguments.compare else load_config(arguments)
    from ..make import prefill

    version, root = next_version(arguments, registry)
    made: dict[str, Any] = {"cartridge_id": arguments.id, "version": version, "encoding": arguments.payload,
                            "canary": arguments.canary or prefill.CANARY}  # fmt: skip
    with bars(arguments.format) as progress:
        if arguments.url is not None:
            manifest = _from_server(arguments, model, root, made | {"progress": progress})
        else:
            manifest = prefill.build(
                model, _read(arguments, model), root, chunk_tokens=arguments.chunk_size, progress=progress, **made
            )
    manifest, result = keep(arguments, registry, manifest, root)
    canary = manifest.provenance.canary
    warnings = _warnings_of(manifest.positions)
    result |= {
        "canary_top1_equal": canary and canary.top1_equal,
        "canary_max_abs_logit_difference": canary and canary.max_abs_logit_difference,
        "canary_sensitivity": manifest.canary and manifest.canary.sensitivity,
    }
    warn(warnings, arguments.format)
    show(result | {"warnings": warnings}, fields(result | {"bytes": size(manifest.payload_bytes)}), arguments.format)


def _check_what(arguments: argparse.Namespace) -> None:
    """Raise `CartridgeError` unless the options say what to build, once."""
    is_document = arguments.document is not None and arguments.token_ids is None
    if is_document + (arguments.messages is not None) + (arguments.token_ids is not None) != 1:
        raise CartridgeError("build needs a --document, the --messages of a conversation, or --token-ids; one of them")
    if arguments.chat is not None and not is_document:
        raise CartridgeError(
            "--chat makes a message of a --document; --messages say their roles, and --token-ids have none"
        )
    is_chat = arguments.chat is not None or (arguments.messages is not None and arguments.url is None)
    if not is_chat and (arguments.chat_template is not None or arguments.chat_arguments is not None):
        raise CartridgeError("--chat-template and --chat-arguments go with --chat, or with --messages")
    if is_chat and compact.is_wanted(arguments):
        raise CartridgeError("a compaction stands for a plain document; leave --chat and --messages out")
    if arguments.token_ids is not None and compact.is_wanted(arguments):
        raise CartridgeError("a compaction reads the document itself; leave --token-ids out")


def _object(text: str) -> dict[str, Any]:
    """Return a JSON object, for argparse."""
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON object")
    return found


def _read(arguments: argparse.Namespace, model: CausalModel) -> Document:
    """Return the tokens to build from, and where they came from."""
    from blake3 import blake3

    from ..make.chat import read_chat
    from ..make.document import read_document, read_ids

    if arguments.token_ids is not None:
        read = read_ids(model, arguments.token_ids)
        source = arguments.document or arguments.token_ids
        return read._replace(path=source, blake3=blake3(source.read_bytes()).hexdigest())
    if arguments.chat is None and arguments.messages is None:
        return read_document(model, arguments.document)
    if arguments.chat_template is not None:
        model.tokenizer.chat_template = arguments.chat_template.read_text()
    return read_chat(model, arguments.messages or arguments.document, arguments.chat, arguments.chat_arguments or {})


def _from_server(arguments: argparse.Namespace, model: CausalModel, root: Path, made: dict[str, Any]) -> Manifest:
    """Return the manifest of what a server computed of a document or a conversation."""
    from blake3 import blake3

    from ..make import capture
    from ..make.document import Document
    from ..make.server import Server

    with Server(arguments.url) as server:
        if (file := arguments.messages) is None:
            read = _read(arguments, model)
        else:
            try:
                messages = json.loads(file.read_text())
            except ValueError as error:
                raise CartridgeError(f"{file} is no JSON: {error}") from None
            ids = capture.conversation_ids(server, messages)
            read = Document(file, "", ids, blake3(file.read_bytes()).hexdigest())
        facts: dict[str, Any] = {"document": read.path.name, "document_blake3": read.blake3}
        return capture.build(model, server, read.ids, root, chat=read.chat, compare=arguments.compare, **made, **facts)


def _warnings_of(positions: int) -> list[str]:
    """Return what an author should know of a prefill cartridge too short for a chunk: servers would inject none of it."""
    least, usual = USUAL_CHUNKS
    if positions >= usual:
        return []
    only = f"only one with --chunk-size {positions} or less does" if positions >= least else "none of a usual one does"
    return [
        f"{positions} positions fill no chunk of {usual} tokens, so a server with the default chunk size injects none of "
        f"them and computes the document each time; {only}"
    ]


def _import(arguments: argparse.Namespace) -> None:
    check_made(arguments, arguments.document)
    registry = registry_of(arguments)
    with working("read the checkpoint", arguments.format):
        from ..make.foreign.convert import import_
        from ..make.foreign.fit import READINGS
        from ..make.foreign.recognise import locate, recognise

        path = locate(arguments.path)
        foreign = recognise(path, drop_frozen=arguments.drop_frozen)
    foreign = foreign._replace(name=None if path == Path(arguments.path) else arguments.path)
    model = load_model(arguments) if arguments.compare else load_config(arguments)
    version, root = next_version(arguments, registry)
    with bars(arguments.format) as progress:
        imported = import_(
            model, foreign, root, cartridge_id=arguments.id, version=version, chunk_tokens=arguments.chunk_size,
            document=arguments.document, axes=arguments.axes, rounding=arguments.round, encoding=arguments.payload,
            compare=arguments.compare, progress=progress,
        )  # fmt: skip
    manifest = registry.register(root, promote=arguments.promote)
    if arguments.label:
        registry.label(arguments.label, manifest.name)
    warn(imported.warnings, arguments.format)
    result = told(registry, manifest) | {
        "source_format": imported.form, "kind": manifest.kind, "evidence": imported.evidence, "axes": imported.axes,
        "dtype": imported.dtype, "label": arguments.label,
    }  # fmt: skip
    readable = result | {"bytes": size(manifest.payload_bytes)}
    if imported.axes:
        readable["axes"] = f"{imported.axes}: {', '.join(READINGS[imported.axes])}, head size"
    text = fields(readable)
    show(result | {"warnings": list(imported.warnings)}, text, arguments.format)


def _compress(arguments: argparse.Namespace) -> None:
    from ..artifact.manifest import check_id

    check_id(arguments.id)
    registry = registry_of(arguments)
    before = _local(registry, arguments.name)
    from ..make.write import compress

    version, root = next_version(arguments, registry)
    with bars(arguments.format) as progress:
        manifest = compress(Path(before.location), root, cartridge_id=arguments.id, version=version, progress=progress)
    manifest, result = keep(arguments, registry, manifest, root)
    result |= {"bytes_before": before.bytes}
    readable = result | {"bytes": size(manifest.payload_bytes), "bytes_before": size(before.bytes)}
    show(result, fields(readable), arguments.format)


def _export(arguments: argparse.Namespace) -> None:
    root = Path(_local(registry_of(arguments), arguments.name).location)
    from ..make.foreign.export import export

    with bars(arguments.format) as progress:
        manifest = export(root, arguments.to, arguments.output, base_model=arguments.base_model, progress=progress)
    result = {"name": manifest.name, "format": arguments.to, "output": str(arguments.output)}
    text = f"{manifest.name} as {arguments.to} in {arguments.output}"
    if manifest.payload is not None and manifest.payload.encoding != "plain":
        result["encoding"] = manifest.payload.encoding
        text += f", from {manifest.payload.encoding} to {manifest.fingerprint.dtype}"
    show(result, text, arguments.format)


def _local(registry: Registry, name: str) -> RegistryEntry:
    """Return the row of an artefact in a directory. Raises `ArtifactError` for one on S3, or one that was replaced."""
    from ..artifact import reading

    location = registry.find(name)
    reading.load_manifest(location.local_root(), location.digest)
    return location
