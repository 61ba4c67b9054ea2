"""A pytest plugin: refuses to run where the manager's books are not the compiled ones."""

import pytest

from cache_manager.core.ledger import is_compiled


def pytest_collection_finish() -> None:
    if not is_compiled():
        raise pytest.UsageError("the cache manager's books are not compiled")
