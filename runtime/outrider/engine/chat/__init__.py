"""Conversations: turns that keep the tokens that were generated."""

from outrider.engine.chat.chat import Chat
from outrider.engine.chat.turn import ChatTurn

__all__ = ["Chat", "ChatTurn"]
