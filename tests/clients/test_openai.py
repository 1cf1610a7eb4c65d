"""The official OpenAI client against a running agent that serves ember.

STOKER_BASE_URL names the agent, e.g. http://127.0.0.1:8000, STOKER_ADMIN_URL its admin port. Every test is one thing an application does with the
client; none looks at anything the client does not show.
"""

import array
import os
import time
import unittest
import urllib.request
import json

import openai
import pydantic

BASE_URL = os.environ["STOKER_BASE_URL"]
ADMIN_URL = os.environ["STOKER_ADMIN_URL"]
MODEL = "ember"


def client() -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{BASE_URL}/v1", api_key="unused", max_retries=0, timeout=60)


def user(content: str) -> list[dict]:
    return [{"role": "user", "content": content}]


def load() -> dict:
    with urllib.request.urlopen(f"{ADMIN_URL}/v1/load", timeout=10) as response:
        return json.load(response)


class Chat(unittest.TestCase):
    def setUp(self):
        self.client = client()

    def ask(self, content: str, **options):
        return self.client.chat.completions.create(model=MODEL, messages=user(content), **options)

    def test_a_question_is_answered(self):
        answer = self.ask("What is 12 + 30?", temperature=0)
        self.assertEqual(answer.choices[0].message.content, "42")
        self.assertEqual(answer.choices[0].finish_reason, "stop")
        self.assertEqual(answer.usage.total_tokens, answer.usage.prompt_tokens + answer.usage.completion_tokens)

    def test_a_stream_adds_up_to_the_whole_answer(self):
        whole = self.ask("Hello!", temperature=0).choices[0].message.content
        chunks = list(self.ask("Hello!", temperature=0, stream=True, stream_options={"include_usage": True}))
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        self.assertEqual(text, whole)
        self.assertEqual(chunks[0].choices[0].delta.role, "assistant")
        self.assertGreater(chunks[-1].usage.completion_tokens, 1)
        self.assertEqual(chunks[-1].choices, [])

    def test_logprobs_come_with_their_rivals(self):
        answer = self.ask("Hello!", temperature=0, logprobs=True, top_logprobs=3, max_tokens=4)
        positions = answer.choices[0].logprobs.content
        self.assertEqual(len(positions), 4)
        for position in positions:
            self.assertEqual(len(position.top_logprobs), 3)
            self.assertEqual(position.token, position.top_logprobs[0].token, "greedy takes the likeliest")
            self.assertEqual(bytes(position.bytes).decode(), position.token)
        text = b"".join(bytes(position.bytes) for position in positions).decode()
        self.assertEqual(text, answer.choices[0].message.content)

    def test_two_completions_of_one_prompt(self):
        options = {"n": 2, "temperature": 2, "top_p": 1, "seed": 3, "max_tokens": 20}
        answer = self.ask("Write a story about a cat.", **options)
        texts = [choice.message.content for choice in answer.choices]
        self.assertEqual([choice.index for choice in answer.choices], [0, 1])
        self.assertNotEqual(texts[0], texts[1])
        again = self.ask("Write a story about a cat.", **options)
        self.assertEqual(texts, [choice.message.content for choice in again.choices])

    def test_a_stop_string_ends_the_answer_before_it(self):
        whole = self.ask("Hello!", temperature=0).choices[0].message.content
        word = whole.split()[2]
        answer = self.ask("Hello!", temperature=0, stop=[word, "never this"])
        self.assertEqual(answer.choices[0].message.content, whole[: whole.index(word)])
        self.assertEqual(answer.choices[0].finish_reason, "stop")

    def test_max_completion_tokens_ends_with_length(self):
        answer = self.ask("Hello!", max_completion_tokens=2)
        self.assertEqual((answer.choices[0].finish_reason, answer.usage.completion_tokens), ("length", 2))

    def test_a_tool_call_and_its_result(self):
        parameters = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
        function = {"name": "get_weather", "description": "Weather of a city", "parameters": parameters}
        tools = [{"type": "function", "function": function}]
        answer = self.ask("What is the weather in Oslo?", temperature=0, tools=tools)
        self.assertEqual(answer.choices[0].finish_reason, "tool_calls")
        call = answer.choices[0].message.tool_calls[0]
        self.assertEqual((call.function.name, json.loads(call.function.arguments)), ("get_weather", {"city": "Oslo"}))
        result = {"role": "tool", "tool_call_id": call.id, "content": '{"temperature": 7}'}
        messages = [*user("What is the weather in Oslo?"), answer.choices[0].message, result]
        answer = self.client.chat.completions.create(model=MODEL, messages=messages, tools=tools, temperature=0)
        self.assertIn("7", answer.choices[0].message.content)

    def test_an_aborted_stream_frees_the_engine(self):
        stream = self.ask("Count from 1 to 1000.", stream=True, max_tokens=1900, extra_body={"ignore_eos": True})
        next(iter(stream))
        stream.close()
        deadline = time.monotonic() + 10
        while load()["referencedBlocks"] > 0:
            self.assertLess(time.monotonic(), deadline, load())
            time.sleep(0.05)


