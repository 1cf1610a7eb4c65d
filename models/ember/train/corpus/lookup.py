"""Finding the value of a key in a list of up to about 1800 tokens, several questions a list."""

from .sample import Sample, ask, assistant, user
from .words import WORDS, made_up, scrambled

INTRO = [
    "Here is a list:",
    "This is a table of keys and values.",
    "Read this list.",
    "Here are some entries:",
    "Data:",
    "Look at this list:",
]
QUESTION = [
    "What is the value of {key}?",
    "What is {key}?",
    "Look up {key}.",
    "Which value belongs to {key}?",
    "Find {key}.",
    "What does the list say about {key}?",
    "Give me the value of {key}.",
    "Value of {key}?",
]
ABSENT = "{key} is not in the list."
LAYOUTS = [
    "{key}: {value}\n",
    "{key}: {value}\n",
    "{key} = {value}\n",
    "- {key} -> {value}\n",
    "{key} {value}\n",
    "{key}: {value}, ",
    '"{key}": "{value}",\n',
]
SHORTEST, LONGEST = 4, 170


def key_maker(rng):
    """All keys of one list are of one kind, so that they look alike."""
    letter = rng.choice("abcdefghkmnprstuvwxyz")
    return rng.choice(
        [
            lambda: made_up(rng, 3),
            lambda: made_up(rng, 3),
            lambda: made_up(rng),
            lambda: made_up(rng).capitalize(),
            lambda: rng.choice(WORDS),
            lambda: f"{made_up(rng, 2)}-{rng.randint(1, 99)}",
            lambda: f"{letter}{rng.randint(100, 999)}",
            lambda: scrambled(rng),
            lambda: f"{rng.choice(WORDS)} {rng.choice(WORDS)}",
        ]
    )


def value_maker(rng):
    return rng.choice(
        [
            lambda: str(rng.randint(0, 9999)),
            lambda: str(rng.randint(100, 999)),
            lambda: made_up(rng),
            lambda: rng.choice(WORDS),
            lambda: f"{made_up(rng, 2)}-{rng.randint(1, 99)}",
            lambda: f"{rng.choice(WORDS)} {rng.randint(1, 99)}",
        ]
    )


def entries(rng, n):
    """`n` entries with distinct keys."""
    key, value = key_maker(rng), value_maker(rng)
    found = {}
    for _ in range(3 * n):
        found.setdefault(key(), value())
        if len(found) == n:
            break
    return found


def lookup_of(rng, task, n, questions):
    """A list of `n` entries, then questions about it, each a turn; the last one is the tested one."""
    pairs = entries(rng, n)
    layout = rng.choice(LAYOUTS)
    text = "".join(layout.format(key=key, value=value) for key, value in pairs.items()).rstrip(", \n")
    asked = rng.sample(list(pairs), min(questions, len(pairs)))
    messages = []
    for key in asked:
        content = ask(rng, QUESTION, key=key)
        messages += [user(content), assistant(pairs[key])]
    messages[0]["content"] = f"{rng.choice(INTRO)}\n{text}\n{messages[0]['content']}"
    # Short lists also teach to say that a key is missing.
    if n <= 24 and rng.random() < 0.15:
        missing = made_up(rng, 3)
        if missing not in pairs:
            messages += [user(ask(rng, QUESTION, key=missing)), assistant(ABSENT.format(key=missing))]
            asked.append(missing)
    return Sample(task, f"lookup:{asked[-1]} {pairs.get(asked[-1])} {n}", messages)


def n_questions(rng):
    return rng.choice([1, 2, 3, 4, 6, 8])


def short(rng):
    """Up to about 400 tokens; short lists are common, which is where looking back is learnt first."""
    return lookup_of(rng, "lookup", int(SHORTEST * (40 / SHORTEST) ** rng.random()), n_questions(rng))


def long(rng):
    """Up to the longest list that leaves room to answer."""
    return lookup_of(rng, "lookup_long", rng.randint(50, LONGEST), n_questions(rng))


TASKS = {"lookup": short, "lookup_long": long}
