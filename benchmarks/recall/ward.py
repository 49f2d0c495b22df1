"""Synthetic ward fact sheets: their words, their facts, the questions on them, and their tokenizer.

A sheet lists patients and up to five attributes of each. Names and values are the same few hundred words in
every sheet; which patient has which value is drawn anew, so only the sheet can tell.

One word is one token, so the ids of two texts joined are the ids of the one followed by those of the other.
That is what lets a question follow a cartridge of its document. No torch here.
"""

from __future__ import annotations

import hashlib
import itertools
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

VOCAB_SIZE = 640
BOS, EOS, PAD, UNK = "<s>", "</s>", "<pad>", "<unk>"

ATTRIBUTES: dict[str, tuple[str, ...]] = {
    "blood": ("A+", "A-", "B+", "B-", "AB+", "AB-", "O+", "O-"),
    "ward": tuple(str(number) for number in range(1, 33)),
    "allergy": tuple(
        "latex penicillin peanuts aspirin iodine sulfa codeine eggs shellfish soy wheat pollen dust bees "
        "milk nickel morphine kiwi sesame mold celery mustard lupin none".split()
    ),
    "drug": tuple(
        "warfarin metformin insulin digoxin heparin lisinopril atenolol furosemide ramipril naproxen "
        "prednisone gabapentin sertraline lithium levodopa statin omeprazole tramadol ibuprofen "
        "cetirizine doxycycline cefalexin nitrate diazepam fentanyl ketamine tacrolimus rifampin "
        "colchicine allopurinol baclofen quinine".split()
    ),
    "diagnosis": tuple(
        "asthma diabetes anemia gout stroke sepsis pneumonia angina epilepsy migraine arthritis nephritis "
        "hepatitis colitis eczema fracture influenza measles lupus obesity cystitis vertigo bronchitis "
        "psoriasis".split()
    ),
}
"""Every value belongs to one attribute only, so a value alone says what it is of."""

FILLERS = (
    "Seen by the team this morning and stable.",
    "No change since the last round.",
    "Family was informed by phone.",
    "Vital signs are within the normal range.",
    "The night was quiet and sleep was good.",
    "Fluids were given as planned.",
    "Lab results are still pending.",
    "The next review is planned for tomorrow.",
    "Walking with help in the corridor.",
    "Diet is normal and appetite is good.",
    "Pain is under control today.",
    "Discharge papers were not yet prepared.",
)
"""Sentences that answer no question."""

QUESTIONS = (
    "{attribute} of {patient}?",
    "{patient} {attribute}?",
    "what is the {attribute} of patient {patient}?",
)
"""Three ways to ask for one fact, as the content of a chat message."""

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'system' %}{{ message['content'] + ' ' }}"
    "{% elif message['role'] == 'user' %}{{ 'Q: ' + message['content'] + ' A:' }}"
    "{% elif message['role'] == 'assistant' %}{{ ' ' + message['content'] + eos_token }}"
    "{% else %}{{ raise_exception('a role is system, user or assistant, not ' + message['role']) }}"
    "{% endif %}{% endfor %}"
)
"""Renders a sheet as system message and a question as user message to the ids of both in a row."""

_WORD = r"[QA]:|[^\s:,.?]+|[:,.?]"
"""One token: a mark, a word, or a sign after a word. The same pattern serves Python and the HF tokenizer."""


class Fact(NamedTuple):
    patient: str
    attribute: str
    value: str


@dataclass(frozen=True, slots=True)
class Document:
    """A sheet. No patient occurs twice in it, so every fact has one answer."""

    text: str
    facts: tuple[Fact, ...]
    """In the order of the text."""


UNSEEN_SHEETS = {f"short {n}": 512 for n in (9, 10, 12, 13, 14)} | {"long 1": 1024}
"""Seeds of sheets that no default was chosen by (short 3 to 8 were), and their tokens: lists, notes and both, with sentences
between the facts and without."""


