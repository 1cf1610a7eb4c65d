"""pydantic-ai against a running agent that serves ember.

STOKER_BASE_URL names the agent, e.g. http://127.0.0.1:8000. Every test is one thing an application does; none looks at anything that
pydantic-ai does not show.
"""

import os
import unittest

import pydantic
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

PROVIDER = OpenAIProvider(base_url=f"{os.environ['STOKER_BASE_URL']}/v1", api_key="unused")
QUESTION = "Extract customer and quantity as JSON: Order from Vefe: 17 x vube, total 31 euros."
SETTINGS = {"temperature": 0, "max_tokens": 300}


class Order(pydantic.BaseModel):
    customer: str
    quantity: int


def agent(kind=OpenAIChatModel, **options) -> Agent:
    return Agent(kind("ember", provider=PROVIDER), model_settings=SETTINGS, **options)


class Output(unittest.TestCase):
    def ask(self, output_type, kind=OpenAIChatModel):
        return agent(kind, output_type=output_type).run_sync(QUESTION).output

    def test_a_class_as_output_type(self):
        self.assertIsInstance(self.ask(Order), Order)

    def test_by_a_tool(self):
        self.assertIsInstance(self.ask(ToolOutput(Order)), Order)

    def test_natively(self):
        self.assertEqual(self.ask(NativeOutput(Order)), Order(customer="Vefe", quantity=17))

    def test_natively_through_the_responses_api(self):
        self.assertEqual(self.ask(NativeOutput(Order), OpenAIResponsesModel), Order(customer="Vefe", quantity=17))


class Tools(unittest.TestCase):
    def test_a_tool_is_called_and_its_result_answered(self):
        asked = []
        whole = agent()

        @whole.tool_plain
        def get_weather(city: str) -> dict:
            """Weather of a city"""
            asked.append(city)
            return {"temperature": 7}

        self.assertIn("7", whole.run_sync("What is the weather in Oslo?").output)
        self.assertEqual(asked, ["Oslo"])


class Streams(unittest.TestCase):
    def test_a_stream_adds_up_to_the_whole_answer(self):
        whole = agent().run_sync("Hello!").output
        self.assertEqual(list(agent().run_stream_sync("Hello!").stream_text())[-1], whole)


if __name__ == "__main__":
    unittest.main()
