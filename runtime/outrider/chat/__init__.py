"""Conversations: turns that keep the tokens that were generated."""

from outrider.chat.chat import Chat
from outrider.chat.turn import ChatTurn

__all__ = ["Chat", "ChatTurn"]
