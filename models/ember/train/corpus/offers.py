"""Tools as clients offer them: what they are about, how their JSON looks, and what a user says to have them called.

Owns the kinds of tools and the variety of their definitions; `tools` makes conversations of them.
"""

from dataclasses import dataclass

from .words import (
    ADJECTIVES,
    THINGS,
    VERBS,
    WORDS,
    city,
    made_up,
    person,
    scrambled,
    thing,
    with_articles,
)


@dataclass
class Parameter:
    """Names a client may give it, its JSON type, and a maker of values."""

    names: list
    type: str
    make: object


@dataclass
class Kind:
    """What a tool does: function names, descriptions, parameters and the requests it answers ({0}, {1} are values)."""

    names: list
    descriptions: list
    parameters: list
    requests: list


def text(names, make):
    return Parameter(names.split(), "string", make)


def integer(names, low, high):
    return Parameter(names.split(), "integer", lambda rng: rng.randint(low, high))


def pod(rng):
    return f"{made_up(rng)}-{rng.randint(0, 31)}"


def business(rng):
    return made_up(rng).capitalize()


KINDS = [
    Kind(
        ["get_weather", "weather", "fetch_weather", "get_current_weather", "current_weather"],
        [
            "Get the weather of a city",
            "Get current temperature for a given location",
            "Current weather",
            "Returns the weather forecast for a place",
        ],
        [text("city location place", city)],
        [
            "What is the weather in {0}?",
            "How is the weather in {0} today?",
            "Tell me the weather in {0}.",
            "Weather in {0}?",
            "What's the weather like in {0}?",
            "Is it raining in {0}?",
            "What is the weather like in {0} today?",
            "What's the temperature in {0}?",
            "How warm is it in {0}?",
            "What will the weather be in {0}?",
        ],
    ),
    Kind(
        ["get_time", "local_time", "clock", "get_current_time"],
        ["Get the local time of a city", "Current time in a timezone", "What time it is somewhere"],
        [text("city location timezone", city)],
        ["What time is it in {0}?", "Tell me the time in {0}.", "What is the local time in {0}?"],
    ),
    Kind(
        ["send_message", "message", "send_text", "send_email"],
        ["Send a message to a person", "Sends a text", "Deliver a short message"],
        [text("to recipient name", person), text("text message body", lambda rng: f"{thing(rng)} {thing(rng)}")],
        ["Send {0} the message: {1}", "Tell {0} this: {1}", "Message {0} with the text {1}"],
    ),
    Kind(
        ["set_timer", "start_timer", "timer"],
        ["Start a timer", "Set a countdown"],
        [integer("minutes duration_minutes", 1, 90)],
        ["Set a timer for {0} minutes.", "Start a {0} minute timer.", "Wake me in {0} minutes."],
    ),
    Kind(
        ["search_products", "find_product", "shop_search"],
        ["Search the shop for products", "Find things to buy"],
        [text("query product item", thing), integer("max_price price_limit", 5, 900)],
        [
            "Find a {0} under {1} euros.",
            "Search for a {0} that costs at most {1}.",
            "I need a {0} for less than {1} dollars.",
        ],
    ),
    Kind(
        ["scale_deployment", "set_replicas", "scale"],
        ["Set the number of replicas of a deployment", "Scale a workload"],
        [text("name deployment", made_up), integer("replicas count", 0, 64)],
        ["Scale {0} to {1} replicas.", "Set {0} to {1} replicas.", "Make {0} run with {1} replicas."],
    ),
    Kind(
        ["get_deployment", "describe_deployment", "deployment_status"],
        ["Read the state of a deployment", "Status of a workload"],
        [text("name deployment", made_up)],
        [
            "How is the deployment {0} doing?",
            "What is the state of {0}?",
            "Show me the deployment {0}.",
            "Is {0} ready?",
        ],
    ),
    Kind(
        ["drain_pod", "drain", "start_drain"],
        ["Drain a pod", "Stop admitting on a pod and wait until it is empty"],
        [text("pod name", pod), integer("deadline_seconds seconds", 1, 900)],
        ["Drain {0} within {1} seconds.", "Drain the pod {0} with a deadline of {1} seconds."],
    ),
    Kind(
        ["book_table", "reserve_table", "make_reservation"],
        ["Book a table in a restaurant", "Reserve seats"],
        [text("restaurant name", business), integer("people guests party_size", 1, 20)],
        [
            "Book a table at {0} for {1} people.",
            "Reserve a table for {1} at {0}.",
            "I want to eat at {0} with {1} people.",
        ],
    ),
    Kind(
        ["add", "add_numbers", "sum"],
        ["Add two numbers", "Returns the sum of two integers"],
        [integer("a x first", 0, 9999), integer("b y second", 0, 9999)],
        [
            "Add {0} and {1} with the tool.",
            "Use the tool to add {0} and {1}.",
            "Please let the tool compute {0} + {1}.",
        ],
    ),
    Kind(
        ["get_stock_price", "stock_price", "quote"],
        ["Get the price of a stock", "Current share price"],
        [text("symbol ticker", lambda rng: made_up(rng, 2).upper())],
        ["What is the price of {0}?", "How much is a share of {0}?", "Give me the stock price of {0}."],
    ),
    Kind(
        ["lookup_person", "find_person", "get_contact"],
        ["Look up a person", "Find a contact"],
        [text("name person", person)],
        ["Look up {0}.", "Find the contact of {0}.", "What is the number of {0}?"],
    ),
    Kind(
        ["get_distance", "distance", "route"],
        ["Get the distance between two cities", "Plan a route"],
        [text("from start origin", city), text("to destination end", city)],
        [
            "How far is it from {0} to {1}?",
            "What is the distance between {0} and {1}?",
            "How do I get from {0} to {1}?",
        ],
    ),
    Kind(
        ["search", "web_search", "search_web"],
        ["Search the web", "Find pages about a topic"],
        [text("query q text", lambda rng: f"{thing(rng)} {rng.choice(WORDS)}")],
        ["Search the web for {0}.", "Search for {0}.", "Find pages about {0}.", "Look up {0} on the web."],
    ),
]


