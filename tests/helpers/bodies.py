"""Bodies of requests to the server, in which each part is there."""

from serving import SCHEMA

FUNCTION = {"name": "f", "description": "d", "parameters": SCHEMA, "strict": True}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"place": 1}'}}
CHAT = {
    "model": "tiny",
    "max_tokens": 1,
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "Hi"}], "name": "n"},
        {"role": "assistant", "content": "a", "tool_calls": [CALL]},
        {"role": "tool", "content": "b", "tool_call_id": "1"},
    ],
    "tools": [{"type": "function", "function": FUNCTION}],
    "tool_choice": "auto",
    "metadata": {"a": "b"},
    "stop": ["x"],
    "logit_bias": {"1": 1},
    "references": ["r"],
    "prediction": {"type": "content", "content": "p"},
}
FORMAT = {
    "model": "tiny",
    "max_tokens": 1,
    "messages": [{"role": "user", "content": "Hi"}],
    "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}},
}
RESPONSE = {
    "model": "tiny",
    "max_output_tokens": 1,
    "instructions": "i",
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "o"},
    ],
    "tools": [{"type": "function"} | FUNCTION],
    "text": {"format": {"type": "text"}},
}
COMPLETION = {"model": "tiny", "max_tokens": 1, "prompt": ["Hi"], "regex": "a+"}
BODIES = [
    ("chat/completions", CHAT),
    ("chat/completions", FORMAT),
    ("responses", RESPONSE),
    ("completions", COMPLETION),
]
