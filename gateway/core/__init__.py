"""Pure decisions of the gateway: who is let in, and where a request goes."""
