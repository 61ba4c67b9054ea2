"""The same cluster as containers and as child processes."""
