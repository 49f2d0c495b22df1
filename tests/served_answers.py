"""Serve a document plain, trained and damaged, ask fifteen questions of each, and print what came: `--mode in-process`.

A program and no test: `.ci/versions` runs it with each pair of vLLM and LMCache, under versions that `make test` has not.
Exits with 1 unless every answer and every logprob is that of the document in the prompt, and the damaged one's are not;
with 3 where the versions are refused in this mode whatever the options.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import uuid
from pathlib import Path

import numpy as np
import torch
from processor import noise
from serving import SERVER_ARGS, Client, difference, question_ids, register_kv, stored_kv

from lmcache_cartridge.artifact import reading
from lmcache_cartridge.cli.recall import MODEL_DIR, SHEETS_DIR, load_sheet
from lmcache_cartridge.engine.versions import check_versions, versions
from lmcache_cartridge.errors import UnsupportedEngine
from lmcache_cartridge.library.registry import Registry
from lmcache_cartridge.make import prefill
from lmcache_cartridge.make.model import CausalModel
from lmcache_cartridge.serve.launch import plan
from lmcache_cartridge.serve.processes import ServerProcess
from lmcache_cartridge.settings import from_mapping

SHEET, CHUNK, BLOCK = "ward-a", 64, 32
NOISE = noise(0.25)
"""Largest logprob difference taken for rounding, as in `served/matrix.py`; damaged KV gives 10 and more."""


def answers(home: Path, mode: str) -> dict[str, object]:
    """Return what a server in this mode answered, and how far it is from the document in the prompt."""
    settings = from_mapping({"home": home, "cpu_bytes": 64 << 20, "lookup_timeout_s": 10})
    registry, model, questions = (
        Registry(settings.registry_path),
        CausalModel(str(MODEL_DIR)),
        load_sheet(SHEET).questions,
    )
    root = settings.cartridges_dir / "plain"
    like = prefill.build(
        model, SHEETS_DIR / f"{SHEET}.txt", root, cartridge_id="plain", version=1, chunk_tokens=CHUNK,
        canary=" " + questions[0].text,
    )  # fmt: skip
    registry.register(root)
    ids = reading.load_token_ids(like, root).tolist()
    whole = len(ids) // CHUNK * CHUNK
    kv = stored_kv(root)[:, :, :whole]
    for name, variant in {"trained": kv, "damaged": torch.zeros_like(kv)}.items():
        register_kv(registry, home / "variants", name, variant, like, np.array(ids[:whole]))
    launch = plan(
        str(MODEL_DIR), settings, chunk_tokens=CHUNK, mode=mode,  # type: ignore[arg-type]
        vllm_args=[*SERVER_ARGS, "--block-size", str(BLOCK)],
    )  # fmt: skip
    with ServerProcess(launch, home / "server.log") as server, Client(server.url, str(MODEL_DIR)) as client:
        prompts = [question_ids(model, question.text) for question in questions]
        document = [client.computed([*ids, *own]) for own in prompts]
        told: dict[str, object] = {"document": _right(document, questions)}
        for way, name, head in (
            ("cold", "plain", []), ("warm", "plain", []), ("trained", "trained", ids[whole:]), ("damaged", "damaged", ids[whole:]),
        ):  # fmt: skip
            replies = [client.ask_with([name], [*head, *own]) for own in prompts]
            told[way] = _right(replies, questions)
            told[f"{way}, farthest logprob"] = round(
                max(difference(*both) for both in zip(replies, document, strict=True)), 3
            )
            told[f"{way}, positions from KV"] = min(reply.cached_tokens for reply in replies)
        states = {row["id"]: row for row in client.get("/v1/cartridges").json()["data"]}
        told["canary"] = states["plain"]["canary"]
        lost = client.post({"prompt": [5], "cartridges": [uuid.uuid4().hex], "max_tokens": 1}).status_code
        told["unknown name"] = lost
    return told


def _right(replies: list, questions: tuple) -> int:
    return sum(reply.text.strip() == question.answer for reply, question in zip(replies, questions, strict=True))


def main() -> int:
    """Print versions and answers as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mode", choices=["in-process", "multiprocess"], default="in-process")
    parser.add_argument("--log", type=Path, help="keep what the server wrote in this file")
    given = parser.parse_args()
    mode = given.mode
    try:
        check_versions(unproven=True)
    except UnsupportedEngine as refused:
        print(refused)
        return 3
    with tempfile.TemporaryDirectory() as home:
        try:
            told = answers(Path(home), mode)
        finally:
            if given.log and (log := Path(home) / "server.log").exists():
                shutil.copyfile(log, given.log)
    print(json.dumps({**versions(), "mode": mode, **told}))
    same = all(told[f"{way}, farthest logprob"] < NOISE for way in ("cold", "warm", "trained"))  # type: ignore[operator]
    seen = told["damaged, farthest logprob"] > 5 * NOISE  # type: ignore[operator]
    from_kv = all(told[f"{way}, positions from KV"] for way in ("warm", "trained", "damaged"))
    right = [told[way] for way in ("document", "cold", "warm", "trained")]
    return 0 if same and seen and from_kv and len(set(right)) == 1 and told["canary"] == "passed" else 1


if __name__ == "__main__":
    sys.exit(main())
