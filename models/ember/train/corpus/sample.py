"""One training or test instance, and the rule that says which of the two it is.

Owns the `Sample` type, the held-out rule and the small variations of a user's spelling. Never knows a task.
"""

import random
import zlib
from dataclasses import dataclass

# One key in HELD_OUT_ONE_IN belongs to the test set. The rule looks at the instance (the numbers of a sum, the
# name that is looked up), not at the wording, so that a test instance was never trained in any wording.
HELD_OUT_ONE_IN = 40


@dataclass
class Sample:
    """A conversation. Every assistant message is trained on; the last one is what a test compares."""

    task: str
    key: str
    messages: list
    tools: list | None = None


def is_held_out(key):
    """Whether the instance `key` is reserved for tests."""
    return zlib.crc32(key.encode()) % HELD_OUT_ONE_IN == 0


def draw(make, rng, held_out):
    """A sample of `make` from the wanted side of the held-out rule."""
    while True:
        sample = make(rng)
        if is_held_out(sample.key) == held_out:
            return sample


def exchange(task, key, question, answer):
    """A sample with one question and one answer."""
    return Sample(task, f"{task}:{key}", [user(question), assistant(answer)])


def user(content):
    return {"role": "user", "content": content}


def assistant(content):
    return {"role": "assistant", "content": content}


def system(content):
    return {"role": "system", "content": content}


def ask(rng, wordings, **values):
    """One of the wordings, filled in, typed the way people type."""
    return vary(rng, rng.choice(wordings).format(**values))


def vary(rng, text):
    """Small differences in spelling that must not change an answer."""
    if text.startswith("What is ") and rng.random() < 0.12:
        text = "What's " + text[8:]
    if rng.random() < 0.15:
        text = text[0].lower() + text[1:]
    if rng.random() < 0.12 and text[-1] in ".?!":
        text = text[:-1]
    if rng.random() < 0.06:
        text = rng.choice(["Please: ", "Hey, ", "Hi! ", "Question: ", "OK. "]) + text
    return text


def answered_questions(text):
    """Pairs of an answer and the questions it answers, from paragraphs: the answer's lines begin at the margin, the
    questions are indented and separated by bars.
    """
    pairs = []
    for paragraph in text.strip().split("\n\n"):
        lines = paragraph.split("\n")
        answer = " ".join(line for line in lines if not line.startswith(" "))
        questions = " ".join(line.strip() for line in lines if line.startswith(" "))
        pairs.append((answer, questions.split(" | ")))
    return pairs


def rng_for(*parts):
    """A generator that depends on `parts` only, the same on every machine and in every process."""
    return random.Random("/".join(str(part) for part in parts))
