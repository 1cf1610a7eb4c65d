"""Unit conversion with exact tables, in the directions where the result is a whole number."""

from .arithmetic import product_in_steps
from .sample import ask, exchange

# (larger unit, smaller unit, how many smaller in one larger, largest count asked for)
TABLE = [
    ("kilometers", "meters", 1000, 999),
    ("meters", "centimeters", 100, 999),
    ("centimeters", "millimeters", 10, 9999),
    ("meters", "millimeters", 1000, 999),
    ("kilograms", "grams", 1000, 999),
    ("tons", "kilograms", 1000, 999),
    ("grams", "milligrams", 1000, 999),
    ("liters", "milliliters", 1000, 999),
    ("liters", "deciliters", 10, 9999),
    ("hours", "minutes", 60, 99),
    ("minutes", "seconds", 60, 99),
    ("days", "hours", 24, 60),
    ("weeks", "days", 7, 200),
    ("years", "months", 12, 60),
    ("dozens", "pieces", 12, 60),
    ("feet", "inches", 12, 60),
    ("yards", "feet", 3, 900),
    ("pounds", "ounces", 16, 60),
    ("gallons", "quarts", 4, 900),
    ("dollars", "cents", 100, 999),
    ("euros", "cents", 100, 999),
    ("seconds", "milliseconds", 1000, 999),
    ("gigabytes", "megabytes", 1000, 999),
    ("bytes", "bits", 8, 900),
    ("kilowatts", "watts", 1000, 999),
    ("centuries", "years", 100, 99),
    ("KV blocks", "tokens", 16, 60),
]
WORDINGS = [
    "How many {to} are {n} {of}?",
    "Convert {n} {of} to {to}.",
    "What is {n} {of} in {to}?",
    "{n} {of} in {to}",
    "How many {to} are in {n} {of}?",
    "{n} {of} to {to}",
    "Express {n} {of} in {to}.",
]
FAHRENHEIT = ["What is {n} degrees Celsius in Fahrenheit?", "Convert {n} Celsius to Fahrenheit.", "{n} C in F"]


def to_smaller(rng):
    large, small, factor, most = rng.choice(TABLE)
    n = rng.randint(2, min(most, 99) if rng.random() < 0.5 else most)
    question = ask(rng, WORDINGS, n=n, of=large, to=small)
    return exchange("units", f"{n} {large} {small}", question, answer_for(n, factor, small))


def answer_for(n, factor, small):
    """The bare result where it can be said at once, the partial products where the factor has two digits."""
    if factor in (12, 16, 24) and n > 9:
        return f"{product_in_steps(n, factor)} {small}"
    return f"{n * factor} {small}"


def to_larger(rng):
    large, small, factor, most = rng.choice([row for row in TABLE if row[2] % 10 == 0])
    n = rng.randint(1, most)
    question = ask(rng, WORDINGS, n=n * factor, of=small, to=large)
    return exchange("units", f"{n * factor} {small} {large}", question, f"{n} {large}")


def fahrenheit(rng):
    """In steps: the table of multiples of five is too small to be learnt from most of its rows."""
    n = rng.randint(-10, 50) * 5
    ninths = n * 9 // 5
    answer = f"{n} x 9 / 5 + 32 = {n // 5} x 9 + 32 = {ninths} + 32 = {ninths + 32} degrees Fahrenheit"
    return exchange("units", f"{n} C", ask(rng, FAHRENHEIT, n=n), answer)


KINDS = [to_smaller] * 10 + [to_larger] * 5 + [fahrenheit]
TASKS = {"units": lambda rng: rng.choice(KINDS)(rng)}
