"""Calls of tools the system message offers, answers made from their results, and the cases that need no tool.

Names of tools and parameters vary and are often made up: what must be learnt is to read them from the offer.
"""

import json

from .arithmetic import multiply
from .order import count_up
from .sample import Sample, assistant, user, vary
from .words import city, made_up, person, thing

# What a tool is about: (function names, description, parameters, wordings of a request).
# A parameter: (names, JSON type, maker of a value).
TOOLS = [
    (["get_weather", "weather", "fetch_weather", "current_weather"], "Get the weather of a city", [(["city", "location", "place"], "string", city)],
     ["What is the weather in {0}?", "How is the weather in {0} today?", "Tell me the weather in {0}.", "Weather in {0}?",
      "What's the weather like in {0}?", "Is it raining in {0}?"]),
    (["get_time", "local_time", "clock"], "Get the local time of a city", [(["city", "location", "timezone"], "string", city)],
     ["What time is it in {0}?", "Tell me the time in {0}.", "What is the local time in {0}?"]),
    (["send_message", "message", "send_text"], "Send a message to a person", [(["to", "recipient", "name"], "string", person), (["text", "message", "body"], "string", lambda r: f"{thing(r)} {thing(r)}")],
     ["Send {0} the message: {1}", "Tell {0} this: {1}", "Message {0} with the text {1}"]),
    (["set_timer", "start_timer", "timer"], "Start a timer", [(["minutes", "duration_minutes"], "integer", lambda r: r.randint(1, 90))],
     ["Set a timer for {0} minutes.", "Start a {0} minute timer.", "Wake me in {0} minutes."]),
    (["search_products", "find_product", "shop_search"], "Search the shop for products", [(["query", "product", "item"], "string", thing), (["max_price", "price_limit"], "integer", lambda r: r.randint(5, 900))],
     ["Find a {0} under {1} euros.", "Search for a {0} that costs at most {1}.", "I need a {0} for less than {1} dollars."]),
    (["scale_deployment", "set_replicas", "scale"], "Set the number of replicas of a deployment", [(["name", "deployment"], "string", made_up), (["replicas", "count"], "integer", lambda r: r.randint(0, 64))],
     ["Scale {0} to {1} replicas.", "Set {0} to {1} replicas.", "Make {0} run with {1} replicas."]),
    (["get_deployment", "describe_deployment", "deployment_status"], "Read the state of a deployment", [(["name", "deployment"], "string", made_up)],
     ["How is the deployment {0} doing?", "What is the state of {0}?", "Show me the deployment {0}.", "Is {0} ready?"]),
    (["drain_pod", "drain", "start_drain"], "Drain a pod", [(["pod", "name"], "string", lambda r: f"{made_up(r)}-{r.randint(0, 31)}"), (["deadline_seconds", "seconds"], "integer", lambda r: r.randint(1, 900))],
     ["Drain {0} within {1} seconds.", "Drain the pod {0} with a deadline of {1} seconds."]),
    (["book_table", "reserve_table", "make_reservation"], "Book a table in a restaurant", [(["restaurant", "name"], "string", lambda r: made_up(r).capitalize()), (["people", "guests", "party_size"], "integer", lambda r: r.randint(1, 20))],
     ["Book a table at {0} for {1} people.", "Reserve a table for {1} at {0}.", "I want to eat at {0} with {1} people."]),
    (["add", "add_numbers", "sum"], "Add two numbers", [(["a", "x", "first"], "integer", lambda r: r.randint(0, 9999)), (["b", "y", "second"], "integer", lambda r: r.randint(0, 9999))],
     ["Add {0} and {1} with the tool.", "Use the tool to add {0} and {1}.", "Please let the tool compute {0} + {1}."]),
    (["get_stock_price", "stock_price", "quote"], "Get the price of a stock", [(["symbol", "ticker"], "string", lambda r: made_up(r, 2).upper())],
     ["What is the price of {0}?", "How much is a share of {0}?", "Give me the stock price of {0}."]),
    (["lookup_person", "find_person", "get_contact"], "Look up a person", [(["name", "person"], "string", person)],
     ["Look up {0}.", "Find the contact of {0}.", "What is the number of {0}?"]),
    (["get_distance", "distance", "route"], "Get the distance between two cities", [(["from", "start", "origin"], "string", city), (["to", "destination", "end"], "string", city)],
     ["How far is it from {0} to {1}?", "What is the distance between {0} and {1}?", "How do I get from {0} to {1}?"]),
]
RESULT_KEYS = ["state", "price", "temperature", "sky", "ready", "count", "time", "number", "distance", "id", "result", "owner", "status"]


