"""The figures that the reference systems publish beside ours, for `reference-tables.md`: ours are of result files, none typed."""

from __future__ import annotations

from collections.abc import Sequence

from figures import Case, Figure, Result, Results, number, table
from sizes import SHAPES

NONE = "not measured"

PREFILL = {
    256: (0.037, 0.038, 1.0), 512: (0.050, 0.040, 1.3), 1024: (0.072, 0.041, 1.8), 2048: (0.138, 0.048, 2.9),
    4096: (0.312, 0.071, 4.4), 8192: (0.758, 0.110, 6.9), 16_384: (2.027, 0.192, 10.6),
}  # fmt: skip
"""By p: seconds in context, with a cartridge, and their ratio."""
SERVING = {4096: (31, 43, 75, 166), 8192: (41, 69, 127, 163), 16_384: (78, 127, 245, 158), 32_768: (56, 136, 261, 158)}
"""By p: TTFT in ms at c = 1, 4 and 16, and output tokens/s at c = 1."""
SIZES = {
    ("Qwen2.5-7B", 256): 15, ("Qwen2.5-1.5B", 256): 7, ("Llama-2-7B", 256): 128,
    ("Qwen2.5-7B", 8192): 470, ("Qwen2.5-1.5B", 8192): 224, ("Llama-2-7B", 8192): 4856,
}  # fmt: skip
"""MB, as printed."""
QUALITY: dict[str, tuple[float, float | None, float, float, float]] = {
    "ML research, 8K tokens": (1.2, 4.5, 3.3, 3.4, 3.1), "Llama 2 paper, 20K": (2.7, 3.7, 2.9, 2.1, 2.5),
    "GPL v3, 7K": (2.9, 3.8, 2.8, 2.3, 2.4), "clinical, 12K": (2.5, 3.9, 4.1, 3.7, 3.3),
    "RFC 9110, 49K": (2.5, None, 4.1, 3.9, 3.7), "Wikipedia, 2K": (3.6, 4.4, 3.8, 4.0, 3.7),
}  # fmt: skip
"""Judged 0 to 5: no prefix, full document, 4x, 16x, p = 256."""
INITS = {256: (661, 682, 59.5, 60.0), 4096: (1144, 1131, 56.5, 55.9), 16_384: (2684, 2610, 44.5, 44.2)}
"""By p: seconds of training from First-k and SCI, tokens/s of each."""
HITS = 57


def text(results: Results) -> str:
    """Return the generated part of `reference-tables.md`."""
    chapters = {
        "Prefill": prefill, "End to end": end_to_end, "Time to first token": serving, "Sizes": lambda _: sizes(),
        "Quality": lambda _: quality(), "Where training starts": lambda _: inits(), "Hits, memory for 5 of 20": hits,
    }  # fmt: skip
    return "\n\n".join(f"## {title}\n\n{chapter(results)}" for title, chapter in chapters.items())


def ttft(results: Results, what: str, p: int, *of: tuple[int, str]) -> tuple[Result, list[Figure]] | None:
    """Return a figure at p for each number of requests at once and way, all of one run."""
    return results.side_by_side("ttft", what, *({"p": p, "c": c, "way": way} for c, way in of))


def prefill(results: Results) -> str:
    """Return seconds in context and with a cartridge, at all p that are published."""
    rows, runs, missing = [], [], []
    for p, (dense_s, warm_s, ratio) in PREFILL.items():
        published = [f"{p:,}", f"{dense_s:g}", f"{warm_s:g}", f"**{ratio:g}**"]
        if found := ttft(results, "first token", p, (1, "dense"), (1, "warm")):
            runs.append(found[0])
            rows.append([*published, *_over(found[1])])
        else:
            missing.append(p)
            rows.append([*published, *3 * [NONE]])
    heading = ["p", "published: in context, s", "cartridge, s", "speed-up", "ours: dense", "warm cartridge", "speed-up"]
    return _told(
        results, "Published: Llama-3.2-1B-Instruct on an AMD W7900, FlexAttention and torch.compile. Where computing is slow, as "
        "on a CPU, what is not computed saves more, so our speed-ups are larger.",
        heading, rows, runs, missing, "1", "dense,warm",
    )  # fmt: skip


def end_to_end(results: Results) -> str:
    """Return tokens/s of a whole answer at p = 16,384, and what a load of several sees."""
    rows, runs = [], []
    for what, published, p, c, measured in (
        ("tokens/s, p = 16,384: cartridge / in context", "44.5 / 27.4 = **1.62**", 16_384, 1, "output"),
        ("tokens/s while decoding, the same", '**1.0** ("the same")', 16_384, 1, "decode"),
        ("TTFT p50 while serving: in context / cartridge, ours at p = 1,024, c = 16", "**7.0**, p and load not told", 1024, 16, "first token"),
    ):  # fmt: skip
        order = ("dense", "warm") if measured == "first token" else ("warm", "dense")
        found = ttft(results, measured, p, *((c, way) for way in order))
        rows.append([what, published, "{} / {} = {}".format(*_over(found[1])) if found else NONE])
        runs += [found[0]] if found else []
    return _told(
        results, "Published beside the table above, on the same card; the answers' length is not told. An answer here has 16 "
        "tokens behind minutes of prefill, so its ratio end to end is that of the prefill.",
        ["", "published", "ours"], rows, runs,
    )  # fmt: skip