class Order(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")
    customer: str
    quantity: int


def tool(name: str, **properties) -> dict:
    parameters = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "description": name, "parameters": parameters}}


class Structure(unittest.TestCase):
    def setUp(self):
        self.client = client()

    def test_an_answer_is_parsed_into_a_class(self):
        question = "Extract customer and quantity as JSON: Order from Vefe: 17 x vube, total 31 euros."
        messages = user(question)
        for temperature in [0, 1, 2]:
            answer = self.client.chat.completions.parse(
                model=MODEL, messages=messages, response_format=Order, temperature=temperature, seed=3, max_tokens=300)
            self.assertIsInstance(answer.choices[0].message.parsed, Order)
            self.assertEqual(answer.choices[0].finish_reason, "stop")
        with self.client.chat.completions.stream(model=MODEL, messages=messages, response_format=Order) as stream:
            self.assertIsInstance(stream.get_final_completion().choices[0].message.parsed, Order)

    def test_an_answer_that_is_cut_off_claims_nothing(self):
        with self.assertRaises(openai.LengthFinishReasonError):
            self.client.chat.completions.parse(
                model=MODEL, messages=user("Hello!"), response_format=Order, max_completion_tokens=2)

    def test_any_object_and_one_of_several_texts(self):
        answer = self.client.chat.completions.create(
            model=MODEL, messages=user("Hello!"), response_format={"type": "json_object"}, temperature=0, max_tokens=600)
        if answer.choices[0].finish_reason == "stop":
            self.assertIsInstance(json.loads(answer.choices[0].message.content), dict)
        for seed in range(4):
            extra = {"structured_outputs": {"choice": ["red", "green"]}}
            answer = self.client.chat.completions.create(
                model=MODEL, messages=user("Say blue."), seed=seed, temperature=2, extra_body=extra)
            self.assertIn(answer.choices[0].message.content, ["red", "green"])

    def test_completions_with_a_schema_differ_by_seed_only(self):
        schema = {"name": "n", "schema": {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"],
                                          "additionalProperties": False}}
        ask = lambda: [choice.message.content for choice in self.client.chat.completions.create(
            model=MODEL, messages=user("Any number as JSON."), n=4, seed=7, temperature=2, max_tokens=200,
            response_format={"type": "json_schema", "json_schema": schema}, logprobs=True).choices]
        texts = ask()
        self.assertEqual(texts, ask())
        self.assertGreater(len(set(texts)), 1)

    def test_a_schema_that_cannot_be_followed_is_named(self):
        schema = {"name": "n", "schema": {"type": "object", "properties": {"n": {"type": "intger"}}}}
        with self.assertRaises(openai.BadRequestError) as caught:
            self.client.chat.completions.create(
                model=MODEL, messages=user("Hello!"), response_format={"type": "json_schema", "json_schema": schema})
        self.assertEqual(caught.exception.param, "response_format.json_schema.schema")
        self.assertIn("intger", str(caught.exception))

    def test_a_call_that_is_required_is_made(self):
        tools = [tool("add", a={"type": "integer"}, b={"type": "integer"}), tool("now")]
        for temperature in [0, 2]:
            for choice in ["required", {"type": "function", "function": {"name": "add"}}]:
                answer = self.client.chat.completions.create(
                    model=MODEL, messages=user("Tell me a story."), tools=tools, tool_choice=choice, temperature=temperature,
                    seed=5, parallel_tool_calls=False, max_tokens=400)
                self.assertEqual(answer.choices[0].finish_reason, "tool_calls")
                call = answer.choices[0].message.tool_calls[0].function
                arguments = json.loads(call.arguments)
                self.assertEqual(set(arguments), {"a", "b"} if call.name == "add" else set())

    def test_a_call_streams_and_adds_up(self):
        options = {"messages": user("What is the weather in Oslo?"), "tools": [tool("get_weather", city={"type": "string"})]}
        whole = self.client.chat.completions.create(model=MODEL, temperature=0, **options).choices[0].message
        with self.client.chat.completions.stream(model=MODEL, temperature=0, **options) as stream:
            kinds = [event.type for event in stream]
            streamed = stream.get_final_completion().choices[0].message
        self.assertEqual(streamed.tool_calls[0].function.arguments, whole.tool_calls[0].function.arguments)
        self.assertGreater(kinds.count("tool_calls.function.arguments.delta"), 1)