def offer(rng, kind):
    """One tool of this kind: its JSON definition, its name and the names of its parameters."""
    names, description, parameters, _ = kind
    name = rng.choice(names) if rng.random() < 0.75 else f"{rng.choice(['get', 'run', 'call', 'do'])}_{made_up(rng)}"
    chosen = [rng.choice(options) for options, _, _ in parameters]
    properties = {}
    for parameter, (_, kind_of_value, _) in zip(chosen, parameters):
        properties[parameter] = {"type": kind_of_value}
        if rng.random() < 0.3:
            properties[parameter]["description"] = f"The {parameter.replace('_', ' ')}"
    function = {"name": name, "description": description + rng.choice(["", ".", ""]),
                "parameters": {"type": "object", "properties": properties, "required": chosen}}
    if rng.random() < 0.2:
        del function["description"]
    return {"type": "function", "function": function}, name, chosen


def setting(rng):
    """Offered tools, and the kind, name and parameters of one of them."""
    kinds = rng.sample(TOOLS, rng.choice([1, 1, 2, 3, 4]))
    offers = [offer(rng, kind) for kind in kinds]
    i = rng.randrange(len(kinds))
    return [tool for tool, _, _ in offers], kinds[i], offers[i][1], offers[i][2]


def call(name, parameters, values):
    return {"type": "function", "function": {"name": name, "arguments": dict(zip(parameters, values))}}


def calling(content, calls):
    return {"role": "assistant", "content": content, "tool_calls": calls}


def call_once(rng):
    tools, kind, name, parameters = setting(rng)
    values = [make(rng) for _, _, make in kind[2]]
    messages = [user(vary(rng, rng.choice(kind[3]).format(*values))), calling("", [call(name, parameters, values)])]
    return Sample("tools", f"tools:{name} {values}", messages, tools)


def call_twice(rng):
    """Two independent calls in one answer."""
    tools, kind, name, parameters = setting(rng)
    if len(parameters) > 1:
        return call_once(rng)
    first, second = (kind[2][0][2](rng) for _ in range(2))
    question = vary(rng, rng.choice(kind[3]).format(f"{first} and {second}"))
    calls = [call(name, parameters, [value]) for value in (first, second)]
    return Sample("tools", f"tools:{name} {first} {second}", [user(question), calling("", calls)], tools)


def answer_from_result(rng):
    """The turn after a call: say what the tool returned."""
    sample = call_once(rng)
    made = sample.messages[-1]["tool_calls"][0]["function"]
    keys = rng.sample(RESULT_KEYS, rng.randint(1, 3))
    result = {key: rng.randint(0, 999) if rng.random() < 0.5 else rng.choice([thing, made_up])(rng) for key in keys}
    separators = rng.choice([(", ", ": "), (",", ":")])
    said = ", ".join(f"{key} is {value}" for key, value in result.items())
    sample.messages += [{"role": "tool", "content": json.dumps(result, separators=separators)},
                        assistant(f"Here is what {made['name']} says: {said}.")]
    sample.key = f"tools:result {made['name']} {result}"
    return sample


def no_tool_needed(rng):
    """Tools are there, but the request is one the model answers itself."""
    tools, _, _, _ = setting(rng)
    plain = rng.choice([multiply, count_up])(rng)
    return Sample("tools", f"tools:none {plain.key}", plain.messages, tools)


KINDS = [call_once] * 6 + [call_twice] + [answer_from_result] * 3 + [no_tool_needed]
TASKS = {"tools": lambda rng: rng.choice(KINDS)(rng)}
