"""The command line: `lmcache-cartridge VERB`. Imports no torch until a verb needs it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from . import __version__
from .errors import CartridgeError
from .output import fields, show, size, table


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status: 0, 1 for an error of ours (one line on stderr), 2 for usage."""
    parser = _parser()
    arguments, rest = parser.parse_known_args(argv)
    if rest and arguments.verb is not _serve:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    arguments.rest = rest
    try:
        return arguments.verb(arguments) or 0
    except CartridgeError as error:
        print(f"lmcache-cartridge: {error}", file=sys.stderr)
        return 1
    except OSError as error:  # a full disk, a directory that may not be written
        print(f"lmcache-cartridge: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lmcache-cartridge",
        description="Prepare KV caches of documents once and serve them through unmodified vLLM and LMCache.",
        epilog="State lives under --home, by default $LMCACHE_CARTRIDGE_HOME or ~/.local/share/lmcache-cartridge.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=__version__)
    verbs = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    def verb(name: str, run: Any, summary: str, example: str) -> argparse.ArgumentParser:
        added = verbs.add_parser(
            name, help=summary, description=summary, epilog=f"example: lmcache-cartridge {example}", allow_abbrev=False
        )
        added.set_defaults(verb=run)
        added.add_argument("--home", type=Path, help="where the registry and cartridges are kept")
        if name == "export":  # whose --format is another thing
            added.add_argument("--json", action="store_true", help="tell programs instead of people")
        elif name != "serve":
            added.add_argument(
                "--format", choices=("terminal", "json"), default="terminal", help="for people or programs"
            )
        return added

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

    register = verb("register", _register, "Register an artefact where it lies, or token ids as a stored prompt prefix.",
                    "register s3://bucket/cartridges/handbook")  # fmt: skip
    register.add_argument(
        "path",
        help="directory of manifest.json and payload.safetensors, its s3:// location, or a .json or .pt file of token_ids",
    )
    register.add_argument("--label", help="also point this label at it")
    register.add_argument("--id", help="for a file of token ids: name of the cartridge")
    register.add_argument("--model", help="for a file of token ids: directory or cached Hub id of their model")

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

    label = verb("label", _label, "Point a label at a cartridge, in one step; labels are names that move.",
                 "label current handbook@3")  # fmt: skip
    label.add_argument("label")
    label.add_argument("name", help="id, id@version or another label")
    label.add_argument(
        "--warm", action="store_true", help="servers bring what it points at into memory when they start"
    )

    unlabel = verb("unlabel", _unlabel, "Remove a label; what it points at stays.", "unlabel current")
    unlabel.add_argument("label")

    remove = verb("remove", _remove, "Take a version out of the registry. Servers let the requests that use it finish.",
                  "remove handbook@2")  # fmt: skip
    remove.add_argument("name", help="id (newest version) or id@version")
    remove.add_argument("--delete-files", action="store_true", help="delete the artefact too, if `build` put it there")

    verb("list", _list, "List the registered cartridges.", "list --format json")

    describe = verb("describe", _describe, "Show everything known of one cartridge.", "describe handbook")
    describe.add_argument("name", help="id (newest version), id@version or label")

    verify = verb("verify", _verify, "Read a cartridge whole and check every checksum; lifts a quarantine if sound.",
                  "verify handbook")  # fmt: skip
    verify.add_argument("name", nargs="+", help="id (newest version), id@version or label")

    push = verb("push", _push, "Verify a registered cartridge and store it on S3, whole or not at all.",
                "push handbook s3://cartridges/handbook/1 --endpoint-url http://minio:9000")  # fmt: skip
    push.add_argument("name", help="id (newest version), id@version or label")
    push.add_argument("location", help="s3://bucket/prefix that the files go under")
    push.add_argument(
        "--force",
        action="store_true",
        help="replace an artefact of other content; requests that use the old one fail",
    )

    pull = verb("pull", _pull, "Bring a cartridge from S3 here, verify every checksum and register it.",
                "pull s3://cartridges/handbook/1 --endpoint-url http://minio:9000")  # fmt: skip
    pull.add_argument("location", help="s3://bucket/prefix that a cartridge was pushed to")
    pull.add_argument("--id", help="name of the cartridge here (default: its own)")
    for remote in (push, pull):
        remote.add_argument(
            "--endpoint-url",
            help="S3 server (default: $AWS_ENDPOINT_URL_S3, or AWS). Credentials come from the environment, a profile "
            "or a role, as for every AWS tool",
        )
        remote.add_argument("--region", help="S3 region (default: that of the environment or profile)")

    serve = verb("serve", _serve, "Start vLLM's OpenAI server with cartridges. Other options go to vLLM as they are.",
                 "serve ./llama --port 8000 --max-model-len 8192")  # fmt: skip
    serve.add_argument("model", help="as for `vllm serve`")
    serve.add_argument("--chunk-size", type=int, default=256, help="LMCache's chunk size in tokens (default 256)")
    serve.add_argument("--cpu-bytes", default="1GiB", help="memory for resident cartridges (default 1GiB)")
    serve.add_argument("--disk-bytes", default="16GiB", help="local disk for what comes from S3 (default 16GiB)")
    serve.add_argument(
        "--on-load-failure",
        choices=("recompute", "fail"),
        help="what vLLM does when a chunk cannot be loaded after all: compute its tokens, or end the request with an "
        "error. Trained cartridges need fail (default: fail if any is registered, else recompute)",
    )
    serve.add_argument(
        "--set", action="append", default=[], metavar="SETTING=VALUE",
        help="any other setting, as `on_miss=document`; lists and maps as JSON. May be given often",
    )  # fmt: skip
    serve.add_argument("--print", action="store_true", help="print the files and command instead of running them")

    demo = verb(
        "demo", _demo, "Build, serve and question a cartridge of a shipped document; about two minutes.", "demo"
    )
    demo.add_argument("--questions", type=int, default=12, help="how many to ask each way (default and at most 12)")

    top = verb("top", _top, "Show a running server live: tiers, requests, loads and cartridges. Ctrl-C ends it.",
               "top --url http://localhost:8000 --interval 1")  # fmt: skip
    top.add_argument("--url", default="http://localhost:8000", help="the server (default http://localhost:8000)")
    top.add_argument(
        "--api-key",
        help="the server's, for the list of cartridges; better in $VLLM_API_KEY, where `ps` does not show it",
    )
    top.add_argument("--interval", type=_seconds, default=2.0, help="seconds between refreshes (default 2)")
    top.add_argument("--once", action="store_true", help="show it once, with totals instead of rates, and end")

    verb("doctor", _doctor, "Check versions, hashing, layout and plugin; say how to fix what is wrong.", "doctor")
    return parser


def _settings(arguments: argparse.Namespace, **values: Any) -> Any:
    from .settings import from_mapping

    if arguments.home is not None:
        values["home"] = arguments.home.expanduser().absolute()
    return from_mapping(values)


def _registry(arguments: argparse.Namespace) -> Any:
    from .registry import Registry

    return Registry(_settings(arguments).registry_path)


def _build(arguments: argparse.Namespace) -> None:
    from tqdm import tqdm

    from .errors import ArtifactError
    from .fingerprint import DTYPE_BYTES
    from .manifest import check_id
    from .registry import Registry

    # Everything that is cheap to check comes before torch is loaded.
    check_id(arguments.id)
    if not arguments.document.is_file():
        raise ArtifactError(f"{arguments.document}: no such file")
    if arguments.chunk_size < 1:
        raise ArtifactError(f"--chunk-size {arguments.chunk_size} must be at least 1")
    if arguments.dtype not in ("auto", *DTYPE_BYTES):
        raise ArtifactError(f"--dtype {arguments.dtype} is not one of auto, {', '.join(DTYPE_BYTES)}")
    settings = _settings(arguments)
    registry = Registry(settings.registry_path)
    from .make import prefill
    from .make.model import CausalModel

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


def _register(arguments: argparse.Namespace) -> None:
    from .sources import Sources

    registry = _registry(arguments)
    if Sources.is_remote(arguments.path):
        manifest = registry.register(_fetched(arguments, arguments.path), arguments.path)
    else:
        path = Path(arguments.path)
        manifest = registry.register(path if path.is_dir() else _stored_prefix(arguments, path, registry))
    if arguments.label:
        registry.label(arguments.label, manifest.name)
    result = {"name": manifest.name, "digest": manifest.digest, "label": arguments.label}
    show(result, f"registered {manifest.name}", arguments.format)


def _fetched(arguments: argparse.Namespace, location: str) -> Path:
    """Return a local copy of the manifest and token ids of an artefact on S3, as they are there now."""
    from .mirror import Mirror
    from .sources import Sources

    settings = _settings(arguments)
    sources = Sources(settings)
    try:
        return Mirror(settings.mirror_dir, sources).fetch(location, force=True)
    finally:
        sources.close()


def _root(arguments: argparse.Namespace, location: str) -> Path:
    """Return the directory that holds the manifest of what lies at a location."""
    from .sources import Sources

    return _fetched(arguments, location) if Sources.is_remote(location) else Path(location)


def _stored_prefix(arguments: argparse.Namespace, path: Path, registry: Any) -> Path:
    """Make an artefact of a file of token ids and return its directory."""
    from .errors import ArtifactError
    from .manifest import check_id

    if not path.is_file():
        raise ArtifactError(f"{path}: no such file or directory")
    if not (arguments.id and arguments.model):
        raise ArtifactError(f"{path} is a file; for token ids give --id and --model too")
    version = registry.next_version(check_id(arguments.id))
    root = _settings(arguments).cartridges_dir / arguments.id / str(version)
    from .make import tokens
    from .make.model import CausalModel

    tokens.build(CausalModel(arguments.model), path, root, cartridge_id=arguments.id, version=version)
    return root


def _import(arguments: argparse.Namespace) -> None:
    from tqdm import tqdm

    from .errors import ArtifactError
    from .fingerprint import DTYPE_BYTES
    from .manifest import check_id

    check_id(arguments.id)
    if arguments.document is not None and not arguments.document.is_file():
        raise ArtifactError(f"{arguments.document}: no such file")
    if arguments.chunk_size < 1:
        raise ArtifactError(f"--chunk-size {arguments.chunk_size} must be at least 1")
    if arguments.dtype not in ("auto", *DTYPE_BYTES):
        raise ArtifactError(f"--dtype {arguments.dtype} is not one of auto, {', '.join(DTYPE_BYTES)}")
    registry = _registry(arguments)
    from .make import adapter, convert
    from .make.axes import READINGS
    from .make.model import CausalModel

    foreign = convert.recognise(adapter.locate(arguments.path), drop_frozen=arguments.drop_frozen)
    model = CausalModel(arguments.model, dtype=arguments.dtype, device=arguments.device)
    version = registry.next_version(arguments.id)
    root = _settings(arguments).cartridges_dir / arguments.id / str(version)
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
    from . import artifact
    from .errors import ArtifactError
    from .sources import Sources

    location = _registry(arguments).find(arguments.name)
    if Sources.is_remote(location.location):
        raise ArtifactError(
            f"cartridge {location.name} lies on S3; `lmcache-cartridge pull {location.location}` brings it here first"
        )
    root = Path(location.location)
    artifact.load_manifest(root, location.digest)
    from .make.export import export

    manifest = export(root, arguments.format, arguments.output, base_model=arguments.base_model)
    result = {"name": manifest.name, "format": arguments.format, "output": str(arguments.output)}
    text = f"{manifest.name} as {arguments.format} in {arguments.output}"
    show(result, text, "json" if arguments.json else "terminal")


def _label(arguments: argparse.Namespace) -> None:
    target = _registry(arguments).label(arguments.label, arguments.name, warm=arguments.warm)
    show({"label": arguments.label, "name": target.name}, f"{arguments.label} -> {target.name}", arguments.format)


def _unlabel(arguments: argparse.Namespace) -> None:
    _registry(arguments).unlabel(arguments.label)
    show({"label": arguments.label}, f"removed the label {arguments.label}", arguments.format)


def _remove(arguments: argparse.Namespace) -> None:
    import shutil

    removed = _registry(arguments).remove(arguments.name)
    ours = Path(removed.location).is_relative_to(_settings(arguments).cartridges_dir)
    deleted = arguments.delete_files and ours
    if deleted:
        shutil.rmtree(removed.location)
    left = "" if deleted else f"; its files stay at {removed.location}"
    result = {"name": removed.name, "location": removed.location, "files_deleted": deleted}
    show(result, f"removed {removed.name}{left}", arguments.format)


def _list(arguments: argparse.Namespace) -> None:
    from .quarantine import Quarantine

    registry, quarantine = _registry(arguments), Quarantine(_settings(arguments).quarantine_dir)
    labels: dict[str, list[str]] = {}
    for label, name in registry.labels().items():
        labels.setdefault(name, []).append(label)
    rows = [
        {
            "id": row.id,
            "version": row.version,
            "kind": row.kind,
            "positions": row.positions,
            "bytes": row.bytes,
            "labels": labels.get(row.name, []),
            "quarantined": quarantine.reason(row.digest) is not None,
            "digest": row.digest,
        }
        for row in registry.all()
    ]
    readable = [
        row | {"bytes": size(row["bytes"]), "labels": " ".join(row["labels"]), "digest": row["digest"][:12],
               "quarantined": "yes" if row["quarantined"] else ""}
        for row in rows
    ]  # fmt: skip
    empty = "no cartridges yet; make one with `lmcache-cartridge build`"
    show(rows, table(readable) if rows else empty, arguments.format)


def _describe(arguments: argparse.Namespace) -> None:
    import json

    from . import artifact
    from .quarantine import Quarantine

    location = _registry(arguments).find(arguments.name)
    reason = Quarantine(_settings(arguments).quarantine_dir).reason(location.digest)
    result = json.loads(
        artifact.load_manifest(_root(arguments, location.location), location.digest, payload=False).encode()
    )
    for part, long in (("payload", "checksums"), ("rope", "inv_freq")):
        if shown := (result["fingerprint"] if part == "rope" else result)[part]:
            del shown[long]
    result |= {"location": location.location, "registered": location.registered, "quarantined": reason}
    show(result, fields(result), arguments.format)


def _verify(arguments: argparse.Namespace) -> int:
    from functools import partial

    from tqdm import tqdm

    from . import artifact
    from .quarantine import Quarantine
    from .sources import Sources

    settings = _settings(arguments)
    registry, quarantine, sources = _registry(arguments), Quarantine(settings.quarantine_dir), Sources(settings)
    results = []
    for name in arguments.name:
        location = registry.find(name)
        problem = None
        try:
            root, read, where = _root(arguments, location.location), None, None
            if Sources.is_remote(location.location):
                where = f"{location.location}/{artifact.PAYLOAD}"
                read = partial(sources.read_into, location.location, artifact.PAYLOAD)
            artifact.load_manifest(root, location.digest, payload=read is None)
            with tqdm(unit=" chunks", desc=location.name, disable=arguments.format == "json") as bar:
                for done, total in artifact.verify(root, read, where):
                    bar.total = total
                    bar.update(done - bar.n)
        except CartridgeError as error:
            problem = str(error)
        if problem is None:
            quarantine.lift(location.digest)
        results.append({"name": location.name, "sound": problem is None, "problem": problem})
    lines = [f"{r['name']}: {'sound' if r['sound'] else r['problem']}" for r in results]
    show(results, "\n".join(lines), arguments.format)
    return 0 if all(r["sound"] for r in results) else 1


def _push(arguments: argparse.Namespace) -> None:
    from . import s3, transfer
    from .errors import ArtifactError
    from .sources import Sources

    s3.parse(arguments.location)
    row = _registry(arguments).find(arguments.name)
    if Sources.is_remote(row.location):
        raise ArtifactError(f"{row.name} lies at {row.location} already; pull it first to push it elsewhere")
    with _transfer(arguments) as (source, progress):
        done = transfer.push(Path(row.location), arguments.location, source, force=arguments.force, progress=progress)
    result = {
        "name": done.manifest.name, "digest": done.manifest.digest, "location": arguments.location,
        "pushed": done.changed,
    }  # fmt: skip
    there = (
        f"pushed {row.name} to"
        if done.changed
        else f"the content of {row.name} is there already, as {done.manifest.name}:"
    )
    show(result, f"{there} {arguments.location}", arguments.format)


def _pull(arguments: argparse.Namespace) -> None:
    from . import s3, transfer
    from .manifest import check_id

    s3.parse(arguments.location)
    if arguments.id is not None:
        check_id(arguments.id)
    registry, directory = _registry(arguments), _settings(arguments).cartridges_dir
    with _transfer(arguments) as (source, progress):
        done = transfer.pull(arguments.location, source, registry, directory, progress=progress, name=arguments.id)
    result = {
        "name": done.manifest.name, "digest": done.manifest.digest, "path": str(done.root), "pulled": done.changed,
    }  # fmt: skip
    text = f"pulled {done.manifest.name}" if done.changed else f"{done.manifest.name} is here already"
    show(result, f"{text}: {done.root}", arguments.format)


@contextmanager
def _transfer(arguments: argparse.Namespace) -> Iterator[tuple[Any, Any]]:
    """Lend an S3 source and a progress bar, off with --format json."""
    from tqdm import tqdm

    from .sources import Sources

    sources = Sources(_settings(arguments, s3_endpoint_url=arguments.endpoint_url, s3_region=arguments.region))
    bars: dict[str, tqdm] = {}

    def progress(what: str, done: int, total: int) -> None:
        if what not in bars:
            of_bytes = {"unit": "B", "unit_scale": True, "unit_divisor": 1024}
            kind = {"unit": " chunks"} if what == "verify" else of_bytes
            bars[what] = tqdm(desc=what, total=total, disable=arguments.format == "json", **kind)
        bars[what].update(done - bars[what].n)

    try:
        yield sources.s3(), progress
    finally:
        for bar in bars.values():
            bar.close()
        sources.close()


def _serve(arguments: argparse.Namespace) -> None:
    from .registry import Registry
    from .serve.launch import plan

    settings = _settings(
        arguments,
        cpu_bytes=arguments.cpu_bytes,
        disk_bytes=arguments.disk_bytes,
        **dict(map(_assignment, arguments.set)),
    )
    trained = any(row.kind == "trained" for row in Registry(settings.registry_path, read_only=True).all())
    launch = plan(
        arguments.model,
        settings,
        chunk_tokens=arguments.chunk_size,
        on_load_failure=arguments.on_load_failure or ("fail" if trained else "recompute"),
        vllm_args=[a for a in arguments.rest if a != "--"],
    )
    print(launch, flush=True)
    if not arguments.print:
        launch.run()


def _assignment(text: str) -> tuple[str, Any]:
    """Return the name and value in `NAME=VALUE`; a value that is JSON counts as what it says."""
    import json

    from .errors import SettingsError

    name, equals, value = text.partition("=")
    if not equals:
        raise SettingsError(f"--set {text}: write --set SETTING=VALUE")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


def _demo(arguments: argparse.Namespace) -> int:
    from .demo import run

    return run(arguments.home, arguments.questions, arguments.format)


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0.1 <= seconds <= 3600:
        raise argparse.ArgumentTypeError(f"{text} is not between 0.1 and 3600 seconds")
    return seconds


def _top(arguments: argparse.Namespace) -> None:
    import os

    from .top import run

    key = arguments.api_key or os.environ.get("VLLM_API_KEY")
    run(arguments.url, key, arguments.interval, once=arguments.once, as_json=arguments.format == "json")


def _doctor(arguments: argparse.Namespace) -> int:
    from .doctor import diagnose

    checks = diagnose(_settings(arguments))
    lines = [f"{c.status:4}  {c.name}: {c.finding}" + (f"\n      fix: {c.fix}" if c.fix else "") for c in checks]
    show([c._asdict() for c in checks], "\n".join(lines), arguments.format)
    return 1 if any(c.status == "FAIL" for c in checks) else 0


if __name__ == "__main__":
    sys.exit(main())
