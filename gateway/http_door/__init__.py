"""The HTTP front door: OpenAI's API, as its clients and load generators speak it."""