class Completions(unittest.TestCase):
    def test_prompts_of_tokens_and_of_text(self):
        for prompt, n_choices in [("one", 1), (["one", "two"], 2), ([5, 6, 7], 1), ([[5], [6, 7]], 2)]:
            answer = client().completions.create(model=MODEL, prompt=prompt, max_tokens=3, logprobs=2)
            self.assertEqual(len(answer.choices), n_choices)
            for choice in answer.choices:
                self.assertEqual(len(choice.logprobs.tokens), len(choice.logprobs.text_offset))

    def test_streams_of_two_completions_are_told_apart_by_index(self):
        texts = {0: "", 1: ""}
        options = {"max_tokens": 12, "temperature": 0.8, "seed": 5, "n": 2}
        for chunk in client().completions.create(model=MODEL, prompt="one two", stream=True, **options):
            texts[chunk.choices[0].index] += chunk.choices[0].text
        whole = client().completions.create(model=MODEL, prompt="one two", **options)
        self.assertEqual(texts, {choice.index: choice.text for choice in whole.choices})


class Errors(unittest.TestCase):
    def chat(self, **options):
        return client().chat.completions.create(**{"model": MODEL, "messages": user("Hello!"), **options})

    def test_an_unknown_model_is_not_found(self):
        with self.assertRaises(openai.NotFoundError) as caught:
            self.chat(model="gpt-5")
        self.assertEqual((caught.exception.code, caught.exception.param), ("model_not_found", "model"))

    def test_an_unknown_parameter_is_named(self):
        with self.assertRaises(openai.BadRequestError) as caught:
            self.chat(extra_body={"guided_xml": {}})
        self.assertEqual(caught.exception.param, "guided_xml")

    def test_a_value_out_of_range_is_named(self):
        with self.assertRaises(openai.BadRequestError) as caught:
            self.chat(temperature=3)
        self.assertEqual(caught.exception.param, "temperature")
        self.assertIn("between 0 and 2", str(caught.exception))

    def test_a_prompt_that_is_too_long_has_openais_code(self):
        with self.assertRaises(openai.BadRequestError) as caught:
            self.chat(messages=user("word " * 5000))
        self.assertEqual(caught.exception.code, "context_length_exceeded")

    def test_models_are_listed(self):
        self.assertEqual([model.id for model in client().models.list()], [MODEL])
        self.assertEqual(client().models.retrieve(MODEL).id, MODEL)


