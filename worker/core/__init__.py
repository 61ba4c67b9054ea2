"""Pure decisions of the worker: what runs when, and when it stops."""
