"""Sums, differences, products, quotients, comparisons and small word problems, each with one right answer."""

from .sample import ask, exchange
from .words import FRUITS, THINGS, person, several

ADD = [
    "What is {a} + {b}?",
    "{a} + {b}",
    "{a} + {b} =",
    "Add {a} and {b}.",
    "Calculate {a} + {b}.",
    "How much is {a} plus {b}?",
    "What is {a} plus {b}?",
    "{a}+{b}",
    "What is {a}+{b}?",
    "Compute {a} + {b}.",
    "What is the sum of {a} and {b}?",
]
SUBTRACT = [
    "What is {a} - {b}?",
    "{a} - {b}",
    "{a} - {b} =",
    "Subtract {b} from {a}.",
    "Calculate {a} - {b}.",
    "How much is {a} minus {b}?",
    "What is {a} minus {b}?",
    "{a}-{b}",
    "Compute {a} - {b}.",
]
MULTIPLY = [
    "What is {a} x {b}?",
    "{a} x {b}",
    "{a} * {b}",
    "{a} * {b} =",
    "Multiply {a} by {b}.",
    "Calculate {a} * {b}.",
    "How much is {a} times {b}?",
    "What is {a} times {b}?",
    "{a}*{b}",
    "Compute {a} x {b}.",
    "What is {a} * {b}?",
]
DIVIDE = [
    "What is {a} / {b}?",
    "{a} / {b}",
    "Divide {a} by {b}.",
    "How much is {a} divided by {b}?",
    "{a}/{b}",
    "Calculate {a} / {b}.",
    "What is {a} divided by {b}?",
]
CHAIN = ["What is {text}?", "{text}", "Calculate {text}.", "{text} =", "Compute {text}."]
PARITY = ["Is {a} {asked}?", "Is {a} an {asked} number?", "Is the number {a} {asked}?"]
PRIME = [
    "Is {a} prime?",
    "Is {a} a prime number?",
    "Is the number {a} prime?",
    "Check if {a} is prime.",
    "Is {a} a prime?",
    "Tell me if {a} is prime.",
]
LARGER = [
    "Which is larger, {a} or {b}?",
    "Which number is bigger: {a} or {b}?",
    "What is the larger one of {a} and {b}?",
]
SMALLER = [
    "Which is smaller, {a} or {b}?",
    "Which number is smaller: {a} or {b}?",
    "What is the smaller one of {a} and {b}?",
]


def number(rng, digits):
    """A number of at most `digits` digits; every length is equally likely, so short ones are not rare."""
    n = rng.randint(1, digits)
    return rng.randint(0 if n == 1 else 10 ** (n - 1), 10**n - 1)


def add(rng):
    a, b = number(rng, 5), number(rng, 5)
    return exchange("arithmetic", f"{a}+{b}", ask(rng, ADD, a=a, b=b), str(a + b))


def subtract(rng):
    a, b = sorted((number(rng, 5), number(rng, 5)), reverse=rng.random() < 0.85)
    return exchange("arithmetic", f"{a}-{b}", ask(rng, SUBTRACT, a=a, b=b), str(a - b))


def multiply(rng):
    a, b = rng.randint(0, 12), number(rng, 4)
    a, b = (a, b) if rng.random() < 0.5 else (b, a)
    if min(a, b) > 10:
        return multiply_in_steps(rng)
    return exchange("arithmetic", f"{a}*{b}", ask(rng, MULTIPLY, a=a, b=b), str(a * b))


def multiply_in_steps(rng):
    a, b = rng.randint(11, 99), rng.randint(11, 99)
    return exchange("arithmetic", f"{a}*{b}", ask(rng, MULTIPLY, a=a, b=b), product_in_steps(a, b))


def product_in_steps(a, b):
    """A product of two two-digit numbers as a small model can say it: one partial product for each digit of `b`."""
    tens, ones = b // 10 * 10, b % 10
    if ones == 0:
        return f"{a} x {b} = {a * b}"
    return f"{a} x {b} = {a * tens} + {a * ones} = {a * b}"


def divide(rng):
    b, quotient = rng.randint(1, 9), number(rng, 2)
    a = b * quotient
    return exchange("arithmetic", f"{a}/{b}", ask(rng, DIVIDE, a=a, b=b), str(quotient))


def chain(rng):
    """Three terms, said step by step."""
    a, b, c = number(rng, 2), number(rng, 2), number(rng, 2)
    c = c if rng.random() < 0.5 else -min(c, a + b)
    text = f"{a} + {b} {'+' if c >= 0 else '-'} {abs(c)}"
    return exchange(
        "arithmetic", text, ask(rng, CHAIN, text=text), f"{a} + {b} = {a + b}, so the result is {a + b + c}."
    )


def parity(rng):
    a = number(rng, 4)
    asked = rng.choice(["even", "odd"])
    right = (a % 2 == 0) == (asked == "even")
    answer = f"{'Yes' if right else 'No'}, {a} is {'odd' if a % 2 else 'even'}."
    return exchange("arithmetic", f"parity {a}", ask(rng, PARITY, a=a, asked=asked), answer)


def prime(rng):
    """Only up to 100, with the factors as the reason."""
    a = rng.randint(2, 100)
    factor = next(f for f in range(2, a + 1) if a % f == 0)
    answer = f"Yes, {a} is prime." if factor == a else f"No, {a} is {factor} x {a // factor}."
    question = ask(rng, PRIME, a=a)
    return exchange("arithmetic", f"{question}", question, answer)


def compare(rng):
    a, b = number(rng, 4), number(rng, 4)
    if a == b:
        b = a + 1
    wanted, wordings = rng.choice([(max, LARGER), (min, SMALLER)])
    return exchange("arithmetic", f"{a}?{b}", ask(rng, wordings, a=a, b=b), str(wanted(a, b)))


def word_problem(rng):
    who, a, b = person(rng), rng.randint(2, 99), rng.randint(1, 99)
    what = several(rng.choice(FRUITS + THINGS))
    if rng.random() < 0.5:
        verb = rng.choice(["gets", "buys", "finds", "is given"])
        question, result = f"{who} has {a} {what} and {verb} {b} more. How many {what} does {who} have now?", a + b
    else:
        a, b = max(a, b), min(a, b)
        verb = rng.choice(["gives away", "loses", "sells", "eats"])
        question, result = f"{who} has {a} {what} and {verb} {b}. How many {what} are left?", a - b
    return exchange("arithmetic", question, question, f"{result} {what}")


KINDS = (
    [add] * 6
    + [subtract] * 6
    + [multiply] * 5
    + [multiply_in_steps] * 4
    + [divide] * 3
    + [chain] * 2
    + [compare] * 2
    + [word_problem] * 3
    + [parity, prime]
)
TASKS = {"arithmetic": lambda rng: rng.choice(KINDS)(rng)}
