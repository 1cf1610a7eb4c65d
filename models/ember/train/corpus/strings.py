"""Work on letters and words: reverse, spell, capitals, pick, join, repeat, replace, and saying a text back."""

from .sample import ask, exchange
from .words import ADJECTIVES, ANIMALS, THINGS, VERBS, WORDS, any_word, made_up

REVERSE_LETTERS = [
    "Reverse the letters: {text}",
    "Reverse these letters: {text}",
    "Write these letters backwards: {text}",
    "Say the letters in reverse order: {text}",
]
REVERSE_WORDS = [
    "Reverse the order of these words: {text}",
    "Write the words in reverse order: {text}",
    "Reverse the words: {text}",
]
SPELL = ["Spell these words: {text}", "How do you spell {text}?", "Spell {text}.", "Spell out: {text}"]
REVERSE_WORD = [
    "Reverse the word {word}.",
    "Write {word} backwards.",
    "What is {word} backwards?",
    "Spell {word} backwards.",
    "Reverse the string {word}",
]
COUNT_LETTERS = [
    "How many letters are in {word}?",
    "How many letters has the word {word}?",
    "Count the letters of {word}.",
    "How long is the word {word}?",
]
CAPITALS = [
    "Write in capital letters: {text}",
    "Make this upper case: {text}",
    "Convert to upper case: {text}",
    "Uppercase: {text}",
]
LOWER = [
    "Write in small letters: {text}",
    "Make this lower case: {text}",
    "Convert to lower case: {text}",
    "Lowercase: {text}",
]
NTH = ["What is the {nth} word of: {text}", "Which word is the {nth} in: {text}", "Give me the {nth} word: {text}"]
JOIN = ["Join these words with a {name}: {text}", "Put a {name} between these words: {text}"]
REPEAT = ["Repeat the word {word} {n} times.", "Say {word} {n} times.", "Write {word} {n} times."]
REPLACE = ["Replace {a} with {b} in: {text}", "In this text, change {a} to {b}: {text}"]
REMOVE = ["Remove {a} from: {text}", "Delete the word {a} from: {text}", "Leave out {a}: {text}"]
ECHO = [
    "Repeat after me: {text}",
    "Say: {text}",
    "Repeat this: {text}",
    "Echo: {text}",
    "Reply with exactly: {text}",
    "Copy this text: {text}",
    "Answer with exactly this: {text}",
    "Repeat: {text}",
    "Just say {text}",
    "Write: {text}",
    "Repeat this text: {text}",
    "Repeat the following text word for word: {text}",
    "Say {text}",
]
NTHS = ["first", "second", "third", "fourth", "fifth", "sixth"]


def words(rng, low, high):
    """Between `low` and `high` words."""
    return [any_word(rng) for _ in range(rng.randint(low, high))]


def reverse_letters(rng):
    letters = [rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(rng.randint(3, 10))]
    gap = rng.choice([" ", " ", "-"])
    text = gap.join(letters)
    return exchange("strings", text, ask(rng, REVERSE_LETTERS, text=text), gap.join(reversed(letters)))


def reverse_words(rng):
    items = words(rng, 3, 8)
    text = " ".join(items)
    return exchange("strings", text, ask(rng, REVERSE_WORDS, text=text), " ".join(reversed(items)))


def spell(rng):
    items = rng.sample(WORDS, rng.randint(2, 3)) if rng.random() < 0.6 else [made_up(rng)]
    text = " and ".join(items)
    return exchange("strings", f"spell {text}", ask(rng, SPELL, text=text), ", ".join("-".join(item) for item in items))


def reverse_word(rng):
    """Spelt first: the letters of a word are inside its tokens, and saying them puts them where they can be read."""
    word = rng.choice(WORDS) if rng.random() < 0.6 else made_up(rng)
    spelt, backwards = "-".join(word), word[::-1]
    question = ask(rng, REVERSE_WORD, word=word)
    return exchange(
        "strings", f"reverse {question}", question, f"{spelt} reversed is {'-'.join(backwards)}: {backwards}"
    )


