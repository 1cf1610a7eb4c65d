"""Sentences turned into JSON with the keys a schema names. The values are always spans of the sentence."""

import json

from .sample import exchange
from .words import COLOURS, DAYS, FRUITS, MONTHS, THINGS, city, made_up, person, thing

ASK = [
    "Extract {keys} as JSON: {text}",
    "Turn this into JSON with the keys {keys}: {text}",
    "Return JSON with {keys}. Text: {text}",
    "{text}\nGive me {keys} as JSON.",
    "Extract the data as JSON with the keys {keys}.\nText: {text}",
    "{text}\nExtract {keys} as JSON.",
]
ASK_SCHEMA = [
    "Extract JSON that follows this schema: {schema}\nText: {text}",
    "Schema: {schema}\nText: {text}\nAnswer with JSON only.",
    "{text}\nFill in this JSON schema: {schema}",
]

# A kind: its fields with the function that makes a value, and sentences that hold all of them.
PERSON = (
    {"name": person, "age": lambda r: r.randint(1, 99), "city": city, "job": lambda r: r.choice(JOBS)},
    [
        "{name} is {age} years old, works as a {job} and lives in {city}.",
        "My friend {name} ({age}) is a {job} in {city}.",
        "{name}, a {job} from {city}, turned {age} today.",
        "In {city} there lives a {job} called {name}, age {age}.",
    ],
)
ORDER = (
    {"item": thing, "quantity": lambda r: r.randint(1, 99), "price": lambda r: r.randint(1, 999), "customer": person},
    [
        "{customer} ordered {quantity} pieces of {item} for {price} euros.",
        "Order from {customer}: {quantity} x {item}, total {price} euros.",
        "Please send {quantity} of the {item} to {customer}; the price is {price}.",
        "{quantity} {item} at {price} dollars, bought by {customer}.",
    ],
)
EVENT = (
    {
        "title": thing,
        "day": lambda r: r.choice(DAYS),
        "time": lambda r: f"{r.randint(0, 23)}:{r.randint(0, 59):02}",
        "place": city,
    },
    [
        "The {title} meeting is on {day} at {time} in {place}.",
        "On {day} at {time} we meet in {place} about the {title}.",
        "Reminder: {title}, {day}, {time}, {place}.",
        "Join the {title} talk in {place} this {day} at {time}.",
    ],
)
SERVER = (
    {
        "host": lambda r: f"{made_up(r)}-{r.randint(1, 99)}",
        "gpus": lambda r: r.choice([1, 2, 4, 8, 16]),
        "region": city,
        "memory": lambda r: r.choice([16, 32, 64, 80, 96, 128, 141, 192, 256]),
    },
    [
        "Server {host} in {region} has {gpus} GPUs and {memory} GB of memory.",
        "{host}: {gpus} GPUs, {memory} GB, region {region}.",
        "In {region} we run {host} with {memory} GB and {gpus} GPUs.",
        "The node {host} ({region}) offers {gpus} GPUs with {memory} GB.",
    ],
)
PRODUCT = (
    {
        "product": thing,
        "colour": lambda r: r.choice(COLOURS),
        "weight": lambda r: r.randint(1, 999),
        "brand": lambda r: made_up(r).capitalize(),
    },
    [
        "The {colour} {product} by {brand} weighs {weight} grams.",
        "{brand} sells a {colour} {product} of {weight} grams.",
        "A {product} from {brand}, {colour}, {weight} g.",
        "Our new {product} is {colour}, made by {brand}, and weighs {weight} grams.",
    ],
)
BIRTHDAY = (
    {
        "name": person,
        "day": lambda r: r.randint(1, 28),
        "month": lambda r: r.choice(MONTHS),
        "gift": lambda r: r.choice(FRUITS + THINGS),
    },
    [
        "{name} has a birthday on {month} {day} and would like a {gift}.",
        "On {day} {month}, {name} gets a {gift}.",
        "{name} was born on {month} {day}; the gift is a {gift}.",
        "A {gift} for {name}, whose birthday is {day} {month}.",
    ],
)
JOBS = "teacher baker doctor nurse pilot farmer lawyer painter writer singer driver cook engineer plumber gardener judge".split()
KINDS = [PERSON, ORDER, EVENT, SERVER, PRODUCT, BIRTHDAY]


def extract(rng):
    fields, sentences = rng.choice(KINDS)
    values = {field: make(rng) for field, make in fields.items()}
    text = rng.choice(sentences).format(**values)
    keys = rng.sample(list(fields), rng.randint(2, len(fields)))
    answer = json.dumps({key: values[key] for key in keys})
    return exchange("extract", f"{sorted(values.items(), key=str)}", question(rng, keys, values, text), answer)


def question(rng, keys, values, text):
    """The request, naming the keys in a row or as a JSON schema, in the order the answer must have."""
    if rng.random() < 0.7:
        return rng.choice(ASK).format(keys=named(rng, keys), text=text)
    kinds = {key: {"type": "integer" if isinstance(values[key], int) else "string"} for key in keys}
    # Clients print JSON with and without spaces; the answer is the same.
    separators = rng.choice([(", ", ": "), (",", ":")])
    schema = json.dumps({"type": "object", "properties": kinds, "required": keys}, separators=separators)
    return rng.choice(ASK_SCHEMA).format(schema=schema, text=text)


def named(rng, keys):
    if rng.random() < 0.5:
        return ", ".join(keys)
    return ", ".join(keys[:-1]) + " and " + keys[-1]


TASKS = {"extract": extract}
