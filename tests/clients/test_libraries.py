"""LiteLLM and LangChain, as applications use them, against an endpoint that serves ember.

STOKER_BASE_URL names it, e.g. http://127.0.0.1:8000. None looks at anything that the libraries do not show.
"""

import asyncio
import os
import unittest

# It asks a hub for prices at its import otherwise.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

import litellm
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage, SystemMessage
from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, Field

BASE_URL = os.environ["STOKER_BASE_URL"]
SUM = "What is 12 + 30?"


class Person(BaseModel):
    """Somebody."""

    name: str = Field(max_length=12)
    age: int


class LiteLLM(unittest.TestCase):
    def options(self, **more):
        return {"model": "openai/ember", "api_base": f"{BASE_URL}/v1", "api_key": "unused", "temperature": 0, "num_retries": 0, "timeout": 60, **more}

    def messages(self, content):
        return [{"role": "user", "content": content}]

    def test_a_question_is_answered_and_counted(self):
        answer = litellm.completion(messages=self.messages(SUM), **self.options())
        self.assertEqual(answer.choices[0].message.content, "42")
        self.assertEqual(answer.choices[0].finish_reason, "stop")
        self.assertEqual(answer.usage.total_tokens, answer.usage.prompt_tokens + answer.usage.completion_tokens)

    def test_a_stream_adds_up_to_the_whole_answer(self):
        whole = litellm.completion(messages=self.messages("Hello!"), **self.options())
        chunks = list(litellm.completion(messages=self.messages("Hello!"), **self.options(stream=True)))
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        self.assertEqual(text, whole.choices[0].message.content)
        self.assertEqual(litellm.stream_chunk_builder(chunks).choices[0].message.content, text)

    def test_many_at_once_by_its_router(self):
        params = {key: value for key, value in self.options().items() if key != "num_retries"}
        router = litellm.Router(model_list=[{"model_name": "chat", "litellm_params": params}], num_retries=0)

        async def ask():
            return await asyncio.gather(*(router.acompletion(model="chat", messages=self.messages(SUM)) for _ in range(16)))

        answers = asyncio.run(ask())
        self.assertEqual({answer.choices[0].message.content for answer in answers}, {"42"})

    def test_what_is_refused_is_its_own_error(self):
        with self.assertRaises(litellm.NotFoundError) as refused:
            litellm.completion(messages=self.messages(SUM), **self.options(model="openai/nobody"))
        self.assertIn("ember", str(refused.exception), "it says what there is")
        with self.assertRaises(litellm.BadRequestError):
            litellm.completion(messages=self.messages(SUM), **self.options(max_tokens=-1))

    def test_anthropic_s_form(self):
        options = self.options(model="anthropic/ember", api_base=BASE_URL, max_tokens=20)
        answer = litellm.completion(messages=self.messages(SUM), **options)
        self.assertEqual(answer.choices[0].message.content, "42")


class LangChain(unittest.TestCase):
    def setUp(self):
        self.chat = ChatOpenAI(base_url=f"{BASE_URL}/v1", api_key="unused", model="ember", temperature=0, max_retries=0, timeout=60)

    def test_a_question_is_answered_and_counted(self):
        answer = self.chat.invoke([HumanMessage(SUM)])
        self.assertEqual(answer.content, "42")
        counts = answer.usage_metadata
        self.assertEqual(counts["total_tokens"], counts["input_tokens"] + counts["output_tokens"])

    def test_a_chain_streams_what_it_says_at_once(self):
        prompt = ChatPromptTemplate.from_messages([("system", "You are {what}."), ("human", "Hello!")])
        chain = prompt | self.chat
        whole = chain.invoke({"what": "brief"}).content
        self.assertEqual("".join(chunk.content for chunk in chain.stream({"what": "brief"})), whole)

    def test_a_batch(self):
        answers = self.chat.batch([[HumanMessage(SUM)]] * 8)
        self.assertEqual({answer.content for answer in answers}, {"42"})

    def test_an_answer_has_the_asked_shape(self):
        for method in ["json_schema", "function_calling"]:
            with self.subTest(method):
                person = self.chat.with_structured_output(Person, method=method).invoke([HumanMessage("Ada is 36.")])
                self.assertIsInstance(person, Person)

    def test_a_tool_is_called(self):
        message = self.chat.bind_tools([Person], tool_choice="required").invoke([HumanMessage("Ada is 36.")])
        self.assertEqual([call["name"] for call in message.tool_calls], ["Person"])
        Person.model_validate(message.tool_calls[0]["args"])

    def test_a_text_is_completed(self):
        complete = OpenAI(base_url=f"{BASE_URL}/v1", api_key="unused", model="ember", temperature=0, max_tokens=8, max_retries=0)
        self.assertTrue(complete.invoke("Once upon a time"))

    def test_the_responses_form(self):
        chat = ChatOpenAI(base_url=f"{BASE_URL}/v1", api_key="unused", model="ember", temperature=0, max_retries=0, use_responses_api=True)
        self.assertEqual(chat.invoke([HumanMessage(SUM)]).text, "42")

    def test_anthropic_s_form(self):
        chat = ChatAnthropic(base_url=BASE_URL, api_key="unused", model="ember", temperature=0, max_tokens=20, max_retries=0)
        answer = chat.invoke([SystemMessage("You are brief."), HumanMessage(SUM)])
        whole = answer.content
        chunks = chat.stream([SystemMessage("You are brief."), HumanMessage(SUM)])
        self.assertEqual("".join(chunk.text for chunk in chunks), whole)


if __name__ == "__main__":
    unittest.main()