class Embeddings(unittest.TestCase):
    def embed(self, texts, **options):
        return client().embeddings.create(model=MODEL, input=texts, **options)

    def test_each_text_gets_a_vector_of_length_one(self):
        texts = ["Hello!", "What is 12 + 30?", "Hello!"]
        answer = self.embed(texts)
        vectors = [entry.embedding for entry in answer.data]
        self.assertEqual([entry.index for entry in answer.data], [0, 1, 2])
        self.assertEqual(vectors[0], vectors[2])
        self.assertNotEqual(vectors[0], vectors[1])
        for vector in vectors:
            self.assertAlmostEqual(sum(value * value for value in vector), 1.0, places=4)
        self.assertGreater(answer.usage.prompt_tokens, 3)
        self.assertEqual(answer.usage.total_tokens, answer.usage.prompt_tokens)
        # The client asks for base64 unless it is told what it wants. Decimals are the shortest that name the same 32 bits.
        decimals = [array.array("f", entry.embedding).tolist() for entry in self.embed(texts, encoding_format="float").data]
        self.assertEqual(vectors, decimals)

    def test_fewer_dimensions_are_the_first_ones_made_long_again(self):
        whole, cut = (self.embed("Hello!", **options).data[0].embedding for options in ({}, {"dimensions": 8}))
        length = sum(value * value for value in whole[:8]) ** 0.5
        self.assertEqual(len(cut), 8)
        for ours, expected in zip(cut, whole):
            self.assertAlmostEqual(ours, expected / length, places=5)

    def test_tokens_are_taken_as_texts_are(self):
        by_text, by_tokens = (self.embed(value).data[0].embedding for value in ("Hello!", self.tokens("Hello!")))
        self.assertEqual(by_text, by_tokens)

    def tokens(self, text):
        body = json.dumps({"prompt": text}).encode()
        request = urllib.request.Request(f"{BASE_URL}/tokenize", body, {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=10) as response:
            return json.load(response)["tokens"]

    def test_more_texts_than_run_at_a_time_keep_their_order(self):
        texts = [f"{n} + {n}" for n in range(300)]
        vectors = [entry.embedding for entry in self.embed(texts).data]
        self.assertEqual(vectors[7], self.embed("7 + 7").data[0].embedding)
        self.assertEqual(vectors[299], self.embed("299 + 299").data[0].embedding)

    def test_a_text_that_is_too_long_is_refused_by_name(self):
        with self.assertRaises(openai.BadRequestError) as caught:
            self.embed("word " * 5000)
        self.assertEqual((caught.exception.code, caught.exception.param), ("context_length_exceeded", "input"))


class Responses(unittest.TestCase):
    def ask(self, content, **options):
        return client().responses.create(model=MODEL, input=content, **{"temperature": 0, **options})

    def test_a_question_is_answered_and_followed(self):
        first = self.ask("What is 12 + 30?")
        self.assertEqual((first.output_text, first.status), ("42", "completed"))
        second = self.ask("Hello!", previous_response_id=first.id)
        self.assertGreater(second.usage.input_tokens, first.usage.input_tokens)
        self.assertEqual(client().responses.retrieve(first.id).output_text, "42")
        client().responses.delete(first.id)
        with self.assertRaises(openai.NotFoundError):
            client().responses.retrieve(first.id)

    def test_a_stream_adds_up_to_the_whole_answer(self):
        whole = self.ask("Hello!").output_text
        with client().responses.stream(model=MODEL, input="Hello!", temperature=0) as stream:
            text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
            final = stream.get_final_response()
        self.assertEqual((text, final.output_text), (whole, whole))

    def test_a_function_is_called_and_its_output_answered(self):
        parameters = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
        tool = {"type": "function", "name": "get_weather", "description": "Weather of a city", "parameters": parameters}
        first = self.ask("What is the weather in Oslo?", tools=[tool])
        call = next(item for item in first.output if item.type == "function_call")
        self.assertEqual((call.name, json.loads(call.arguments)), ("get_weather", {"city": "Oslo"}))
        output = {"type": "function_call_output", "call_id": call.call_id, "output": '{"temperature": 7}'}
        second = self.ask([output], tools=[tool], previous_response_id=first.id)
        self.assertIn("7", second.output_text)


if __name__ == "__main__":
    unittest.main()