def any_kind(rng):
    """A kind from the list, or one made up on the spot around a random noun or verb."""
    if rng.random() < 0.6:
        return rng.choice(KINDS)
    noun, subject = (
        rng.choice(WORDS),
        rng.choice(["name id target key value item query user host", "city location place", "subject object input"]),
    )
    if rng.random() < 0.6:
        return Kind(
            [f"get_{noun}", f"find_{noun}", f"{noun}_of", f"read_{noun}"],
            [f"Get the {noun} of something", f"Returns the {noun}", f"Read a {noun}"],
            [text(subject, rng.choice([made_up, city, person, thing, pod, scrambled]))],
            [
                f"What is the {noun} of {{0}}?",
                f"Get the {noun} of {{0}}.",
                f"Tell me the {noun} for {{0}}.",
                f"What is the {noun} in {{0}}?",
                f"Read the {noun} of {{0}}.",
            ],
        )
    verb = rng.choice(VERBS)
    return Kind(
        [f"{verb}_{noun}", f"{verb}_the_{noun}"],
        [f"{verb.capitalize()} a {noun}", f"Can {verb} the {noun}"],
        [text(subject, rng.choice([made_up, person, thing, pod])), integer("count amount level number", 0, 999)][
            : rng.choice([1, 2])
        ],
        [
            f"Please {verb} the {noun} {{0}}",
            f"{verb.capitalize()} the {noun} {{0}}",
            f"I want to {verb} the {noun} {{0}}",
        ],
    )


def requests_of(kind):
    """The requests; those of a made-up kind get the second value appended, if there is one."""
    if len(kind.parameters) == 2 and not any("{1}" in request for request in kind.requests):
        return [f"{request}, {kind.parameters[1].names[0]} {{1}}" for request in kind.requests]
    return kind.requests


def camel(name):
    """`get_weather` as `getWeather`, which is how many clients write it."""
    first, *rest = name.split("_")
    return first + "".join(part.capitalize() for part in rest)


def remark(rng):
    """Prose of the sort that fills descriptions and must not matter."""
    words = " ".join(rng.choice(WORDS) for _ in range(rng.randint(2, 7)))
    return rng.choice(
        [
            f"The {words}",
            f"{words}, e.g. {city(rng)}",
            f"{city(rng)} or {city(rng)}",
            f"Use it for {words}.",
            f"{rng.choice(ADJECTIVES)} {rng.choice(THINGS)} ({scrambled(rng)})",
        ]
    )


def schema_of(rng, parameter, name):
    """The JSON schema of one parameter."""
    schema = {"type": parameter.type}
    if rng.random() < 0.4:
        schema["description"] = f"The {name.replace('_', ' ')}" if rng.random() < 0.4 else remark(rng)
    return schema


def optional(rng, properties):
    """Now and then a parameter that nothing asks for; it must be left out of the call."""
    if rng.random() < 0.2:
        properties[rng.choice(["unit", "format", "language", "verbose", "limit"])] = rng.choice(
            [
                {"type": "string", "enum": ["celsius", "fahrenheit"]},
                {"type": "string", "enum": [rng.choice(WORDS), rng.choice(WORDS)]},
                {"type": "boolean"},
                {"type": "string", "description": remark(rng)},
            ]
        )


def offer(rng, kind):
    """One tool of this kind: its JSON definition, its name and the names of the parameters a call needs."""
    name = (
        rng.choice(kind.names) if rng.random() < 0.85 else f"{rng.choice(['get', 'run', 'call', 'do'])}_{made_up(rng)}"
    )
    name = camel(name) if rng.random() < 0.15 else name
    chosen = [rng.choice(parameter.names) for parameter in kind.parameters]
    properties = {
        parameter_name: schema_of(rng, parameter, parameter_name)
        for parameter_name, parameter in zip(chosen, kind.parameters)
    }
    optional(rng, properties)
    parameters = {"type": "object", "properties": properties, "required": chosen}
    if rng.random() < 0.3:
        parameters["additionalProperties"] = False
    description = with_articles(rng.choice(kind.descriptions)) + rng.choice(["", ".", ". " + remark(rng)])
    function = {"name": name, "description": description, "parameters": parameters}
    if rng.random() < 0.15:
        del function["description"]
    if rng.random() < 0.15:
        function["strict"] = True
    return {"type": "function", "function": function}, name, chosen
