"""instructor against a running agent that serves ember.

STOKER_BASE_URL names the agent, e.g. http://127.0.0.1:8000. Every test is one thing an application does; none looks at anything that
instructor does not show.
"""

import os
import unittest

import instructor
import openai
import pydantic

BASE_URL = f"{os.environ['STOKER_BASE_URL']}/v1"
QUESTION = "Extract customer and quantity as JSON: Order from Vefe: 17 x vube, total 31 euros."


class Order(pydantic.BaseModel):
    customer: str
    quantity: int


class Modes(unittest.TestCase):
    def ask(self, mode, **options):
        client = instructor.from_openai(openai.OpenAI(base_url=BASE_URL, api_key="unused"), mode=mode)
        return client.chat.completions.create(
            model="ember", messages=[{"role": "user", "content": QUESTION}], response_model=Order, max_retries=0,
            temperature=0, max_tokens=300, **options)

    def test_tools(self):
        self.assertIsInstance(self.ask(instructor.Mode.TOOLS), Order)

    def test_json_schema(self):
        self.assertIsInstance(self.ask(instructor.Mode.JSON_SCHEMA), Order)

    def test_a_partial_stream_ends_with_the_whole(self):
        client = instructor.from_openai(openai.OpenAI(base_url=BASE_URL, api_key="unused"), mode=instructor.Mode.JSON_SCHEMA)
        parts = list(client.chat.completions.create_partial(
            model="ember", messages=[{"role": "user", "content": QUESTION}], response_model=Order, temperature=0, max_tokens=300))
        self.assertGreater(len(parts), 1)
        self.assertEqual(parts[-1].model_dump(), self.ask(instructor.Mode.JSON_SCHEMA).model_dump())


if __name__ == "__main__":
    unittest.main()
