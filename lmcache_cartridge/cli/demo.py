"""The demo: a document is prefilled once into a cartridge, then a real vLLM server answers from it."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from .options import settings_of
from .recall import MODEL_DIR, SHEETS_DIR, load_sheet
from .show import say, show, size, table

if TYPE_CHECKING:
    from ..make.ask import Way
    from ..make.evaluate import Answer
    from ..settings import Settings

SHEET = "ward-a"
SERVER_ARGS = ["--max-model-len", "8192", "--kv-cache-memory-bytes", str(64 << 20)]
"""vLLM flags that start the tiny model fast: a small KV cache."""
TOKENS = 8
"""Tokens of an answer at most."""


def run() -> int:
    """Run the demo and print its table; 0 if the cartridge answered exactly as the document in the prompt does.

    Everything lies in `--home`, or in a directory that is removed at the end. Stops the server it starts.
    """
    from ..make import evaluate

    with tempfile.TemporaryDirectory(prefix="cartridge-demo-") as scratch:
        made = _build(settings_of(home=Path(scratch)))
        answers = _ask(*made, Path(scratch))
    result = evaluate.report(SHEET, answers, None)
    same = [[answer.got for answer in answers[way]] for way in ("document", "cartridge")]
    is_same = same[0] == same[1]
    verdict = "the cartridge answered word for word as the document in the prompt did" if is_same else "ANSWERS DIFFER"
    show(result, f"\n{table(evaluate.rows(result))}\n\n{verdict}")
    if not is_same:
        print("lmcache-cartridge: the cartridge did not answer as the document does", file=sys.stderr)
    return int(not is_same)


def _build(settings: Settings) -> tuple[Settings, str, list[int]]:
    """Return `settings`, and the name and token ids of the cartridge that was made and registered."""
    from ..artifact.reading import load_token_ids
    from ..library.registry import Registry
    from ..make.model import CausalModel
    from ..make.prefill import build

    registry = Registry(settings.registry_path)
    version = registry.next_version(SHEET, settings.cartridges_dir)
    root = settings.cartridges_dir / SHEET / str(version)
    say(f"1/3 building the cartridge of {SHEET}.txt: one prefill, then the canary")
    canary = " " + load_sheet(SHEET).questions[0].text
    model = CausalModel(str(MODEL_DIR))
    made = build(model, SHEETS_DIR / f"{SHEET}.txt", root, cartridge_id=SHEET, version=version, canary=canary)
    registry.register(root)
    say(f"    p = {made.positions} positions, {size(made.payload_bytes)}")
    return settings, made.name, load_token_ids(made, root).tolist()


def _ask(settings: Settings, name: str, ids: list[int], logs: Path) -> dict[Way, list[Answer]]:
    """Return the answers each way."""
    from ..make.ask import ServerAsker
    from ..make.evaluate import ask_all
    from ..make.trial.own import OwnServer, eager

    questions = [question._replace(text=f" {question.text}") for question in load_sheet(SHEET).questions]
    say("2/3 starting vLLM (tens of seconds)")
    server = OwnServer(
        str(MODEL_DIR), logs, vllm_args=[*SERVER_ARGS, *eager()],
        settings={"home": settings.home, "cpu_bytes": 64 << 20},
    )  # fmt: skip
    try:
        server.start()
        with server.client() as client:
            say(f"3/3 asking {len(questions)} questions three ways")
            return ask_all(ServerAsker(client, name, ids, "text"), questions, TOKENS)
    finally:
        server.stop()
