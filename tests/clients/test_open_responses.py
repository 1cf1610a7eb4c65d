"""The Open Responses specification against a running agent that serves ember: the cases of its compliance tests, and the same streamed.

STOKER_BASE_URL names the agent. Every response and every event is read strictly by the models that openresponses-types has generated
from the specification's OpenAPI document. Of the compliance tests one is not here but as a refusal: an image, which no model here sees.
"""

import json
import os
import unittest
import urllib.error
import urllib.request

import pydantic
from openresponses_types import types

BASE_URL = os.environ["STOKER_BASE_URL"]

# Where this server follows OpenAI's API and its clients, which the specification's document contradicts: reasoning is told by
# `response.reasoning_text.*`, and a format repeats its schema.
EVENTS = {
    model.model_fields["type"].annotation: model
    for name, model in vars(types).items()
    if name.startswith("Response") and name.endswith("StreamingEvent")
}
EVENTS = {word.value: model for kind, model in EVENTS.items() for word in kind}

WEATHER = {"type": "function", "name": "get_weather", "description": "Weather of a city", "parameters": {
    "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}
SCHEMA = {"type": "object", "properties": {"customer": {"type": "string"}, "quantity": {"type": "integer"}},
          "required": ["customer", "quantity"], "additionalProperties": False}


def send(method, path, body=None):
    data = None if body is None else json.dumps(body).encode()
    headers = {"content-type": "application/json"}
    return urllib.request.urlopen(urllib.request.Request(BASE_URL + path, data, headers, method=method), timeout=60)


def without_schema(response):
    response = json.loads(json.dumps(response))
    if response["text"]["format"]["type"] == "json_schema":
        response["text"]["format"]["schema"] = None
    return response


def read(model, value):
    """A value that is all that the model says, of exactly its types."""
    return model.model_validate_json(json.dumps(value), strict=True)


class Responses(unittest.TestCase):
    def ask(self, content, **options):
        """The whole response, and the same as a stream, both read; what they have in common is the same."""
        body = {"model": "ember", "input": content, "temperature": 0, **options}
        with send("POST", "/v1/responses", body) as answer:
            whole = json.load(answer)
        read(types.ResponseResource, without_schema(whole))
        with send("POST", "/v1/responses", {**body, "stream": True}) as answer:
            self.assertTrue(answer.headers["content-type"].startswith("text/event-stream"))
            last = self.follow(answer.read().decode())
        said = lambda response: [{name: item.get(name) for name in ("type", "status", "content", "name", "arguments")}
                                 for item in response["output"]]
        self.assertEqual(said(last), said(whole))
        own = ("id", "created_at", "completed_at", "output", "usage")
        rest = lambda response: {name: value for name, value in response.items() if name not in own}
        self.assertEqual(rest(last), rest(whole))
        return whole

    def follow(self, stream):
        """Reads a stream by what the specification says of its order; the response that it ends with."""
        blocks = [dict(line.split(": ", 1) for line in block.splitlines()) for block in stream.split("\n\n") if block]
        self.assertEqual(blocks.pop(), {"data": "[DONE]"}, "it ends by the literal that the specification has")
        events = [json.loads(block["data"]) for block in blocks]
        self.assertEqual([block["event"] for block in blocks], [event["type"] for event in events])
        self.assertEqual([event["sequence_number"] for event in events], list(range(len(events))))
        for event in events:
            shown = {**event, "type": event["type"].replace(".reasoning_text.", ".reasoning.")}
            if "response" in event:
                shown["response"] = without_schema(event["response"])
            with self.subTest(event=event["type"]):
                read(EVENTS[shown["type"]], shown)
        self.assertEqual([event["type"] for event in events[:2]], ["response.created", "response.in_progress"])
        last = events[-1]["response"]
        self.assertEqual(events[-1]["type"], f"response.{last['status']}")
        self.assertEqual([event["type"] for event in events if "response" in event][2:], [events[-1]["type"]])
        items = []
        for event in events[2:-1]:
            self.follow_item(event, items)
        self.assertEqual([item["done"] for item in items], last["output"])
        return last

    def follow_item(self, event, items):
        kind, index = event["type"], event["output_index"]
        if kind == "response.output_item.added":
            self.assertTrue(all("done" in item for item in items), "one item at a time")
            self.assertEqual((index, event["item"]["status"]), (len(items), "in_progress"))
            items.append({"id": event["item"]["id"], "text": ""})
            return
        item = items[-1]
        self.assertEqual(index, len(items) - 1)
        self.assertNotIn("done", item, "nothing comes behind an item's end")
        if kind == "response.output_item.done":
            done = event["item"]
            said = done["arguments"] if done["type"] == "function_call" else "".join(part["text"] for part in done["content"])
            self.assertEqual((done["id"], said), (item["id"], item["text"]))
            item["done"] = done
            return
        self.assertEqual(event["item_id"], item["id"])
        if kind.endswith(".delta"):
            item["text"] += event["delta"]
        elif kind in ("response.output_text.done", "response.reasoning_text.done", "response.function_call_arguments.done"):
            self.assertEqual(event.get("text", event.get("arguments")), item["text"])

    def refusal(self, content, **options):
        with self.assertRaises(urllib.error.HTTPError) as caught:
            send("POST", "/v1/responses", {"model": "ember", "input": content, **options})
        with caught.exception as answer:
            error = json.load(answer)["error"]
            self.assertEqual(answer.code, 400)
        read(types.ErrorPayload, error)
        return error["param"]

    def test_basic_response(self):
        response = self.ask([{"type": "message", "role": "user", "content": "What is 12 + 30?"}])
        self.assertEqual((response["status"], response["output"][0]["content"][0]["text"]), ("completed", "42"))
        self.assertGreaterEqual(response["completed_at"], response["created_at"])

    def test_system_prompt(self):
        items = [{"type": "message", "role": "system", "content": "You are a pirate. Always answer like one."},
                 {"type": "message", "role": "user", "content": "Hello!"}]
        self.assertEqual(self.ask(items)["status"], "completed")
        self.assertEqual(self.ask("Hello!", instructions="Be brief.")["instructions"], "Be brief.")

    def test_tool_calling(self):
        response = self.ask("What is the weather in Oslo?", tools=[WEATHER])
        call = next(item for item in response["output"] if item["type"] == "function_call")
        self.assertEqual((call["name"], json.loads(call["arguments"])), ("get_weather", {"city": "Oslo"}))
        result = {"type": "function_call_output", "call_id": call["call_id"], "output": '{"temperature": 7}'}
        followed = self.ask([result], tools=[WEATHER], previous_response_id=response["id"])
        self.assertIn("7", followed["output"][0]["content"][0]["text"])
        by_name = {"type": "function", "name": "get_weather"}
        forced = self.ask("Hello!", tools=[WEATHER], tool_choice=by_name, parallel_tool_calls=False)
        self.assertEqual([item["type"] for item in forced["output"]], ["function_call"])
        self.assertEqual(forced["tool_choice"], by_name)

    def test_multi_turn(self):
        turns = [("user", "What is 12 + 30?"), ("assistant", "42"), ("user", "What is 2 + 2?")]
        items = [{"type": "message", "role": role, "content": text} for role, text in turns]
        self.assertEqual(self.ask(items)["output"][0]["content"][0]["text"], "4")

    def test_structured_output(self):
        form = {"type": "json_schema", "name": "order", "schema": SCHEMA, "strict": True}
        response = self.ask("Extract customer and quantity as JSON: Order from Vefe: 17 x vube, 31 euros.", text={"format": form})
        order = json.loads(response["output"][0]["content"][0]["text"])
        self.assertEqual(order, {"customer": "Vefe", "quantity": 17})
        self.assertEqual(response["text"]["format"]["schema"], SCHEMA)

    def test_an_answer_that_is_cut_off_says_so_everywhere(self):
        response = self.ask("Tell me a story about the sea.", max_output_tokens=3)
        self.assertEqual((response["status"], response["output"][-1]["status"]), ("incomplete", "incomplete"))
        self.assertEqual((response["incomplete_details"], response["completed_at"]), ({"reason": "max_output_tokens"}, None))

    def test_log_probabilities(self):
        response = self.ask("Hello!", include=["message.output_text.logprobs"], top_logprobs=2)
        part = response["output"][0]["content"][0]
        self.assertEqual("".join(token["token"] for token in part["logprobs"]).strip(), part["text"])
        self.assertTrue(all(len(token["top_logprobs"]) == 2 for token in part["logprobs"]))

    def test_what_is_kept_is_what_was_answered_and_nothing_else_is(self):
        response = self.ask("Hello!", metadata={"for": "test"})
        path = f"/v1/responses/{response['id']}"
        with send("GET", path) as answer:
            self.assertEqual(json.load(answer), response)
        unkept = self.ask("Hello!", store=False, safety_identifier="u1", prompt_cache_key="k", presence_penalty=0.5)
        self.assertEqual((unkept["store"], unkept["presence_penalty"]), (False, 0.5))
        for path in (f"/v1/responses/{unkept['id']}", "/v1/responses/resp_none"):
            with self.assertRaises(urllib.error.HTTPError) as caught:
                send("GET", path)
            with caught.exception as answer:
                self.assertEqual((answer.code, json.load(answer)["error"]["code"]), (404, "response_not_found"))

    def test_what_is_not_done_here_is_refused_by_its_name(self):
        image = {"type": "message", "role": "user", "content": [{"type": "input_image", "image_url": "data:image/png;base64,AA=="}]}
        self.assertEqual(self.refusal([image]), "input[0].content[0]")
        self.assertEqual(self.refusal("x", tools=[WEATHER, {"type": "web_search"}]), "tools[1]")
        self.assertEqual(self.refusal("x", tools=[{**WEATHER, "defer_loading": True}]), "tools[0].defer_loading")
        self.assertEqual(self.refusal("x", tools=[WEATHER, WEATHER]), "tools[1].name")
        self.assertEqual(self.refusal("x", tool_choice="required"), "tool_choice")
        self.assertEqual(self.refusal("x", truncation="auto"), "truncation")
        self.assertEqual(self.refusal("x", include=["file_search_call.results"]), "include")
        self.assertEqual(self.refusal("x", temperature=3), "temperature")


if __name__ == "__main__":
    unittest.main()