def count_letters(rng):
    word = rng.choice(WORDS) if rng.random() < 0.6 else made_up(rng)
    question = ask(rng, COUNT_LETTERS, word=word)
    return exchange("strings", f"letters {question}", question, f"{'-'.join(word)}: {len(word)} letters")


def capitals(rng):
    text = " ".join(rng.choice(WORDS) if rng.random() < 0.85 else made_up(rng) for _ in range(rng.randint(2, 5)))
    if rng.random() < 0.7:
        return exchange("strings", f"upper {text}", ask(rng, CAPITALS, text=text), text.upper())
    return exchange("strings", f"lower {text}", ask(rng, LOWER, text=text.upper()), text)


def nth(rng):
    items = words(rng, 3, 8)
    i = rng.randint(-1, min(len(items), len(NTHS)) - 1)
    text = " ".join(items)
    return exchange("strings", f"{i} of {text}", ask(rng, NTH, nth=NTHS[i] if i >= 0 else "last", text=text), items[i])


def join(rng):
    items = words(rng, 3, 6)
    name, mark = rng.choice([("hyphen", "-"), ("comma", ", "), ("slash", "/"), ("plus sign", " + "), ("dot", ".")])
    text = " ".join(items)
    return exchange("strings", f"{name} {text}", ask(rng, JOIN, name=name, text=text), mark.join(items))


def repeat(rng):
    word, n = any_word(rng), rng.randint(2, 10)
    return exchange("strings", f"{word} {n}", ask(rng, REPEAT, word=word, n=n), " ".join([word] * n))


def sentence(rng):
    """A plain sentence of words the model knows, with a made-up one here and there."""
    noun = lambda: rng.choice(ANIMALS + THINGS) if rng.random() < 0.75 else made_up(rng)
    shape = rng.choice(
        [
            "the {a} {n} and the {m} {v}",
            "a {n} can {v} with the {a} {m}",
            "my {n} likes to {v} near the {m}",
            "the {n} is {a} but the {m} is {b}",
            "we {v} the {a} {n} under the {m}",
        ]
    )
    return shape.format(n=noun(), m=noun(), a=rng.choice(ADJECTIVES), b=rng.choice(ADJECTIVES), v=rng.choice(VERBS))


def replace(rng):
    parts = sentence(rng).split()
    a, b = rng.choice([part for part in parts if len(part) > 3 or part == parts[-1]]), any_word(rng)
    text = " ".join(parts)
    changed = " ".join(b if part == a else part for part in parts)
    return exchange("strings", f"{a}>{b} {text}", ask(rng, REPLACE, a=a, b=b, text=text), changed)


def remove(rng):
    items = rng.sample(WORDS, rng.randint(3, 8))
    a, text = rng.choice(items), " ".join(items)
    return exchange(
        "strings", f"{a} {text}", ask(rng, REMOVE, a=a, text=text), " ".join(item for item in items if item != a)
    )


def echo(rng):
    """Saying a text back: a sentence, a few words, or up to 120 words, numbers and signs of any sort."""
    kind = rng.random()
    if kind < 0.3:
        text = sentence(rng).capitalize() + "."
    elif kind < 0.7:
        text = " ".join(words(rng, 1, 8)) + rng.choice(["", "", "", ".", "!"])
    else:
        items = words(rng, 5, 50 if rng.random() < 0.8 else 120)
        gap = rng.choice([" ", " ", " ", ", ", "\n"])
        text = gap.join(str(rng.randint(0, 9999)) if rng.random() < 0.2 else item for item in items)
    # Not through `ask`: it may drop the last full stop, which here is part of the answer.
    return exchange("echo", text, rng.choice(ECHO).format(text=text), text)


KINDS = (
    [reverse_letters] * 5
    + [reverse_words] * 3
    + [spell] * 3
    + [reverse_word] * 3
    + [count_letters] * 2
    + [capitals] * 3
    + [nth] * 2
    + [join] * 2
    + [repeat] * 2
    + [replace] * 3
    + [remove] * 2
)
TASKS = {"strings": lambda rng: rng.choice(KINDS)(rng), "echo": echo}
