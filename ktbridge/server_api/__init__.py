"""Servers of OpenAI's API: their URLs, the names of what they serve, and the client that asks them."""
