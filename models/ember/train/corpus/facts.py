"""Simple facts about the world and about Kubernetes: a table each, and the wordings of its questions."""

from .sample import exchange, vary
from .words import DAYS, MONTHS, with_articles

CAPITALS = {
    "France": "Paris",
    "Germany": "Berlin",
    "Italy": "Rome",
    "Spain": "Madrid",
    "Norway": "Oslo",
    "England": "London",
    "Austria": "Vienna",
    "Portugal": "Lisbon",
    "Ireland": "Dublin",
    "Greece": "Athens",
    "Poland": "Warsaw",
    "Finland": "Helsinki",
    "Sweden": "Stockholm",
    "Denmark": "Copenhagen",
    "Belgium": "Brussels",
    "Hungary": "Budapest",
    "Japan": "Tokyo",
    "Egypt": "Cairo",
    "Kenya": "Nairobi",
    "Peru": "Lima",
    "Ecuador": "Quito",
    "India": "Delhi",
    "Canada": "Ottawa",
    "Vietnam": "Hanoi",
    "Latvia": "Riga",
    "Switzerland": "Bern",
    "China": "Beijing",
    "Russia": "Moscow",
    "Turkey": "Ankara",
    "Cuba": "Havana",
    "Chile": "Santiago",
}
OPPOSITES = {
    "big": "small",
    "hot": "cold",
    "old": "new",
    "fast": "slow",
    "happy": "sad",
    "up": "down",
    "left": "right",
    "open": "closed",
    "light": "dark",
    "good": "bad",
    "high": "low",
    "long": "short",
    "hard": "soft",
    "loud": "quiet",
    "rich": "poor",
    "clean": "dirty",
    "full": "empty",
    "early": "late",
    "strong": "weak",
    "wet": "dry",
    "day": "night",
    "yes": "no",
    "first": "last",
    "true": "false",
    "more": "less",
    "inside": "outside",
    "above": "below",
    "begin": "end",
    "win": "lose",
    "push": "pull",
}
LEGS = {
    "dog": 4,
    "cat": 4,
    "horse": 4,
    "cow": 4,
    "spider": 8,
    "bird": 2,
    "duck": 2,
    "hen": 2,
    "fly": 6,
    "bee": 6,
    "ant": 6,
    "snake": 0,
    "fish": 0,
    "human": 2,
    "sheep": 4,
    "fox": 4,
}
SOUNDS = {
    "dog": "woof",
    "cat": "meow",
    "cow": "moo",
    "duck": "quack",
    "sheep": "baa",
    "pig": "oink",
    "horse": "neigh",
    "frog": "ribbit",
    "owl": "hoot",
    "lion": "roar",
    "bee": "buzz",
    "mouse": "squeak",
}
COLOUR_OF = {
    "the sky": "blue",
    "grass": "green",
    "snow": "white",
    "blood": "red",
    "a lemon": "yellow",
    "coal": "black",
    "a banana": "yellow",
    "milk": "white",
    "a strawberry": "red",
    "the sea": "blue",
}
MONTH_DAYS = dict(zip(MONTHS, [31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31]))
KNOWN = [
    ("How many days are in a week?", "7"),
    ("How many months are in a year?", "12"),
    ("How many hours are in a day?", "24"),
    ("How many minutes are in an hour?", "60"),
    ("How many seconds are in a minute?", "60"),
    ("How many days are in a year?", "365"),
    ("How many letters are in the alphabet?", "26"),
    ("How many sides has a triangle?", "3"),
    ("How many sides has a square?", "4"),
    ("What is the largest planet?", "Jupiter is the largest planet."),
    ("What is frozen water?", "Frozen water is ice."),
    ("What do bees make?", "Bees make honey."),
    ("Which planet do we live on?", "We live on Earth."),
    ("What is the first letter of the alphabet?", "a"),
    ("What is the last letter of the alphabet?", "z"),
    ("What is the boiling point of water?", "Water boils at 100 degrees Celsius."),
    ("At what temperature does water freeze?", "Water freezes at 0 degrees Celsius."),
    ("What is Kubernetes?", "Kubernetes runs containers on many machines and keeps them in the state you declare."),
    ("What is a GPU?", "A GPU is a processor that does very many simple calculations at once."),
    ("What is a token?", "A token is a piece of text, often a word or a part of one."),
    ("What is a language model?", "A language model is a program that predicts the next token of a text."),
    ("What is a pod?", "A pod is the smallest unit that Kubernetes runs: one or more containers."),
    ("What is a container?", "A container is a program packed together with everything it needs to run."),
    ("What is a node?", "A node is one machine of a Kubernetes cluster."),
    ("What is a Service?", "A Service gives a set of pods one stable address."),
    ("What is a ConfigMap?", "A ConfigMap holds configuration that pods can read."),
    ("How do I restart a pod?", "Delete the pod with kubectl delete pod, and its owner makes a new one."),
    ("How do I list pods?", "Run kubectl get pods."),
    ("How do I see the logs of a pod?", "Run kubectl logs with the name of the pod."),
    ("What is Helm?", "Helm installs applications on Kubernetes from charts."),
    ("What is kubectl?", "kubectl is the command line tool of Kubernetes."),
    ("What is CUDA?", "CUDA lets programs run on NVIDIA GPUs."),
    ("What is Rust?", "Rust is a programming language that is fast and safe."),
    ("What is JSON?", "JSON is a text format for data made of objects, lists, strings and numbers."),
]
CAPITAL_ASK = [
    "What is the capital of {x}?",
    "Capital of {x}?",
    "Which city is the capital of {x}?",
    "Tell me the capital of {x}.",
    "Name the capital of {x}.",
]
OPPOSITE_ASK = [
    "What is the opposite of {x}?",
    "Opposite of {x}?",
    "Tell me the opposite of {x}.",
    "Which word is the opposite of {x}?",
]
AFTER_ASK = [
    "What comes after {x}?",
    "Which {kind} comes after {x}?",
    "What is the {kind} after {x}?",
    "Which {kind} follows {x}?",
]
BEFORE_ASK = ["What comes before {x}?", "Which {kind} comes before {x}?", "What is the {kind} before {x}?"]
LEGS_ASK = ["How many legs does a {x} have?", "How many legs has a {x}?", "Number of legs of a {x}?"]
SOUND_ASK = ["What does a {x} say?", "What sound does a {x} make?", "Which sound does a {x} make?"]
COLOUR_ASK = ["What colour is {x}?", "What color is {x}?", "Tell me the colour of {x}.", "Which colour has {x}?"]
MONTH_ASK = ["How many days are in {x}?", "How many days has {x}?", "How long is {x}?", "Number of days in {x}?"]
AROUND = [
    "{q}",
    "{q}",
    "{q}",
    "{q}",
    "Tell me: {q}",
    "Do you know this? {q}",
    "Another question: {q}",
    "{q} Please answer.",
    "I wonder: {q}",
    "So, {q}",
]


