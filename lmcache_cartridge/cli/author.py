"""Commands that make cartridges and write them for others: `build`, `import` and `export`."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from typer import Argument, BadParameter

from ..artifact.location import is_remote
from ..errors import CartridgeError
from .making import ONE, many
from .options import (
    NAMED,
    Accept,
    ChunkSize,
    Corpus,
    Device,
    Dtype,
    HeldOut,
    Id,
    Lora,
    MaxModelLen,
    Model,
    Name,
    NoPromote,
    OneDocument,
    Payload,
    Publish,
    Ray,
    ServerModel,
    check,
    command,
    file,
    finish,
    length,
    load_model,
    next_version,
    option,
    registry_of,
    root_of,
    stored,
    tell,
    valid_id,
)
from .show import bars, say, show, warn

if TYPE_CHECKING:
    from ..artifact.manifest import Manifest

USUAL_CHUNK = 256
"""The chunk size of servers by default."""


def _object(text: str) -> dict[str, Any]:
    with suppress(ValueError):
        if isinstance(given := json.loads(text), dict):
            return given
    raise BadParameter(f"{text!r} is no JSON object")


@command("build --model ./llama --document handbook.txt --id handbook")
def build(
    corpus: Corpus = [],  # noqa: B006  Typer copies it
    id: Id = None,
    model: Model = None,
    document: OneDocument = None,
    chat: Annotated[
        str | None,
        option("the document is a message of this role, as `system`, in the model's chat template; what requests send as "
               "messages goes on behind it", metavar="ROLE"),
    ] = None,
    messages: Annotated[
        Path | None,
        file("the first messages of a chat in place of a document, as a JSON list of {role, content}"),
    ] = None,
    chat_template: Annotated[Path | None, file("chat template in the place of the model's, as vLLM is given")] = None,
    chat_arguments: Annotated[
        Any, option("arguments of the template, as requests' chat_template_kwargs", metavar="JSON", parser=_object)
    ] = None,
    token_ids: Annotated[
        Path | None,
        file("token ids made elsewhere, as a JSON list; --document is what they were made of"),
    ] = None,
    from_: Annotated[
        str | None,
        option(f"a registered cartridge ({NAMED}), which stays as it is: --compact makes a shorter one of it, --payload "
               "int8 alone a smaller one, without a --model", "--from", metavar="NAME"),
    ] = None,
    url: Annotated[
        str | None,
        option("have this server make it, in place of a --model, in its dtype, with its kernels and template; it is `serve "
               "--l1-bytes BYTES --set contexts=true`. Its key is that in $VLLM_API_KEY"),
    ] = None,
    server_model: ServerModel = None,
    compact: Annotated[
        str | None,
        option("make it shorter, in seconds and without training: 4x, or so many positions", metavar="4x"),
    ] = None,
    questions: Annotated[
        Path | None,
        file('what a compaction is to be good at: JSON lines {"question": ...} (default: the document, read once more '
             "behind itself)"),
    ] = None,
    held_out: HeldOut = None,
    refine: Annotated[
        int | None,
        option("with questions: so many gradient steps for each layer alone, kept where questions set apart are answered "
               "better so (default 30)", min=0),
    ] = None,
    accept: Accept = None,
    canary: Annotated[str | None, option("text after the document whose prediction must not change")] = None,
    lora: Lora = None,
    chunk_size: Annotated[
        int | None, option("tokens a chunk, as the engine's (default 256, or as the cartridge --from has them)", min=1)
    ] = None,
    dtype: Dtype = "auto",
    payload: Payload = "plain",
    max_model_len: MaxModelLen = None,
    device: Device = "auto",
    no_promote: NoPromote = False,
    publish: Publish = None,
    ray: Ray = None,
) -> int | None:  # fmt: skip
    """Make cartridges of documents, check and register them. Whole or compacted; or of a registered cartridge."""
    options: dict[str, Any] = {"dtype": dtype, "device": device, "lora": lora, "max_model_len": max_model_len}
    if corpus:
        check(locals(), "--id, --document, --messages, --token-ids, --from, --url, --questions, --held-out, --refine, "
              "--no-promote need one document, not many")  # fmt: skip
        _check_build(locals() | {"document": corpus})
        return many(corpus, locals() | {"compact": length(compact) if compact else None})
    check(locals(), ONE, "build needs --id")
    assert id is not None, "checked"
    _check_build(locals())
    registry = registry_of()
    version, root = next_version(id, registry)
    made: dict[str, Any] = {"cartridge_id": id, "version": version, "encoding": payload}
    with bars() as progress:
        made["progress"] = progress
        if compact is not None:
            manifest, more = _compact(root, locals())
        elif from_ is not None:
            from ..make.write import compress

            _, source = stored(from_)
            del made["encoding"]
            manifest, more = compress(source, root, **made), {}
        else:
            manifest, more = _prefill(root, locals())
    finish(registry, manifest, root, promote=not no_promote, **more)
    return None


def _check_build(given: dict[str, Any]) -> None:
    """Raise `CartridgeError` unless the options say what to build, once, and go together."""
    is_document = given["document"] is not None and given["token_ids"] is None  # else it is what these were made of
    check(given | {"document": is_document}, "build takes one of --document, --messages, --token-ids, --from",
          "--chat needs --document; --messages say their roles, and --token-ids have none")  # fmt: skip
    check(
        given,
        "--chat-template, --chat-arguments need --chat or --messages",
        "--compact excludes --chat, --messages, --token-ids, --url, --canary; it computes a plain document",
        "--questions, --held-out, --refine, --accept need --compact; they are for a compaction",
        "--refine needs --questions; without any it made cartridges that answer less",
        "--server-model needs --url; here --lora names an adapter",
        "--url excludes --model, --lora, --canary, --chat-template, --chunk-size, --max-model-len; the server has its own",
        "--from needs --compact or --payload; say how short, or int8",
        "--from excludes --url, --canary, --model, --lora; with --payload int8 nothing is computed"
        if given["from_"] and not given["compact"] else "build needs --model or --url",
    )  # fmt: skip


def _prefill(root: Path, given: dict[str, Any]) -> tuple[Manifest, dict[str, Any]]:
    """Make a cartridge of a whole document, here or on a server, and return what there is to tell of it."""
    document, token_ids, messages = given["document"], given["token_ids"], given["messages"]
    source, arguments = document or token_ids or messages, given["chat_arguments"] or {}
    if given["url"] is not None:
        from ..make import remote
        from ..make.foreign.ids import read_json
        from ..make.server import Server

        text = remote.asked(source, token_ids, messages and read_json(messages), given["chat"], arguments)
        with Server(given["url"], given["server_model"]) as server:
            manifest = remote.build(server, text, source, root, **given["made"])
    else:
        loaded = load_model(given["model"], **given["options"])
        from blake3 import blake3

        from ..make import prefill
        from ..make.chat import read_chat
        from ..make.document import read_document, read_ids

        if token_ids is not None:
            read = read_ids(loaded, token_ids)._replace(path=source, blake3=blake3(source.read_bytes()).hexdigest())
        elif given["chat"] is None and messages is None:
            read = read_document(loaded, document)
        else:
            if given["chat_template"] is not None:
                loaded.tokenizer.chat_template = given["chat_template"].read_text()
            read = read_chat(loaded, source, given["chat"], arguments)
        chunk, canary = given["chunk_size"] or USUAL_CHUNK, given["canary"] or prefill.CANARY
        manifest = prefill.build(loaded, read, root, chunk_tokens=chunk, canary=canary, **given["made"])
    warnings = []
    if manifest.positions < USUAL_CHUNK:
        warnings.append(
            f"{manifest.positions} positions fill no chunk of {USUAL_CHUNK} tokens, so a server with the default chunk size "
            "injects none of them and computes the document each time; serve it with a smaller --chunk-size"
        )
    warn(warnings)
    found = manifest.provenance.canary
    return manifest, {
        "canary_top1_equal": found and found.top1_equal,
        "canary_max_abs_logit_difference": found and found.max_abs_logit_difference, "warnings": warnings,
    }  # fmt: skip


def _compact(root: Path, given: dict[str, Any]) -> tuple[Manifest, dict[str, Any]]:
    """Make a shorter cartridge of a document or of a cartridge, and return what there is to tell of it."""
    import msgspec

    before, source = (None, given["document"]) if given["from_"] is None else stored(given["from_"])
    compress, positions = length(given["compact"])
    chunk = given["chunk_size"] or (USUAL_CHUNK if before is None else before.stored.chunk_tokens)
    loaded = load_model(given["model"], None if before is None else before.fingerprint, **given["options"])
    from ..make import questions
    from ..make.compact.job import build_compact, compact_cartridge
    from ..make.compact.wanted import Wanted
    from ..make.train.initial import positions_of

    def wanted(tokens: int) -> Wanted:
        p = positions_of(tokens, chunk, compress=compress, positions=positions)
        say(f"p = {p} positions for a document of {tokens} tokens, {tokens / p:.1f}x")
        asked, held_out = (questions.read(path) if path else [] for path in (given["questions"], given["held_out"]))
        more = {name: given[name] for name in ("refine", "accept") if given[name] is not None}
        return Wanted(p, asked, held_out, **more)

    make = build_compact if before is None else compact_cartridge
    manifest = make(loaded, source, root, wanted, chunk_tokens=chunk, say=say, **given["made"])
    about = manifest.provenance.compaction
    assert about is not None, "compaction writes it"
    return manifest, {"measured": msgspec.to_builtins(about.measured)}


@command("import ./adapter --model ./llama --id handbook", "import")
def import_(
    path: Annotated[
        str,
        Argument(help="a cartridge, by its directory or s3:// location, which is registered where it lies; PEFT CARTRIDGE or "
                 "PREFIX_TUNING directory or its Hub id; .pt file of trainable_keys and frozen_keys or fixed_keys, of a list "
                 "of (K, V), or of token_ids and kv_cache; a JSON file of token ids"),
    ],
    id: Annotated[
        str | None, option("name of the cartridge; one that is registered has its own", callback=valid_id)
    ] = None,
    model: Annotated[str | None, option("directory or cached Hub id of the model that the KV is of")] = None,
    document: Annotated[
        Path | None, file("text that a trained cartridge stands for, for the setting on_miss=document")
    ] = None,
    round: Annotated[bool, option("allow a KV dtype that does not hold every value", "--round")] = False,
    no_compare: Annotated[
        bool,
        option("do not load the model's weights: KV counts as trained, its token ids as its document, and it gets no canary",
               "--no-compare"),
    ] = False,
    drop_frozen: Annotated[
        bool, option("leave frozen positions out: distractors of joint training, no sink", "--drop-frozen")
    ] = False,
    lora: Lora = None,
    chunk_size: ChunkSize = 256,
    dtype: Dtype = "auto",
    payload: Payload = "plain",
    max_model_len: MaxModelLen = None,
    no_promote: NoPromote = False,
) -> None:  # fmt: skip
    """Make a cartridge of what others trained or saved. One that is a cartridge already is registered where it lies."""
    registry = registry_of()
    if is_remote(path) or (Path(path) / "manifest.json").is_file():
        manifest = registry.register(root_of(path), path if is_remote(path) else None, promote=not no_promote)
        tell(registry, manifest)
        return
    if id is None or model is None:
        raise CartridgeError(
            f"{path} is no cartridge yet, which has a manifest.json; to make one give --id and --model"
        )
    from ..make.foreign.convert import import_
    from ..make.foreign.recognise import locate, recognise

    found = locate(path)
    foreign = recognise(found, drop_frozen=drop_frozen)
    foreign = foreign._replace(name=None if found == Path(path) else path)
    loaded = load_model(
        model, weights=not no_compare, dtype=dtype, device="auto", lora=lora, max_model_len=max_model_len
    )
    version, root = next_version(id, registry)
    with bars() as progress:
        imported = import_(
            loaded, foreign, root, cartridge_id=id, version=version, chunk_tokens=chunk_size, document=document,
            rounding=round, encoding=payload, compare=not no_compare, progress=progress,
        )  # fmt: skip
    warn(imported.warnings)
    told = {
        "kind": imported.manifest.kind,
        "evidence": imported.evidence,
        "warnings": list(imported.warnings),
    }
    finish(registry, imported.manifest, root, promote=not no_promote, **told)


@command("export handbook --to peft --output ./adapter")
def export(
    name: Name,
    to: Annotated[Literal["peft", "hazy"], option("what to write")],
    output: Annotated[Path, option("directory to make; must be new or empty")],
) -> None:
    """Write a cartridge as an adapter of PEFT or a .pt. The second is HazyResearch's form."""
    _, root = stored(name)
    from ..make.foreign.export import export

    with bars() as progress:
        manifest = export(root, to, output, progress=progress)
    show({"name": manifest.name, "format": to, "output": str(output)})
