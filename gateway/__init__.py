"""The front door: admission, routing, streaming text."""
