"""A model's reasoning in an answer's text, apart from the answer itself.

form = ReasoningFormat.of_template(tokenizer.chat_template)      # or engine.reasoning_format
reasoning, content = form.parse(result.text, opened=result.thinks)
stream = form.stream(opened=False)                               # the same, piece by piece
for piece in stream.push(chunk.text): ...                        # Thought, and texts
"""

from outrider.inputs.reasoning.formats import ReasoningFormat, split
from outrider.inputs.reasoning.stream import Thought

__all__ = ["ReasoningFormat", "Thought", "split"]
