"""Turns a conversation into tokens, piece by piece, and marks the tokens the model has to say.

Owns the special tokens and the training-side twin of `chat_template.jinja` (a test in `check.py` holds them equal:
the template is what a server runs, this one is fast and knows which pieces are answers).
"""

import json

BEGIN, END, TEXT_END, PAD = "<|begin|>", "<|end|>", "<|endoftext|>", "<|pad|>"
ROLES = {role: f"<|{role}|>" for role in ("system", "user", "assistant", "tool")}
CALL, CALL_END = "<tool_call>", "</tool_call>"
# Removed from text by `skip_special_tokens`. The marks of a tool call are tokens too but stay in the text, because
# whoever reads the answer needs them to find the call.
SPECIAL = [PAD, BEGIN, TEXT_END, END, *ROLES.values()]
MARKS = [CALL, CALL_END]

TOOLS_INTRO = "You may call these tools:"


def pieces(messages, tools=None, separators=(", ", ": ")):
    """The conversation as (text, is_answer) pieces; a role's token is a piece of its own.

    `separators` are those of the JSON of `tools`: template engines differ in the spaces they print, so both are trained.
    """
    yield BEGIN, False
    messages = list(messages)
    if tools:
        content = messages.pop(0)["content"] + "\n" if messages[0]["role"] == "system" else ""
        offers = (json.dumps(tool["function"], separators=separators, ensure_ascii=False) for tool in tools)
        yield ROLES["system"] + content + "\n".join([TOOLS_INTRO, *offers]) + END, False
    for message in messages:
        yield ROLES[message["role"]], False
        yield said(message) + END, message["role"] == "assistant"


def said(message):
    """The text of a message, its tool calls included."""
    calls = (
        CALL + json.dumps(call["function"], ensure_ascii=False) + CALL_END for call in message.get("tool_calls", ())
    )
    return (message.get("content") or "") + "".join(calls)
