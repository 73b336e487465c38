"""`outrider chat`: a conversation in the terminal.

`session` has the conversation and its settings, `commands` what /name does, `blocks`, `sources` and `views` show
answers, `answering` and `terminal` read lines. Only `terminal` needs prompt_toolkit.
"""

from outrider.cli.chat.command import chat

__all__ = ["chat"]
