"""`outrider bench --conversations`: what the cache does for conversations, and what it takes."""
