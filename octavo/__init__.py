"""What all services share: names, values, errors, the wire. Imports no service."""
