"""LangChain's OpenAI classes against a running agent that serves ember.

STOKER_BASE_URL names the agent, e.g. http://127.0.0.1:8000. Every test is one thing an application does; none looks at anything that
LangChain does not show.
"""

import os
import unittest

import pydantic
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAIEmbeddings

WHERE = {"base_url": f"{os.environ['STOKER_BASE_URL']}/v1", "api_key": "unused", "model": "ember", "max_retries": 0}
QUESTION = "Extract customer and quantity as JSON: Order from Vefe: 17 x vube, total 31 euros."


class Order(pydantic.BaseModel):
    """An order."""

    customer: str
    quantity: int


@tool
def get_weather(city: str) -> str:
    """Weather of a city"""
    return '{"temperature": 7}'


def chat(**options) -> ChatOpenAI:
    return ChatOpenAI(**WHERE, **{"temperature": 0, "max_tokens": 300, **options})


class Structure(unittest.TestCase):
    def test_the_default_method_is_parsed(self):
        self.assertEqual(chat().with_structured_output(Order).invoke(QUESTION), Order(customer="Vefe", quantity=17))

    def test_json_schema_strict(self):
        answers = chat().with_structured_output(Order, method="json_schema", strict=True)
        self.assertEqual(answers.invoke(QUESTION), Order(customer="Vefe", quantity=17))

    def test_json_mode(self):
        answers = chat().with_structured_output(Order, method="json_mode")
        self.assertEqual(answers.invoke(QUESTION), Order(customer="Vefe", quantity=17))

    def test_function_calling(self):
        answers = chat().with_structured_output(Order, method="function_calling")
        self.assertIsInstance(answers.invoke(QUESTION), Order)

    def test_through_the_responses_api(self):
        answers = chat(use_responses_api=True).with_structured_output(Order)
        self.assertEqual(answers.invoke(QUESTION), Order(customer="Vefe", quantity=17))


class Tools(unittest.TestCase):
    def test_a_call_is_made_and_its_result_answered(self):
        model = chat().bind_tools([get_weather])
        messages = [HumanMessage("What is the weather in Oslo?")]
        messages.append(model.invoke(messages))
        [call] = messages[-1].tool_calls
        self.assertEqual((call["name"], call["args"]), ("get_weather", {"city": "Oslo"}))
        messages.append(get_weather.invoke(call))
        self.assertIsInstance(messages[-1], ToolMessage)
        self.assertIn("7", model.invoke(messages).content)

    def test_any_tool_must_be_called(self):
        answer = chat().bind_tools([get_weather], tool_choice="any").invoke("Tell me a story.")
        self.assertEqual([call["name"] for call in answer.tool_calls], ["get_weather"])

    def test_a_streamed_call_adds_up(self):
        whole = None
        for chunk in chat().bind_tools([get_weather]).stream("What is the weather in Oslo?"):
            whole = chunk if whole is None else whole + chunk
        self.assertEqual([call["args"] for call in whole.tool_calls], [{"city": "Oslo"}])


class Rest(unittest.TestCase):
    def test_a_stream_adds_up_and_is_counted(self):
        whole = chat().invoke("Hello!")
        chunks = list(chat(stream_usage=True).stream("Hello!"))
        self.assertEqual("".join(chunk.content for chunk in chunks), whole.content)
        counted = [chunk.usage_metadata for chunk in chunks if chunk.usage_metadata]
        self.assertEqual(counted[-1]["output_tokens"], whole.usage_metadata["output_tokens"])

    def test_embeddings(self):
        # Its own way of cutting long texts sends the ids of another model's tokens.
        vectors = OpenAIEmbeddings(**WHERE, check_embedding_ctx_length=False)
        both = vectors.embed_documents(["Hello!", "What is 12 + 30?"])
        self.assertEqual(vectors.embed_query("Hello!"), both[0])
        self.assertNotEqual(both[0], both[1])


if __name__ == "__main__":
    unittest.main()
