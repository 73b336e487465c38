"""The bodies of requests and responses, as OpenAI's API has them, with llama-server's and our own additions."""
