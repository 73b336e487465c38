"""`outrider bench --conversations`: the prefix cache in conversations, and its memory."""
