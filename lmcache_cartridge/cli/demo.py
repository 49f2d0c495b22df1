"""The demo: a document is prefilled once into a cartridge, then a real vLLM server answers from it."""

from __future__ import annotations

from contextlib import ExitStack

from .making import own_server
from .recall import MODEL_DIR, SHEETS_DIR, load_sheet
from .show import say, show, size, table

SHEET = "ward-a"
CHUNK = 256
TOKENS = 8
"""Tokens of an answer at most."""


def run() -> int:
    """Run the demo and print its table; 0 if the cartridge answered exactly as the document in the prompt does.

    Everything lies in a directory that is removed at the end. Stops the server it starts.
    """
    from ..make import evaluate
    from ..make.ask import ServerAsker
    from ..make.document import read_document
    from ..make.prefill import build

    questions = [question._replace(text=f" {question.text}") for question in load_sheet(SHEET).questions]
    with ExitStack() as stack:
        server, maker = own_server(stack, str(MODEL_DIR), CHUNK, "")
        say(f"1/3 building the cartridge of {SHEET}.txt: one prefill, then the canary")
        document, root = read_document(maker.model, SHEETS_DIR / f"{SHEET}.txt"), maker.directory / SHEET / "1"
        build(maker.model, document, root, cartridge_id=SHEET, version=1, canary=questions[0].text)
        made = maker.add(root)
        say(f"    p = {made.positions} positions, {size(made.payload_bytes)}")
        say("2/3 starting vLLM (tens of seconds)")
        server.start()
        client = stack.enter_context(server.client())
        say(f"3/3 asking {len(questions)} questions three ways")
        asker = ServerAsker(client, made.name, document.ids, "text")
        answers = evaluate.ask_all(asker, questions, TOKENS)
    result = evaluate.report(SHEET, answers, None)
    expected, got = ([answer.got for answer in answers[way]] for way in ("document", "cartridge"))
    verdict = "the cartridge answered word for word as the document in the prompt did"
    if got != expected:
        verdict = "ANSWERS DIFFER: the cartridge did not answer as the document does"
    show(result, f"\n{table(evaluate.rows(result))}\n\n{verdict}")
    return int(got != expected)
