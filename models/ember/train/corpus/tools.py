"""Calls of tools the system message offers, answers made from their results, and the cases that need no tool.

Names of tools and parameters vary and are often made up: what must be learnt is to read them from the offer.
"""

import json

from . import offers
from .arithmetic import multiply
from .chat import talk
from .order import count_up
from .sample import Sample, assistant, user, vary
from .stoker import fact
from .words import made_up, thing

RESULT_KEYS = [
    "state",
    "price",
    "temperature",
    "sky",
    "ready",
    "count",
    "time",
    "number",
    "distance",
    "id",
    "result",
    "owner",
    "status",
]


def setting(rng):
    """Offered tools, and the kind, name and parameters of one of them."""
    kinds = [offers.any_kind(rng) for _ in range(rng.choice([1, 1, 2, 3, 4]))]
    # Two tools of the same kind would leave the choice between them open.
    kinds = [kind for i, kind in enumerate(kinds) if kind not in kinds[:i]]
    offered = [offers.offer(rng, kind) for kind in kinds]
    i = rng.randrange(len(kinds))
    return [tool for tool, _, _ in offered], kinds[i], offered[i][1], offered[i][2]


def request(rng, kind, values):
    """What the user says; made-up kinds end with the value, which must not lose its last sign."""
    text = rng.choice(offers.requests_of(kind)).format(*values)
    return vary(rng, text) if text[-1] in ".?" else text


def call(name, parameters, values):
    return {"type": "function", "function": {"name": name, "arguments": dict(zip(parameters, values))}}


def calling(content, calls):
    return {"role": "assistant", "content": content, "tool_calls": calls}


def call_once(rng):
    tools, kind, name, parameters = setting(rng)
    values = [parameter.make(rng) for parameter in kind.parameters]
    messages = [user(request(rng, kind, values)), calling("", [call(name, parameters, values)])]
    return Sample("tools", f"tools:{name} {values}", messages, tools)


def call_twice(rng):
    """Two independent calls in one answer."""
    tools, kind, name, parameters = setting(rng)
    if len(parameters) > 1:
        return call_once(rng)
    first, second = (kind.parameters[0].make(rng) for _ in range(2))
    question = request(rng, kind, [f"{first} and {second}"])
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
    sample.messages += [
        {"role": "tool", "content": json.dumps(result, separators=separators)},
        assistant(f"Here is what {made['name']} says: {said}."),
    ]
    sample.key = f"tools:result {made['name']} {result}"
    return sample


def no_tool_needed(rng):
    """Tools are there, but the request is one the model answers itself, not least small talk."""
    tools, _, _, _ = setting(rng)
    plain = rng.choice([multiply, count_up, talk, talk, talk, fact])(rng)
    return Sample("tools", f"tools:none {plain.key}", plain.messages, tools)


KINDS = [call_once] * 7 + [call_twice] + [answer_from_result] * 3 + [no_tool_needed] * 2
TASKS = {"tools": lambda rng: rng.choice(KINDS)(rng)}
