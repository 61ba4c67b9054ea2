"""What we measure: each bench runs as `python -m bench.NAME` and prints one JSON object a line."""
