"""Calls of functions in an answer's text: what apps import of `outrider.inputs.tools`."""

from outrider.inputs.tools import ToolCall, ToolCallDelta, ToolCallStream, ToolFormat

__all__ = ["ToolCall", "ToolCallDelta", "ToolCallStream", "ToolFormat"]