def serving(results: Results) -> str:
    """Return TTFT at 1, 4 and 16 requests at once, and tokens/s at one."""
    rows, runs, missing = [], [], []
    for p, (*published, rate) in SERVING.items():
        row = [f"{p:,}", " / ".join(map(str, published)), f"**{published[2] / published[0]:.1f}**", str(rate)]
        for way in ("warm", "prefix"):
            cells = [ttft(results, "first token", p, (c, way)) for c in (1, 4, 16)]
            missing += [p] if None in cells else []
            runs += [cell[0] for cell in cells if cell]
            told = [number(cell[1][0].value, "s") if cell else NONE for cell in cells]
            row.append(" / ".join(told) if any(cells) else NONE)
            both = ttft(results, "first token", p, (16, way), (1, way))
            row.append(_over(both[1])[2] if both else NONE)
        rows.append(row)
    heading = [
        "p", "published: c = 1 / 4 / 16, ms", "c = 16 / c = 1", "tokens/s, c = 1", "ours, warm: c = 1 / 4 / 16",
        "c = 16 / c = 1", "vLLM's prefix cache: c = 1 / 4 / 16", "c = 16 / c = 1",
    ]  # fmt: skip
    return _told(
        results, "Published on an H100, the model not told. Sixteen requests share a GPU's cores and divide a CPU's, so compare "
        "c = 16 / c = 1 with that of vLLM's own prefix cache beside it, which loads nothing.",
        heading, rows, runs, missing, "1,4,16", "prefix,warm",
    )  # fmt: skip


def sizes() -> str:
    """Return the bytes of a cartridge, computed."""
    rows = []
    for (name, p), printed in SIZES.items():
        taken = p * SHAPES[name].token_bytes
        as_printed = [unit for unit, size in (("MB", 1e6), ("MiB", 2**20)) if abs(taken / size - printed) < 0.5]
        note = f"as published, in {as_printed[0]}" if as_printed else "does not follow from the shape"
        rows.append([name, f"{p:,}", f"{printed:,}", f"{taken / 1e6:,.1f}", f"{taken / 2**20:,.0f}", note])
    a_position = SHAPES["Llama-2-7B"].token_bytes
    return (
        "Computed from each model's shape, exact in the artefact but for a header.\n\n"
        + table(["model", "p", "published, MB", "ours, MB (10^6)", "MiB (2^20)", ""], rows)
        + f"\n\nA position of Llama-2-7B takes {a_position // 1024} KiB, so 8,192 take "
        f"{8192 * a_position / 1e6:,.0f} MB; the published 4,856 MB is {4856e6 / 8192 / 1024:.0f} KiB a position."
    )


def quality() -> str:
    """Return published judgements, and what each keeps of what the document adds."""
    rows = []
    for document, (none, full, *short) in QUALITY.items():
        kept = ["-" if full is None else f"{(one - none) / (full - none):.0%}" for one in short]
        rows.append([document, f"{none:g}", "-" if full is None else f"{full:g}", *map("{:g}".format, short), *kept])
    heading = ["published", "no prefix", "full", "4x", "16x", "p = 256", "kept at 4x", "at 16x", "at p = 256"]
    return (
        "Judged by a model from 0 to 5, ten questions a document, several language models. *Kept* is the share of what the full "
        "document adds to no prefix. Ours, on other models and documents, is in [benchmarks](benchmarks.md#quality); "
        "`lmcache-cartridge evaluate --judge-url` judges from 0 to 5.\n\n" + table(heading, rows)
    )


def inits() -> str:
    """Return the published seconds of training by start."""
    rows = [
        [f"{p:,}", f"{first:,} / {sci:,} = **{first / sci:.2f}**", f"{rate:g} / {sci_rate:g}"]
        for p, (first, sci, rate, sci_rate) in INITS.items()
    ]
    return "Published on the W7900.\n\n" + table(["p", "seconds from First-k / SCI", "tokens/s of each"], rows)


def hits(results: Results) -> str:
    """Return the share of requests whose cartridge was in memory."""
    rows, runs = [["R1's residency, the load not told", f"**{HITS}%**", "", ""]], []
    for result in results.of("replacement")[:1]:
        loads = dict.fromkeys(str(one.case["load"]) for one in result.figures)
        for load in (load for load in loads if load.endswith("20 on 5")):
            wanted: list[Case] = [{"load": load, "policy": policy} for policy in ("ours", "LRU", "optimum")]
            if found := results.side_by_side("replacement", "hits", *wanted):
                rows.append([load, *(number(one.value, one.unit) for one in found[1])])
                runs.append(found[0])
    about = "Requests for 20 cartridges of one size with memory for 5. The optimum knows every request to come."
    told = _told(results, about, ["load", "hits", "LRU", "optimum"], rows, runs)
    return told if runs else f"{told}\n\n{results.again('replacement')}"


def _over(both: Sequence[Figure]) -> list[str]:
    """Return two figures, and the first over the second."""
    over, under = both
    return [number(over.value, over.unit), number(under.value, under.unit), f"**{over.value / under.value:.3g}**"]


def _told(
    results: Results, on: str, heading: Sequence[str], rows: Sequence[Sequence[str]], runs: Sequence[Result],
    missing: Sequence[int] = (), concurrency: str = "", ways: str = "",
) -> str:  # fmt: skip
    """Return a table between what the published figures were measured on and what ours were."""
    parts = [on, table(heading, rows)]
    parts += [f"Ours, of which only ratios compare: {about}." for about in dict.fromkeys(run.about() for run in runs)]
    if missing:
        wanted = ",".join(str(p) for p in dict.fromkeys(missing))
        command = f"python benchmarks/ttft.py --positions {wanted} --concurrency {concurrency} --ways {ways}"
        parts.append(results.again("ttft", command))
    return "\n\n".join(parts)
