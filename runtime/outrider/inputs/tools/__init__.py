"""Calls of functions in an answer's text, in the formats that chat templates use.

form = ToolFormat.of_template(tokenizer.chat_template)      # or engine.tool_format
content, calls = form.parse(result.text)
stream = form.stream()                                      # the same, piece by piece
for piece in stream.push(chunk.text): ...                   # texts, and ToolCallDelta
"""

from outrider.inputs.tools.formats import ToolFormat
from outrider.inputs.tools.grammar import source_of_calls
from outrider.inputs.tools.markers import dropped_markers, keep_markers
from outrider.inputs.tools.shapes import ToolCall
from outrider.inputs.tools.stream import ToolCallDelta, ToolCallStream

__all__ = [
    "ToolCall",
    "ToolCallDelta",
    "ToolCallStream",
    "ToolFormat",
    "dropped_markers",
    "keep_markers",
    "source_of_calls",
]