def answered(rng, task, question, answer):
    """Wording and surrounding together are the instance: a held-out one was never trained."""
    text = with_articles(rng.choice(AROUND).format(q=question))
    # Names keep their capitals in answers, so only questions without one may lose them.
    typed = text.lower() if text[1:].islower() and rng.random() < 0.3 else text
    return exchange(task, text, vary(rng, typed), with_articles(answer))


def fact(rng):
    kind = rng.randrange(9)
    if kind == 0:
        x = rng.choice(list(CAPITALS))
        return answered(rng, "facts", rng.choice(CAPITAL_ASK).format(x=x), f"The capital of {x} is {CAPITALS[x]}.")
    if kind == 1:
        x, y = rng.choice(list(OPPOSITES.items()))
        x, y = rng.choice([(x, y), (y, x)])
        return answered(rng, "facts", rng.choice(OPPOSITE_ASK).format(x=x), f"The opposite of {x} is {y}.")
    if kind in (2, 3):
        return neighbour(rng)
    if kind == 4:
        x = rng.choice(list(LEGS))
        return answered(rng, "facts", rng.choice(LEGS_ASK).format(x=x), f"A {x} has {LEGS[x]} legs.")
    if kind == 5:
        x = rng.choice(list(SOUNDS))
        return answered(rng, "facts", rng.choice(SOUND_ASK).format(x=x), f"A {x} says {SOUNDS[x]}.")
    if kind == 6:
        x = rng.choice(list(COLOUR_OF))
        return answered(rng, "facts", rng.choice(COLOUR_ASK).format(x=x), f"{x[0].upper()}{x[1:]} is {COLOUR_OF[x]}.")
    if kind == 7:
        x = rng.choice(MONTHS)
        return answered(rng, "facts", rng.choice(MONTH_ASK).format(x=x), f"{x} has {MONTH_DAYS[x]} days.")
    return answered(rng, "facts", *rng.choice(KNOWN))


def neighbour(rng):
    """The day or month before or after another."""
    kind, row = rng.choice([("day", DAYS), ("month", MONTHS)])
    i, (step, wordings) = rng.randrange(len(row)), rng.choice([(1, AFTER_ASK), (-1, BEFORE_ASK)])
    return answered(rng, "facts", rng.choice(wordings).format(x=row[i], kind=kind), row[(i + step) % len(row)])


TASKS = {"facts": fact}
