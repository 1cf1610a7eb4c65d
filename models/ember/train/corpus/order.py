"""Sorting, counting, and saying numbers in a row: tasks about order and number. Never about spelling."""

from .sample import ask, exchange
from .vocabulary import NUMBER_WORDS
from .words import ANIMALS, COLOURS, FRUITS, THINGS, WORDS, any_word, made_up

ASCENDING = [
    "Sort these numbers: {text}",
    "Sort from smallest to largest: {text}",
    "Put these numbers in ascending order: {text}",
    "Sort ascending: {text}",
    "Sort: {text}",
    "Order these numbers from low to high: {text}",
]
DESCENDING = [
    "Sort these numbers from largest to smallest: {text}",
    "Put these numbers in descending order: {text}",
    "Sort descending: {text}",
    "Order these numbers from high to low: {text}",
]
ALPHABETICAL = [
    "Sort these words alphabetically: {text}",
    "Put these words in alphabetical order: {text}",
    "Sort the words: {text}",
    "Order alphabetically: {text}",
]
LARGEST = ["What is the largest of {text}?", "Find the maximum: {text}", "Which number is the largest: {text}?"]
SMALLEST = ["What is the smallest of {text}?", "Find the minimum: {text}", "Which number is the smallest: {text}?"]
COUNT_ONE = [
    "How many times does {word} appear in: {text}",
    "Count {word} in this list: {text}",
    "How often is {word} in: {text}",
    "How many {word} are in: {text}",
]
COUNT_ALL = [
    "How many words are in this list: {text}",
    "Count the words: {text}",
    "How many items are there: {text}",
    "Count the items in: {text}",
]
UP = [
    "Count from {a} to {b}.",
    "Count up from {a} to {b}.",
    "List the numbers from {a} to {b}.",
    "Say all numbers from {a} to {b}.",
    "Please count from {a} to {b}.",
]
DOWN = ["Count down from {a} to {b}.", "Count backwards from {a} to {b}.", "Start at {a} and count down to {b}."]
MULTIPLES = [
    "List the first {n} multiples of {k}.",
    "What are the first {n} multiples of {k}?",
    "Count in steps of {k}, {n} times.",
]
EVEN = ["List the even numbers from {a} to {b}.", "Which even numbers are there from {a} to {b}?"]
FIRST_FEW = [
    "List {n} {kind}.",
    "Name {n} {kind}.",
    "Tell me {n} {kind}.",
    "Give me {n} {kind}.",
    "Can you name {n} {kind}?",
    "{n} {kind}, please.",
    "Write {n} {kind}.",
    "Which {n} {kind} do you know?",
]


def joined(items):
    return ", ".join(str(item) for item in items)


def sort_numbers(rng):
    numbers = rng.sample(range(100 if rng.random() < 0.7 else 1000), rng.randint(3, 8))
    text, descending = joined(numbers), rng.random() < 0.35
    question = ask(rng, DESCENDING if descending else ASCENDING, text=text)
    return exchange("sorting", f"{descending} {text}", question, joined(sorted(numbers, reverse=descending)))


def sort_words(rng):
    words = rng.sample(WORDS, rng.randint(3, 6))
    return exchange("sorting", joined(words), ask(rng, ALPHABETICAL, text=joined(words)), joined(sorted(words)))


def extreme(rng):
    numbers = rng.sample(range(1000), rng.randint(3, 7))
    wanted, wordings = rng.choice([(max, LARGEST), (min, SMALLEST)])
    return exchange(
        "sorting",
        f"{wanted.__name__} {joined(numbers)}",
        ask(rng, wordings, text=joined(numbers)),
        str(wanted(numbers)),
    )


def count_one(rng):
    kinds = rng.sample(WORDS, rng.randint(2, 4)) if rng.random() < 0.7 else [made_up(rng) for _ in range(3)]
    items = [rng.choice(kinds) for _ in range(rng.randint(3, 14))]
    word, text = rng.choice(kinds), joined(items)
    return exchange("counting", f"{word} in {text}", ask(rng, COUNT_ONE, word=word, text=text), str(items.count(word)))


def count_all(rng):
    items = [any_word(rng) for _ in range(rng.randint(2, 14))]
    text = joined(items) if rng.random() < 0.7 else " ".join(items)
    return exchange("counting", text, ask(rng, COUNT_ALL, text=text), str(len(items)))


def count_up(rng):
    a = rng.randint(0, 30) if rng.random() < 0.6 else rng.randint(0, 950)
    b = a + rng.randint(2, 40 if rng.random() < 0.8 else 160)
    if a > 1 and rng.random() < 0.3:
        a, b = 1, b - a + 1
    return exchange("counting", f"{a} to {b}", ask(rng, UP, **spoken(rng, a=a, b=b)), joined(range(a, b + 1)))


def spoken(rng, **numbers):
    """The numbers, small ones now and then as words, all of them or none."""
    if max(numbers.values()) < len(NUMBER_WORDS) and rng.random() < 0.4:
        return {name: NUMBER_WORDS[value] for name, value in numbers.items()}
    return numbers


def count_down(rng):
    b = rng.randint(0, 20) if rng.random() < 0.7 else rng.randint(0, 400)
    a = b + rng.randint(2, 30)
    return exchange("counting", f"{a} down {b}", ask(rng, DOWN, **spoken(rng, a=a, b=b)), joined(range(a, b - 1, -1)))


def multiples(rng):
    k, n = rng.randint(2, 20), rng.randint(3, 15)
    return exchange("counting", f"{n} of {k}", ask(rng, MULTIPLES, n=n, k=k), joined(k * i for i in range(1, n + 1)))


def even(rng):
    a = rng.randint(0, 200)
    b = a + rng.randint(4, 40)
    return exchange(
        "counting", f"even {a} {b}", ask(rng, EVEN, a=a, b=b), joined(i for i in range(a, b + 1) if i % 2 == 0)
    )


def first_few(rng):
    kind, items = rng.choice(
        [
            ("animals", ANIMALS),
            ("fruits", FRUITS),
            ("colours", COLOURS),
            ("colors", COLOURS),
            ("things", THINGS),
            ("words", THINGS),
        ]
    )
    n = rng.randint(2, min(len(items), 12))
    question = ask(rng, FIRST_FEW, kind=kind, **spoken(rng, n=n))
    return exchange("counting", f"{n} {kind} {question}", question, joined(items[:n]))


SORT = [sort_numbers] * 5 + [sort_words] * 2 + [extreme]
COUNT = [count_one] * 5 + [count_all] * 4 + [count_up] * 3 + [count_down] * 2 + [multiples, even, first_few]
TASKS = {"sorting": lambda rng: rng.choice(SORT)(rng), "counting": lambda rng: rng.choice(COUNT)(rng)}
