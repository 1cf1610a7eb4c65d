"""The official Anthropic client against a running agent that serves ember.

STOKER_BASE_URL names the agent, e.g. http://127.0.0.1:8000. Every test is one thing an application does with the
client; none looks at anything the client does not show.
"""

import os
import unittest

import anthropic

BASE_URL = os.environ["STOKER_BASE_URL"]
MODEL = "ember"
# The newest client has no argument for it, the API has.
GREEDY = {"temperature": 0}
WEATHER = {"name": "get_weather", "description": "Weather of a city",
           "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}


def user(content) -> list[dict]:
    return [{"role": "user", "content": content}]


def prompt_tokens(usage):
    """Each is in one of three counts."""
    return usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens


class Messages(unittest.TestCase):
    def setUp(self):
        self.client = anthropic.Anthropic(base_url=BASE_URL, api_key="unused", max_retries=0, timeout=60)

    def ask(self, messages, **options):
        return self.client.messages.create(model=MODEL, max_tokens=100, messages=messages, extra_body=GREEDY, **options)

    def test_a_question_is_answered(self):
        answer = self.ask(user("What is 12 + 30?"))
        self.assertEqual(answer.content[0].text, "42")
        self.assertEqual((answer.stop_reason, answer.role), ("end_turn", "assistant"))
        self.assertGreater(prompt_tokens(answer.usage), 5)

    def test_a_stream_adds_up_to_the_whole_answer(self):
        whole = self.ask(user("Hello!")).content[0].text
        with self.client.messages.stream(model=MODEL, max_tokens=100, extra_body=GREEDY, messages=user("Hello!")) as stream:
            text = "".join(stream.text_stream)
            final = stream.get_final_message()
        self.assertEqual(text, whole)
        self.assertEqual((final.content[0].text, final.stop_reason), (whole, "end_turn"))
        self.assertGreater(final.usage.output_tokens, 1)

    def test_a_tool_is_called_and_its_result_answered(self):
        question = user("What is the weather in Oslo?")
        answer = self.ask(question, tools=[WEATHER])
        self.assertEqual(answer.stop_reason, "tool_use")
        call = next(block for block in answer.content if block.type == "tool_use")
        self.assertEqual((call.name, call.input), ("get_weather", {"city": "Oslo"}))
        result = user([{"type": "tool_result", "tool_use_id": call.id, "content": '{"temperature": 7}'}])
        messages = [*question, {"role": "assistant", "content": answer.content}, *result]
        self.assertIn("7", self.ask(messages, tools=[WEATHER]).content[0].text)

    def test_a_streamed_tool_call_has_its_input(self):
        with self.client.messages.stream(model=MODEL, max_tokens=100, extra_body=GREEDY, tools=[WEATHER],
                                         messages=user("What is the weather in Oslo?")) as stream:
            final = stream.get_final_message()
        call = next(block for block in final.content if block.type == "tool_use")
        self.assertEqual((call.input, final.stop_reason), ({"city": "Oslo"}, "tool_use"))

    def test_tokens_are_counted_as_they_are_used(self):
        messages = user("What is 12 + 30?")
        counted = self.client.messages.count_tokens(model=MODEL, messages=messages).input_tokens
        usage = self.ask(messages).usage
        self.assertEqual(counted, prompt_tokens(usage))

    def test_a_mistake_is_the_exception_that_clients_expect(self):
        with self.assertRaises(anthropic.NotFoundError):
            self.client.messages.create(model="claude", max_tokens=5, messages=user("Hello!"))
        with self.assertRaises(anthropic.BadRequestError) as caught:
            self.ask(user([{"type": "image", "source": {"type": "url", "url": "http://127.0.0.1/x.png"}}]))
        self.assertIn("messages[0].content[0]", str(caught.exception))


if __name__ == "__main__":
    unittest.main()
