"""litellm against a running agent that serves ember, as an OpenAI server and as one of vLLM's.

STOKER_BASE_URL names the agent, e.g. http://127.0.0.1:8000. Every test is one thing an application does; none looks at anything that
litellm does not show.
"""

import json
import os
import unittest

# Otherwise it asks the network what models cost.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

import litellm
import pydantic

BASE_URL = f"{os.environ['STOKER_BASE_URL']}/v1"
PROVIDERS = ["openai/ember", "hosted_vllm/ember"]
WEATHER = {"type": "function", "function": {
    "name": "get_weather", "description": "Weather of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}


class Order(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")
    customer: str
    quantity: int


def ask(model, messages, **options):
    return litellm.completion(
        model=model, messages=messages, api_base=BASE_URL, api_key="unused", num_retries=0,
        **{"temperature": 0, "max_tokens": 300, **options})


def user(content):
    return {"role": "user", "content": content}


class Tools(unittest.TestCase):
    def test_the_loop_of_a_tool_with_its_messages_as_they_come(self):
        for model in PROVIDERS:
            for as_sent in [lambda message: message, lambda message: message.model_dump()]:
                messages = [user("What is the weather in Oslo?")]
                message = ask(model, messages, tools=[WEATHER]).choices[0].message
                [call] = message.tool_calls
                self.assertEqual(json.loads(call.function.arguments), {"city": "Oslo"})
                result = {"role": "tool", "tool_call_id": call.id, "name": call.function.name, "content": '{"temperature": 7}'}
                messages += [as_sent(message), result]
                self.assertIn("7", ask(model, messages, tools=[WEATHER]).choices[0].message.content)

    def test_a_streamed_call_is_put_together(self):
        for model in PROVIDERS:
            messages = [user("What is the weather in Oslo?")]
            chunks = list(ask(model, messages, tools=[WEATHER], stream=True))
            [call] = litellm.stream_chunk_builder(chunks, messages=messages).choices[0].message.tool_calls
            self.assertEqual(json.loads(call.function.arguments), {"city": "Oslo"})


class Rest(unittest.TestCase):
    def test_a_class_as_response_format(self):
        question = user("Extract customer and quantity as JSON: Order from Vefe: 17 x vube, total 31 euros.")
        for model in PROVIDERS:
            answer = ask(model, [question], response_format=Order).choices[0].message.content
            self.assertEqual(Order.model_validate_json(answer), Order(customer="Vefe", quantity=17))

    def test_embeddings(self):
        for model in PROVIDERS:
            answer = litellm.embedding(model=model, input=["Hello!"], api_base=BASE_URL, api_key="unused")
            self.assertEqual(len(answer.data), 1)

    def test_a_mistake_is_the_exception_that_clients_expect(self):
        for model in PROVIDERS:
            with self.assertRaises(litellm.BadRequestError):
                ask(model, [user("Hello!")], temperature=3)


if __name__ == "__main__":
    unittest.main()
