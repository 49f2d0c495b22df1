"""Making: `build`, `import` and `export`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ..output import fields, show, size
from .context import Verb, local_root, registry_of, settings_of


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
    build.add_argument("--device", default="cpu", help="where to compute: cpu, cuda, cuda:1 (default cpu)")
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
    brought.add_argument("--round", action="store_true", help="allow a KV dtype that does not hold every value")
    brought.add_argument(
        "--axes", choices=("HTD", "THD"), help="heads before positions or after, where shapes leave that open"
    )
    brought.add_argument(
        "--drop-frozen", action="store_true", help="leave frozen positions out: distractors of joint training, no sink"
    )
    brought.add_argument("--device", default="cpu", help="where to run the model: cpu, cuda, cuda:1 (default cpu)")

    export = verb("export", _export, "Write a cartridge's KV as a PEFT adapter or a HazyResearch checkpoint.",
                  "export handbook --format peft --output ./adapter")  # fmt: skip
    export.add_argument("name", help="id (newest version), id@version or label")
    export.add_argument("--format", required=True, choices=("peft", "hazy"), help="what to write")
    export.add_argument("--output", required=True, type=Path, help="directory to make; must be new or empty")
    export.add_argument("--base-model", help="Hub id of the model, for the model card (default: as the cartridge says)")


def _build(arguments: argparse.Namespace) -> None:
    from tqdm import tqdm

    from ..errors import ArtifactError
    from ..fingerprint import DTYPE_BYTES
    from ..manifest import check_id
    from ..registry import Registry

    # Everything that is cheap to check comes before torch is loaded.
    check_id(arguments.id)
    if not arguments.document.is_file():
        raise ArtifactError(f"{arguments.document}: no such file")
    if arguments.chunk_size < 1:
        raise ArtifactError(f"--chunk-size {arguments.chunk_size} must be at least 1")
    if arguments.dtype not in ("auto", *DTYPE_BYTES):
        raise ArtifactError(f"--dtype {arguments.dtype} is not one of auto, {', '.join(DTYPE_BYTES)}")
    settings = settings_of(arguments)
    registry = Registry(settings.registry_path)
    from ..make import prefill
    from ..make.model import CausalModel

    model = CausalModel(arguments.model, dtype=arguments.dtype, device=arguments.device)
    version = registry.next_version(arguments.id)
    with tqdm(unit=" tokens", desc="prefill", disable=arguments.format == "json") as bar:

        def progress(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        manifest = prefill.build(
            model, arguments.document, settings.cartridges_dir / arguments.id / str(version),
            cartridge_id=arguments.id, version=version, chunk_tokens=arguments.chunk_size,
            canary=arguments.canary or prefill.CANARY, progress=progress,
        )  # fmt: skip
    registry.register(settings.cartridges_dir / arguments.id / str(version))
    canary = manifest.provenance.canary
    result = {
        "name": manifest.name,
        "positions": manifest.positions,
        "bytes": manifest.payload.size_bytes,
        "digest": manifest.digest,
        "canary_top1_equal": canary.top1_equal,
        "canary_max_abs_logit_difference": canary.max_abs_logit_difference,
    }
    show(result, fields(result | {"bytes": size(result["bytes"])}), arguments.format)


def _import(arguments: argparse.Namespace) -> None:
    from tqdm import tqdm

    from ..errors import ArtifactError
    from ..fingerprint import DTYPE_BYTES
    from ..manifest import check_id

    check_id(arguments.id)
    if arguments.document is not None and not arguments.document.is_file():
        raise ArtifactError(f"{arguments.document}: no such file")
    if arguments.chunk_size < 1:
        raise ArtifactError(f"--chunk-size {arguments.chunk_size} must be at least 1")
    if arguments.dtype not in ("auto", *DTYPE_BYTES):
        raise ArtifactError(f"--dtype {arguments.dtype} is not one of auto, {', '.join(DTYPE_BYTES)}")
    registry = registry_of(arguments)
    from ..make import adapter, convert
    from ..make.axes import READINGS
    from ..make.model import CausalModel

    foreign = convert.recognise(adapter.locate(arguments.path), drop_frozen=arguments.drop_frozen)
    model = CausalModel(arguments.model, dtype=arguments.dtype, device=arguments.device)
    version = registry.next_version(arguments.id)
    root = settings_of(arguments).cartridges_dir / arguments.id / str(version)
    with tqdm(unit=" positions", desc="import", disable=arguments.format == "json") as bar:

        def progress(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        imported = convert.build(
            model, foreign, root, cartridge_id=arguments.id, version=version, chunk_tokens=arguments.chunk_size,
            document=arguments.document, reading=arguments.axes, rounding=arguments.round, progress=progress,
        )  # fmt: skip
    manifest = registry.register(root)
    if arguments.label:
        registry.label(arguments.label, manifest.name)
    for warning in imported.warnings if arguments.format == "terminal" else ():
        print(f"lmcache-cartridge: warning: {warning}", file=sys.stderr)
    result = {
        "name": manifest.name,
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


def _export(arguments: argparse.Namespace) -> None:
    from .. import artifact

    location = registry_of(arguments).find(arguments.name)
    root = local_root(location)
    artifact.load_manifest(root, location.digest)
    from ..make.export import export

    manifest = export(root, arguments.format, arguments.output, base_model=arguments.base_model)
    result = {"name": manifest.name, "format": arguments.format, "output": str(arguments.output)}
    text = f"{manifest.name} as {arguments.format} in {arguments.output}"
    show(result, text, "json" if arguments.json else "terminal")
