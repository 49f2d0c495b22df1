"""Making: `build`, `import`, `compress` and `export`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from .authoring import add_no_promote, add_payload, check_dtype, check_files, check_numbers, warn, warnings_of
from .context import Verb, local_root, registry_of, settings_of
from .output import fields, progress, show, size


def add(verb: Verb) -> None:
    """Add the commands to the command line."""
    build = verb("build", _build, "Compute a document's KV with its model, check it, and register it.",
                 "build --model ./llama --document handbook.txt --id handbook")  # fmt: skip
    build.add_argument("--model", required=True, help="directory or cached Hub id of a causal language model")
    build.add_argument("--document", required=True, type=Path, help="UTF-8 text file")
    build.add_argument("--id", required=True, help="name of the cartridge; building it again makes a new version")
    build.add_argument("--chunk-size", type=int, default=256, help="tokens a chunk, as the engine's (default 256)")
    build.add_argument(
        "--dtype", default="auto", help="bfloat16, float16 or float32; as the engine's KV (default auto)"
    )
    add_payload(build)
    build.add_argument("--device", default="cpu", help="where to compute: cpu, cuda, cuda:1 (default cpu)")
    add_no_promote(build)
    build.add_argument("--canary", help="text after the document whose prediction must not change")

    brought = verb("import", _import, "Make a cartridge of KV that PEFT, HazyResearch's code or others trained or saved.",
                   "import ./adapter --model ./llama --id handbook")  # fmt: skip
    brought.add_argument(
        "path",
        help="PEFT CARTRIDGE or PREFIX_TUNING directory or its Hub id; .pt file of trainable_keys and frozen_keys or "
        "fixed_keys, of a list of (K, V), or of token_ids and kv_cache; a JSON file of token ids",
    )
    brought.add_argument("--model", required=True, help="directory or cached Hub id of the model it was made for")
    brought.add_argument("--id", required=True, help="name of the cartridge; importing it again makes a new version")
    brought.add_argument("--label", help="also point this label at it")
    brought.add_argument(
        "--document", type=Path, help="text that a trained cartridge stands for, for the setting on_miss=document"
    )
    brought.add_argument("--chunk-size", type=int, default=256, help="tokens a chunk, as the server's (default 256)")
    brought.add_argument(
        "--dtype", default="auto", help="of the engine's KV: bfloat16, float16, float32 (default auto)"
    )
    add_payload(brought)
    brought.add_argument("--round", action="store_true", help="allow a KV dtype that does not hold every value")
    brought.add_argument(
        "--axes", choices=("HTD", "THD"), help="heads before positions or after, where shapes leave that open"
    )
    brought.add_argument(
        "--drop-frozen", action="store_true", help="leave frozen positions out: distractors of joint training, no sink"
    )
    add_no_promote(brought)
    brought.add_argument("--device", default="cpu", help="where to run the model: cpu, cuda, cuda:1 (default cpu)")

    smaller = verb("compress", _compress, "Make a cartridge in int8 of one that is registered, at half the bytes of bfloat16.",
                   "compress handbook --id handbook-int8")  # fmt: skip
    smaller.add_argument("name", help="id (the version it means), id@version or label; it stays as it is")
    smaller.add_argument("--id", required=True, help="name of the new cartridge, or the same for a new version of it")
    add_no_promote(smaller)

    export = verb("export", _export, "Write a cartridge's KV as a PEFT adapter or a HazyResearch checkpoint.",
                  "export handbook --format peft --output ./adapter")  # fmt: skip
    export.add_argument("name", help="id (the version it means), id@version or label")
    export.add_argument("--format", required=True, choices=("peft", "hazy"), help="what to write")
    export.add_argument("--output", required=True, type=Path, help="directory to make; must be new or empty")
    export.add_argument("--base-model", help="Hub id of the model, for the model card (default: as the cartridge says)")


def _build(arguments: argparse.Namespace) -> None:
    registry = _checked(arguments)
    from ..make import prefill
    from ..make.model import CausalModel

    model = CausalModel(arguments.model, dtype=arguments.dtype, device=arguments.device)
    version, root = _next(arguments, registry)
    with progress("prefill", " tokens", arguments.format) as shown:
        manifest = prefill.build(
            model, arguments.document, root, cartridge_id=arguments.id, version=version,
            chunk_tokens=arguments.chunk_size, canary=arguments.canary or prefill.CANARY, encoding=arguments.payload,
            progress=shown,
        )  # fmt: skip
    registry.register(root, promote=arguments.promote)
    canary = manifest.provenance.canary
    result = {
        "name": manifest.name,
        "promoted": manifest.name in registry.current([manifest.id]),
        "positions": manifest.positions,
        "bytes": manifest.payload.size_bytes,
        "digest": manifest.digest,
        "canary_top1_equal": canary.top1_equal,
        "canary_max_abs_logit_difference": canary.max_abs_logit_difference,
        "canary_sensitivity": manifest.canary and manifest.canary.sensitivity,
        "warnings": warnings_of(manifest.positions),
    }
    warn(result["warnings"], arguments.format)
    readable = {name: value for name, value in result.items() if name != "warnings"}
    show(result, fields(readable | {"bytes": size(result["bytes"])}), arguments.format)


def _import(arguments: argparse.Namespace) -> None:
    registry = _checked(arguments)
    from ..make.foreign import adapter, convert
    from ..make.foreign.axes import READINGS
    from ..make.model import CausalModel

    path = adapter.locate(arguments.path)
    foreign = convert.recognise(path, drop_frozen=arguments.drop_frozen)
    foreign = foreign._replace(name=None if path == Path(arguments.path) else arguments.path)
    model = CausalModel(arguments.model, dtype=arguments.dtype, device=arguments.device)
    version, root = _next(arguments, registry)
    with progress("import", " positions", arguments.format) as shown:
        imported = convert.build(
            model, foreign, root, cartridge_id=arguments.id, version=version, chunk_tokens=arguments.chunk_size,
            document=arguments.document, reading=arguments.axes, rounding=arguments.round, encoding=arguments.payload,
            progress=shown,
        )  # fmt: skip
    manifest = registry.register(root, promote=arguments.promote)
    if arguments.label:
        registry.label(arguments.label, manifest.name)
    warn(imported.warnings, arguments.format)
    result = {
        "name": manifest.name,
        "promoted": manifest.name in registry.current([manifest.id]),
        "source_format": imported.form,
        "kind": manifest.kind,
        "evidence": imported.evidence,
        "positions": manifest.positions,
        "axes": imported.axes,
        "dtype": imported.dtype,
        "bytes": manifest.payload_bytes,
        "chunk_sizes": list(imported.chunk_sizes),
        "label": arguments.label,
        "digest": manifest.digest,
        "warnings": list(imported.warnings),
    }
    readable = result | {
        "bytes": size(result["bytes"]),
        "chunk_sizes": " ".join(map(str, imported.chunk_sizes)) or "none",
    }
    if imported.axes:
        readable["axes"] = f"{imported.axes}: {', '.join(READINGS[imported.axes])}, head size"
    del readable["warnings"]
    show(result, fields({k: v for k, v in readable.items() if v is not None}), arguments.format)


def _compress(arguments: argparse.Namespace) -> None:
    from ..artifact.manifest import check_id

    check_id(arguments.id)
    registry = registry_of(arguments)
    before = _local(registry, arguments.name)
    from ..make.compress import compress

    version, root = _next(arguments, registry)
    with progress("compress", " chunks", arguments.format) as shown:
        manifest = compress(Path(before.location), root, cartridge_id=arguments.id, version=version, progress=shown)
    registry.register(root, promote=arguments.promote)
    result = {
        "name": manifest.name,
        "promoted": manifest.name in registry.current([manifest.id]),
        "positions": manifest.positions,
        "bytes": manifest.payload_bytes,
        "bytes_before": before.bytes,
        "digest": manifest.digest,
    }
    readable = result | {name: size(result[name]) for name in ("bytes", "bytes_before")}
    show(result, fields(readable), arguments.format)


def _checked(arguments: argparse.Namespace) -> Any:
    """Check what is cheap to check, before torch is loaded, and return the registry."""
    from ..artifact.manifest import check_id

    check_id(arguments.id)
    check_files(arguments.document)
    check_numbers(arguments, at_least_one=("chunk_size",))
    check_dtype(arguments)
    return registry_of(arguments)


def _next(arguments: argparse.Namespace, registry: Any) -> tuple[int, Path]:
    """Return the version that `--id` gets next, and where its artefact goes."""
    directory = settings_of(arguments).cartridges_dir
    version = registry.next_version(arguments.id, directory)
    return version, directory / arguments.id / str(version)


def _local(registry: Any, name: str) -> Any:
    """Return the registry's row of an artefact that lies in a directory. Raises `ArtifactError` if it lies on S3, or was replaced."""
    from ..artifact import reading

    location = registry.find(name)
    reading.load_manifest(local_root(location), location.digest)
    return location


def _export(arguments: argparse.Namespace) -> None:
    root = Path(_local(registry_of(arguments), arguments.name).location)
    from ..make.foreign.export import export

    manifest = export(root, arguments.format, arguments.output, base_model=arguments.base_model)
    result = {"name": manifest.name, "format": arguments.format, "output": str(arguments.output)}
    text = f"{manifest.name} as {arguments.format} in {arguments.output}"
    if manifest.payload.encoding != "plain":
        result["encoding"] = manifest.payload.encoding
        text += f", from {manifest.payload.encoding} to {manifest.fingerprint.dtype}"
    show(result, text, "json" if arguments.json else "terminal")
