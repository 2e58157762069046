"""Makes the example inputs, the same bytes every time: `python examples/make_examples.py`.

The chat lines look like what people batch: a few tasks, each with a long system prompt, some with a block of worked
examples, many short questions, two models, all shuffled. So neighbours share little until Tidegate orders them by prefix.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
SEED = 20
CHAT_LINES = 320
EMBEDDING_LINES = 100
MODELS = ("llama-3-8b", "qwen-2.5-7b")

SUPPORT = (
    "You are the first reader of the support inbox of Harbour Bikes, a shop that sells and repairs bicycles. "
    "Sort each message into exactly one of: order, delivery, repair, warranty, refund, other. "
    "Answer with one JSON object with the keys category, urgency (1 to 5) and summary (at most 20 words). "
    "A message that mentions an injury is always urgency 5. Never promise a refund, a date or a price. "
    "Messages may be in any language; answer in English. If the message is empty or unreadable, use other and urgency 1."
)
REVIEW = (
    "You rate product reviews for a marketplace. Give the sentiment as positive, negative or mixed, then a dash, then the "
    "one aspect that decided it, in at most four words. Irony counts as what the writer means, not as what the words say. "
    "Ignore remarks about the seller's packaging unless nothing else is said."
)
TRANSLATE = (
    "You translate user-interface texts of a booking site from English into German. Keep placeholders in braces exactly as "
    "they are. Address the reader with Sie. Keep it as short as the English. Answer with the translation alone."
)
EXTRACT = (
    "You read sentences from harbour logs and give back one JSON object with the keys vessel, event (arrival, departure or "
    "delay), berth and time in 24-hour form. Use null for whatever the sentence does not say. Never guess a berth."
)

REVIEW_EXAMPLES = (
    ("The hinge broke on day two, but they replaced it within a week.", "mixed - hinge quality"),
    ("Great, another charger that gets hot enough to fry an egg.", "negative - overheating"),
    ("I bought a second one for my mother. Enough said.", "positive - repeat purchase"),
)
EXTRACT_EXAMPLES = (
    (
        "The Marlene left berth 4 at ten past six in the evening.",
        '{"vessel": "Marlene", "event": "departure", "berth": 4, "time": "18:10"}',
    ),
    (
        "Fog again: the Oriel will not be in before noon.",
        '{"vessel": "Oriel", "event": "delay", "berth": null, "time": "12:00"}',
    ),
)

ITEMS = ("city bike", "cargo bike", "helmet", "rear light", "child seat", "folding lock", "saddle", "pannier")
TROUBLES = (
    "arrived with a bent wheel",
    "has not arrived after nine days",
    "makes a grinding noise uphill",
    "is a different colour from the one I ordered",
    "came loose while I was riding, and I hurt my wrist",
    "was charged twice on my card",
    "stopped working after the first rain",
)
PRODUCTS = ("kettle", "desk lamp", "rucksack", "headphones", "rain jacket", "coffee grinder", "keyboard", "tent")
VERDICTS = (
    "does what it says, and quietly",
    "feels cheaper than it looks in the pictures",
    "survived a week in the mountains",
    "is lovely until you have to clean it",
    "lasted exactly as long as the warranty",
    "is the best thing I bought this year",
)
PHRASES = (
    "Your booking for {count} guests is confirmed.",
    "Only {count} rooms left at this price!",
    "Cancel free of charge until {date}.",
    "We could not find {place}. Try another spelling.",
    "Add a note for your host (optional)",
    "Pay at the property",
)
PLACES = ("the search page", "the checkout", "the confirmation e-mail", "the host's calendar", "the mobile app")
VESSELS = ("Albatross", "Marlene", "Oriel", "Sankt Peter", "Tern", "Northern Light", "Vesper", "Brigand")
EVENTS = ("came in to berth {berth} at {hour}:{minute}", "cast off from berth {berth} at {hour}:{minute}", "is held up")


def main() -> None:
    _write("requests.jsonl", _chat_lines(random.Random(SEED)))
    _write("embeddings.jsonl", _embedding_lines(random.Random(SEED + 1)))


def _chat_lines(chance: random.Random) -> list[dict[str, Any]]:
    makers = (_support, _review, _translation, _extraction)
    bodies = []
    for number in range(CHAT_LINES):
        messages, max_tokens = makers[number % len(makers)](chance)
        model = MODELS[(number // len(makers)) % len(MODELS)]
        bodies.append({"model": model, "messages": messages, "max_tokens": max_tokens, "temperature": 0})
    chance.shuffle(bodies)
    return [
        {"custom_id": f"request-{number:04}", "method": "POST", "url": "/v1/chat/completions", "body": body}
        for number, body in enumerate(bodies, start=1)
    ]


def _embedding_lines(chance: random.Random) -> list[dict[str, Any]]:
    lines = []
    for number in range(1, EMBEDDING_LINES + 1):
        text = f"The {chance.choice(PRODUCTS)} {chance.choice(VERDICTS)}."
        body = {"model": "bge-small-en", "input": text}
        lines.append({"custom_id": f"review-{number:04}", "method": "POST", "url": "/v1/embeddings", "body": body})
    return lines


def _support(chance: random.Random) -> tuple[list[dict[str, str]], int]:
    order = chance.randint(10_000, 99_999)
    text = f"Hello, order {order}: the {chance.choice(ITEMS)} {chance.choice(TROUBLES)}. What can you do?"
    return _messages(SUPPORT, (), text), 96


def _review(chance: random.Random) -> tuple[list[dict[str, str]], int]:
    text = f"The {chance.choice(PRODUCTS)} {chance.choice(VERDICTS)}. {chance.randint(1, 5)} stars."
    return _messages(REVIEW, REVIEW_EXAMPLES, text), 16


def _translation(chance: random.Random) -> tuple[list[dict[str, str]], int]:
    return _messages(TRANSLATE, (), f"On {chance.choice(PLACES)}: {chance.choice(PHRASES)}"), 48


def _extraction(chance: random.Random) -> tuple[list[dict[str, str]], int]:
    berth, hour, minute = chance.randint(1, 12), chance.randint(0, 23), chance.randint(0, 59)
    event = chance.choice(EVENTS).format(berth=berth, hour=f"{hour:02}", minute=f"{minute:02}")
    return _messages(EXTRACT, EXTRACT_EXAMPLES, f"The {chance.choice(VESSELS)} {event}."), 64


def _messages(system: str, examples: tuple[tuple[str, str], ...], question: str) -> list[dict[str, str]]:
    messages = [{"role": "system", "content": system}]
    for asked, answered in examples:
        messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
    return [*messages, {"role": "user", "content": question}]


def _write(name: str, lines: list[dict[str, Any]]) -> None:
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    (HERE / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
