"""Where `octavo up` serves, and where the other verbs look, when nobody says."""

PORT = 8500
"""Of the gateway; OpenAI's API is at the next one."""

MANAGER_PORT = 7100
"""Of the cache manager: where every service looks for one."""

ADDRESS = f"127.0.0.1:{PORT}"
CACHE_MANAGER = f"127.0.0.1:{MANAGER_PORT}"
