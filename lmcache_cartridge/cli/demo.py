"""The demo: a document is prefilled once into a cartridge, then a real vLLM server answers from it."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

from .options import settings_of
from .recall import MODEL_DIR, SHEETS_DIR, load_sheet
from .show import say, show, size, table

SHEET = "ward-a"
SERVER_ARGS = ["--max-model-len", "8192", "--kv-cache-memory-bytes", str(64 << 20)]
"""vLLM flags that start the tiny model fast: a small KV cache."""
TOKENS = 8
"""Tokens of an answer at most."""


def run() -> int:
    """Run the demo and print its table; 0 if the cartridge answered exactly as the document in the prompt does.

    Everything lies in `--home`, or in a directory that is removed at the end. Stops the server it starts.
    """
    from ..artifact.reading import load_token_ids
    from ..library.registry import Registry
    from ..make import evaluate
    from ..make.ask import ServerAsker
    from ..make.model import CausalModel
    from ..make.prefill import build
    from ..make.trial.own import OwnServer, eager

    questions = [question._replace(text=f" {question.text}") for question in load_sheet(SHEET).questions]
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(TemporaryDirectory(prefix="cartridge-demo-")))
        settings = settings_of(home=scratch)
        registry = Registry(settings.registry_path)
        version = registry.next_version(SHEET, settings.cartridges_dir)
        root = settings.cartridges_dir / SHEET / str(version)
        say(f"1/3 building the cartridge of {SHEET}.txt: one prefill, then the canary")
        made = build(
            CausalModel(str(MODEL_DIR)), SHEETS_DIR / f"{SHEET}.txt", root, cartridge_id=SHEET, version=version,
            canary=questions[0].text,
        )  # fmt: skip
        registry.register(root)
        say(f"    p = {made.positions} positions, {size(made.payload_bytes)}")
        say("2/3 starting vLLM (tens of seconds)")
        server = OwnServer(
            str(MODEL_DIR), scratch, vllm_args=[*SERVER_ARGS, *eager()],
            settings={"home": settings.home, "cpu_bytes": 64 << 20},
        )  # fmt: skip
        stack.callback(server.stop)
        server.start()
        client = stack.enter_context(server.client())
        say(f"3/3 asking {len(questions)} questions three ways")
        asker = ServerAsker(client, made.name, load_token_ids(made, root).tolist(), "text")
        answers = evaluate.ask_all(asker, questions, TOKENS)
    result = evaluate.report(SHEET, answers, None)
    document, cartridge = ([answer.got for answer in answers[way]] for way in ("document", "cartridge"))
    verdict = "the cartridge answered word for word as the document in the prompt did"
    if document != cartridge:
        verdict = "ANSWERS DIFFER: the cartridge did not answer as the document does"
    show(result, f"\n{table(evaluate.rows(result))}\n\n{verdict}")
    return int(document != cartridge)
