"""Tools for chat templates that have none: their descriptions, calls and results as texts of the messages."""

# The beginning of a template, after which the messages have no tools. Hermes 2's tags, which many models have seen.
TOOL_PRELUDE = r"""
{%- set made = namespace(turns=[], listed='') -%}
{%- for tool in tools -%}{%- set made.listed = made.listed ~ (tool | tojson) ~ '\n' -%}{%- endfor -%}
{%- set told = 'You can call functions. These are described by JSON schemas, one a line:\n' ~ made.listed ~
    'To call one, answer with its name and its arguments in JSON between tags, such as:\n<tool_call>\n' ~
    '{"name": "the_name", "arguments": {"key": "value"}}\n</tool_call>\nYou are given its result then. ' ~
    'Answer in words where no function is needed.' -%}
{%- for message in messages -%}
    {%- set turn = message -%}
    {%- if message.tool_calls -%}
        {%- set written = namespace(text=message.content or '') -%}
        {%- for call in message.tool_calls -%}
            {%- set body = {'name': call.function.name, 'arguments': call.function.arguments} | tojson -%}
            {%- set written.text = written.text ~ ('\n' if written.text else '') ~
                '<tool_call>\n' ~ body ~ '\n</tool_call>' -%}
        {%- endfor -%}
        {%- set turn = {'role': 'assistant', 'content': written.text} -%}
    {%- elif message.role == 'tool' -%}
        {%- set turn = {'role': 'user', 'content': '<tool_response>\n' ~ message.content ~ '\n</tool_response>'} -%}
    {%- endif -%}
    {%- if made.turns and loop.previtem.role == 'tool' and turn.role == 'user' and turn.content is string -%}
        {%- set turn = {'role': 'user', 'content': made.turns[-1].content ~ '\n' ~ turn.content} -%}
        {%- set made.turns = made.turns[:-1] -%}
    {%- endif -%}
    {%- if loop.first and (message.role == 'system' or told_by_user) -%}
        {%- set is_text, is_system = message.content is string, message.role == 'system' -%}
        {%- set both = [message.content, told] if is_system else [told, message.content] -%}
        {%- set parts = [{'type': 'text', 'text': told}] + (message.content if not is_text else []) -%}
        {%- set turn = {'role': message.role, 'content': both | join('\n\n') if is_text else parts} -%}
    {%- elif loop.first -%}
        {%- set made.turns = [{'role': 'system', 'content': told}] -%}
    {%- endif -%}
    {%- set made.turns = made.turns + [turn] -%}
{%- endfor -%}
{%- set messages = made.turns -%}
{%- set tools = none -%}
"""
TOLD = "You can call functions."  # in the text, if the model is told of them
TOLD_BY_USER = "told_by_user"  # a variable: the descriptions begin the user's first message, not a system message
