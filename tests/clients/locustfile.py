"""Users of a chat for Locust, who stream their answers from an endpoint that serves ember and read each to its end.

    locust --locustfile tests/clients/locustfile.py --host http://127.0.0.1:8000 --headless --users 8 --run-time 20s
"""

import json

from locust import FastHttpUser, between, task

CHAT = "/v1/chat/completions"


class ChatUser(FastHttpUser):
    wait_time = between(0.05, 0.2)

    def ask(self, **fields):
        messages = [{"role": "user", "content": "What is 12 + 30?"}]
        return {"model": "ember", "messages": messages, "temperature": 0, "max_tokens": 16, **fields}

    @task(3)
    def a_stream(self):
        with self.client.post(CHAT, json=self.ask(stream=True), stream=True, catch_response=True, name="stream") as answer:
            events = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
            chunks = [json.loads(event) for event in events[:-1]]
            text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks if chunk["choices"])
            if answer.status_code != 200 or events[-1:] != ["[DONE]"] or text != "42":
                answer.failure(f"{answer.status_code}: {answer.text!r}")

    @task(1)
    def a_whole_answer(self):
        with self.client.post(CHAT, json=self.ask(), catch_response=True, name="whole") as answer:
            if answer.status_code != 200 or answer.json()["choices"][0]["message"]["content"] != "42":
                answer.failure(f"{answer.status_code}: {answer.text!r}")
