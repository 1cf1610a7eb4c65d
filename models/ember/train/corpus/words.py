"""The words the tasks are made of: fixed lists, and made-up names without end. Never decides a task."""

import re

from .vocabulary import COMMON

ANIMALS = (
    "cat dog horse cow pig goat sheep duck hen fox wolf bear lion tiger mouse rat rabbit deer frog snake owl eagle crow "
    "swan whale shark seal otter beaver badger hedgehog squirrel camel zebra monkey panda koala penguin turtle lizard"
).split()
FRUITS = (
    "apple pear plum peach grape cherry lemon lime orange banana mango melon fig date kiwi apricot olive berry".split()
)
COLOURS = "red blue green yellow black white brown pink purple grey orange silver gold violet".split()
THINGS = (
    "table chair lamp door window cup plate spoon fork knife bottle basket box bag book page letter paper pencil pen ruler "
    "clock watch key lock bell rope chain hammer nail saw wheel car bus train boat ship bike plane road bridge tower house "
    "garden tree leaf flower stone sand river lake sea island hill mountain valley forest field farm market shop school "
    "office kitchen bed pillow blanket coat shirt shoe hat glove ring coin candle mirror radio camera phone screen cable "
    "server engine rocket star moon sun cloud rain snow wind storm fire ice salt sugar bread butter cheese milk tea coffee "
    "soup rice bean corn potato carrot onion tomato honey egg cake cookie song drum flute piano violin picture ticket map"
).split()
ADJECTIVES = (
    "small big old young new warm cold quick slow quiet loud bright dark soft hard happy sad brave kind clever lazy busy "
    "tired hungry gentle proud calm wild tiny huge round flat long short deep high rich poor clean sharp"
).split()
VERBS = (
    "run walk jump swim fly sing dance read write draw paint cook bake eat drink sleep dream think learn teach build break "
    "open close push pull carry throw catch find lose buy sell give take send show hide wait stop start"
).split()
WORDS = sorted(set(ANIMALS + FRUITS + COLOURS + THINGS + ADJECTIVES + VERBS + COMMON))
NAMES = (
    "Anna Ben Clara David Emma Felix Grace Henry Iris Jack Kate Leo Mia Noah Olga Paul Quinn Rosa Sam Tina Umar Vera Will "
    "Xenia Yusuf Zoe Alice Bruno Carla Dan Ella Frank Gina Hugo Ines Jonas Karl Lena Max Nina Oscar Petra Rita Simon Tom Uma"
).split()
CITIES = (
    "Paris Berlin Rome Madrid Oslo London Vienna Prague Lisbon Dublin Athens Warsaw Helsinki Stockholm Copenhagen Brussels "
    "Budapest Tokyo Cairo Nairobi Lima Quito Delhi Seoul Hanoi Ottawa Boston Chicago Denver Seattle Austin Toronto Sydney "
    "Munich Hamburg Zurich Geneva Milan Porto Lyon Krakow Riga"
).split()
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = "January February March April May June July August September October November December".split()

SYLLABLES = [c + v for c in "bdfgklmnprstvz" for v in "aeiou"]


def made_up(rng, syllables=None):
    """A pronounceable word that exists nowhere, of two or three syllables unless told."""
    n = syllables or rng.choice([2, 2, 3])
    return "".join(rng.choice(SYLLABLES) for _ in range(n))


def scrambled(rng):
    """Letters, digits and signs without sense, as in ids, typos and other languages."""
    letters = rng.choice(
        [
            "abcdefghijklmnopqrstuvwxyz",
            "ABCDEFGHIJKLMNOPQRSTUVWXYZ",
            "abcdefghijklmnopqrstuvwxyz0123456789",
            "aeioustrnlm",
            "abcdefABCDEF0123456789-_",
            "äöüßéèñçøåæîôabcdefghij",
        ]
    )
    return "".join(rng.choice(letters) for _ in range(rng.randint(2, 9)))


def any_word(rng):
    """A word of any sort: mostly English, often made up, now and then senseless, in small letters or capitals."""
    kind = rng.random()
    if kind < 0.6:
        word = rng.choice(WORDS)
    elif kind < 0.85:
        word = made_up(rng)
    else:
        return scrambled(rng)
    return word.capitalize() if rng.random() < 0.1 else word.upper() if rng.random() < 0.04 else word


def person(rng):
    """A first name: known, or made up so that copying is learnt rather than a list."""
    return rng.choice(NAMES) if rng.random() < 0.4 else made_up(rng).capitalize()


def city(rng):
    """A city: known, or made up."""
    return rng.choice(CITIES) if rng.random() < 0.5 else made_up(rng).capitalize()


def thing(rng):
    """A noun for a thing: known, or made up."""
    return rng.choice(THINGS) if rng.random() < 0.6 else made_up(rng)


def several(words):
    """The plural by the plain rules of English spelling."""
    if words.endswith(("s", "x", "ch", "sh")):
        return words + "es"
    if words.endswith("y") and words[-2] not in "aeiou":
        return words[:-1] + "ies"
    return words + "s"


def with_articles(text):
    """The text with `an` where `a` stands before a vowel."""
    return re.sub(r"\b([Aa]) (?=[aeiou])", r"\1n ", text)
