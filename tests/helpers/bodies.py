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
    ("chat/completions", CHAT), ("chat/completions", FORMAT), ("responses", RESPONSE), ("completions", COMPLETION),
]  # fmt: skip
MESSAGES = {  # Anthropic's
    "model": "tiny",
    "max_tokens": 1,
    "system": [{"type": "text", "text": "s"}],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {"place": 1}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "o"}]},
    ],
    "tools": [{"name": "f", "description": "d", "input_schema": SCHEMA}],
    "tool_choice": {"type": "auto"},
    "thinking": {"type": "enabled", "budget_tokens": 1},
    "stop_sequences": ["x"],
}
OLLAMA = {
    "model": "tiny",
    "stream": False,
    "messages": [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "a", "tool_calls": [{"function": {"name": "f", "arguments": {"place": 1}}}]},
        {"role": "tool", "content": "b", "tool_name": "f"},
    ],
    "tools": [{"type": "function", "function": FUNCTION}],
    "options": {"num_predict": 1, "temperature": 0, "stop": ["x"]},
}
OTHERS = [("messages", MESSAGES), ("/api/chat", OLLAMA)]
