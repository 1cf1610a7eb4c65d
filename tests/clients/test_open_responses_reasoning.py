"""Reasoning items by the Open Responses specification: a model that thinks, whole and streamed, and its thoughts sent back.

STOKER_BASE_URL names an agent whose template opens a thought in front of every answer. ember was never taught to think, so each request
bounds its thoughts and gives the answer behind them a form: what is tried is how both are told, not what they say. Nor how many tokens
thoughts were: they are counted between marks that are one token each, and ember's are several.
"""

import json
import unittest

import test_open_responses as specification
from openresponses_types import types
from test_open_responses import WEATHER, read

ANSWER = {"format": {"type": "json_schema", "name": "answer", "schema": {"enum": ["yes", "no"]}}}
THINKS = {"thinking_token_budget": 4, "text": ANSWER, "max_output_tokens": 60}


class Reasoning(unittest.TestCase):
    ask, follow = specification.Responses.ask, specification.Responses.follow
    follow_item = specification.Responses.follow_item

    def thought(self, response):
        """The response's only thought, which comes first."""
        kinds = [item["type"] for item in response["output"]]
        self.assertEqual((kinds[0], kinds.count("reasoning")), ("reasoning", 1))
        item = response["output"][0]
        read(types.ReasoningBody, item)
        self.assertEqual([part["type"] for part in item["content"]], ["reasoning_text"])
        return item["content"][0]["text"]

    def test_a_thought_is_an_item_in_front_of_the_message(self):
        response = self.ask("What is 12 + 30?", **THINKS)
        self.assertTrue(self.thought(response).strip())
        self.assertEqual([item["type"] for item in response["output"]], ["reasoning", "message"])
        self.assertEqual([item["status"] for item in response["output"]], ["completed"] * 2)
        self.assertIn(json.loads(response["output"][1]["content"][0]["text"]), ("yes", "no"))

    def test_a_thought_stands_in_front_of_a_call(self):
        options = {"thinking_token_budget": 4, "max_output_tokens": 60}
        response = self.ask("What is the weather in Oslo?", tools=[WEATHER], tool_choice="required", **options)
        self.assertTrue(self.thought(response).strip())
        self.assertEqual(response["output"][-1]["type"], "function_call")

    def test_an_answer_cut_off_in_a_thought_is_an_incomplete_thought(self):
        response = self.ask("Tell me a story about the sea.", max_output_tokens=3, min_tokens=3)
        self.assertEqual((response["status"], [item["type"] for item in response["output"]]), ("incomplete", ["reasoning"]))
        self.assertEqual(response["output"][0]["status"], "incomplete")
        self.assertTrue(self.thought(response).strip())

    def test_thoughts_go_back_into_the_prompt_as_items_and_by_the_id_of_what_was_kept(self):
        question = {"type": "message", "role": "user", "content": "What is 12 + 30?"}
        first, again = self.ask([question], **THINKS), {"type": "message", "role": "user", "content": "Sure?"}
        n_tokens = lambda response: response["usage"]["input_tokens"]
        sent_back = self.ask([question, *first["output"], again], **THINKS)
        kept = self.ask([again], previous_response_id=first["id"], **THINKS)
        self.assertEqual(n_tokens(sent_back), n_tokens(kept), "the items are what was kept")
        without = self.ask([question, *first["output"][1:], again], **THINKS)
        self.assertGreater(n_tokens(sent_back), n_tokens(without), "the model reads its thoughts")
        longer = json.loads(json.dumps(first["output"]))
        longer[0]["content"][0]["text"] *= 2
        self.assertGreater(n_tokens(self.ask([question, *longer, again], **THINKS)), n_tokens(sent_back))


if __name__ == "__main__":
    unittest.main()
