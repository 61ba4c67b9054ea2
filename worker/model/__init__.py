"""Models: loading them, and running them over paged pools."""