def _grammar_words() -> list[str]:
    """Return all words except patient names, each once, special tokens first."""
    signs = ["Q:", "A:", ":", ",", ".", "?"]
    frame = "Patient Note on The is of what the patient".split()
    values = itertools.chain.from_iterable(ATTRIBUTES.values())
    fillers = itertools.chain.from_iterable(re.findall(_WORD, filler) for filler in FILLERS)
    return list(dict.fromkeys([BOS, EOS, PAD, UNK, *signs, *frame, *ATTRIBUTES, *values, *fillers]))


def _patient_names(count: int, taken: Sequence[str]) -> tuple[str, ...]:
    """Return `count` invented names that are not among `taken`; the same ones on every Python."""
    consonants = "bdhjklmnprstvz"
    parts = itertools.product(consonants, "aeiou", consonants, "aeiou", ["", "n", "l", "r", "s"])
    names = {"".join(part).capitalize() for part in parts} - set(taken)
    # Ordered by a hash: mixed like a random draw, but not at the mercy of a random generator's version.
    return tuple(sorted(names, key=lambda name: hashlib.sha256(name.encode()).digest())[:count])


_GRAMMAR = _grammar_words()
NAMES: tuple[str, ...] = _patient_names(VOCAB_SIZE - len(_GRAMMAR), _GRAMMAR)
"""As many as fill the vocabulary, so that each id below VOCAB_SIZE is a word."""

VOCABULARY: dict[str, int] = {word: index for index, word in enumerate([*_GRAMMAR, *NAMES])}


def encode(text: str) -> list[int]:
    """Return the token ids of `text`, without `<s>`. Raises `KeyError` on a word outside the vocabulary."""
    return [VOCABULARY[word] for word in re.findall(_WORD, text)]


def ask(fact: Fact, template: int) -> str:
    """Return the question for `fact` as it follows a sheet: `Q: blood of Tehor? A:`."""
    content = QUESTIONS[template].format(attribute=fact.attribute, patient=fact.patient)
    return f"Q: {content} A:"


def write_document(rng: random.Random, min_tokens: int, patients: Sequence[str] = NAMES) -> Document:
    """Draw a sheet of at least `min_tokens` tokens with `<s>`, and at most 40 more, about some of `patients`.

    Advances `rng`. Raises `ValueError` when the patients run out first; 13 tokens a patient are enough.
    """
    styles = rng.choice([(_list_style,), (_note_style,), (_list_style, _note_style)])
    filler_share = rng.choice([0.0, 0.0, 0.5, 1.0])
    length, lines, facts = 1, [], []
    for patient in rng.sample(patients, len(patients)):
        if length >= min_tokens:
            return Document("\n".join(lines), tuple(facts))
        attributes = rng.sample(list(ATTRIBUTES), rng.randint(3, 5))
        known = [Fact(patient, attribute, rng.choice(ATTRIBUTES[attribute])) for attribute in attributes]
        line = rng.choice(styles)(patient, known)
        if rng.random() < filler_share:
            line += " " + rng.choice(FILLERS)
        length += len(encode(line))
        lines.append(line)
        facts += known
    raise ValueError(f"{len(patients)} patients fill {length} tokens, {min_tokens} were asked for")


def _list_style(patient: str, known: Sequence[Fact]) -> str:
    return f"Patient {patient}: " + ", ".join(f"{fact.attribute} {fact.value}" for fact in known) + "."


def _note_style(patient: str, known: Sequence[Fact]) -> str:
    return f"Note on {patient}. " + " ".join(f"The {fact.attribute} is {fact.value}." for fact in known)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Return the HF tokenizer: `<s>` and `encode(text)`, unknown words as `<unk>`, with the chat template."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel(VOCABULARY, unk_token=UNK))
    words.pre_tokenizer = pre_tokenizers.Split(Regex(_WORD), "removed", invert=True)
    words.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, VOCABULARY[BOS])]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=words,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        unk_token=UNK,
        chat_template=CHAT_TEMPLATE,
        model_max_length=8192,
    )
