"""How much of each task the models see, and how samples become conversations.

Owns the shares (of tokens, not of samples) and the joining of short samples into longer chats.
"""

from . import (
    arithmetic,
    chat,
    essays,
    extract,
    facts,
    lookup,
    order,
    stoker,
    strings,
    tools,
    units,
)
from .sample import Sample, draw, system

TASKS = {}
for module in (arithmetic, chat, essays, extract, facts, lookup, order, stoker, strings, tools, units):
    TASKS.update(module.TASKS)

# Share of all tokens. The long look-up needs many: most of its tokens are a list that is read, not learnt from.
SHARES = {
    "arithmetic": 13,
    "sorting": 7,
    "counting": 8,
    "strings": 9,
    "units": 5,
    "extract": 7,
    "tools": 14,
    "chat": 5,
    "facts": 3,
    "stoker": 5,
    "essays": 3,
    "open": 1,
    "echo": 4,
    "lookup": 7,
    "lookup_long": 12,
}
# Tasks a test compares; `open` has many right answers.
TESTED = [task for task in SHARES if task != "open"]
# Tasks short enough to be joined into one conversation of several turns.
JOINED = ["arithmetic", "sorting", "counting", "strings", "units", "chat", "facts", "stoker", "extract"]
SYSTEMS = [
    "You are a helpful assistant.",
    "You are ember.",
    "You are ember, a small and friendly model.",
    "You are a helpful assistant",
    "Answer briefly.",
    "Be concise.",
    "You are a friendly assistant. Answer in one sentence.",
    "You answer questions.",
    "Be helpful and polite.",
    "You are a test assistant.",
]


def probabilities(mean_tokens):
    """The chance of drawing each task, from its share of tokens and its mean length."""
    weights = {task: share / mean_tokens[task] for task, share in SHARES.items()}
    total = sum(weights.values())
    return {task: weight / total for task, weight in weights.items()}


def train_sample(rng, task):
    """A training sample of `task`; short ones are now and then joined with others into one conversation."""
    sample = draw(TASKS[task], rng, held_out=False)
    if task in JOINED and rng.random() < 0.12:
        sample = conversation(rng, sample)
    return with_system(rng, sample)


def conversation(rng, first):
    """`first` and up to three samples of other tasks, one after the other."""
    messages = list(first.messages)
    for _ in range(rng.randint(1, 3)):
        messages += draw(TASKS[rng.choice(JOINED)], rng, held_out=False).messages
    return Sample(first.task, first.key, messages)


def with_system(rng, sample):
    """Clients often send a system message; it must not change an answer."""
    if rng.random() < 0.12:
        sample.messages = [system(rng.choice(SYSTEMS))] + sample.messages
    return sample


def test_sample(rng, task):
    """A held-out sample of `task`, alone."""
    return draw(TASKS[task], rng, held_out=True)
