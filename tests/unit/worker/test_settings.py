"""What a worker reads from its environment."""

import pytest
from pydantic import ValidationError

from worker.settings import WorkerSettings


@pytest.mark.parametrize(("text", "size"), [("256MiB", 256 << 20), ("1GB", 10**9), ("4096", 4096)])
def test_the_memory_of_the_pool_may_be_given_with_a_unit(monkeypatch: pytest.MonkeyPatch, text: str, size: int):
    monkeypatch.setenv("OCTAVO_KV_MEMORY", text)
    assert WorkerSettings().kv_memory == size


def test_unset_the_memory_of_the_pool_is_left_to_the_device(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("OCTAVO_KV_MEMORY", raising=False)
    assert WorkerSettings().kv_memory is None


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        ("KV_MEMORY", "0"),
        ("KV_MEMORY", "much"),
        ("GPU_MEMORY_SHARE", "1.1"),
        ("MAX_RUNNING", "0"),
        ("DTYPE", "int8"),
        ("CACHE_MANAGER", "here"),
    ],
)
def test_what_cannot_be_is_refused_by_its_name(monkeypatch: pytest.MonkeyPatch, variable: str, text: str):
    monkeypatch.setenv(f"OCTAVO_{variable}", text)
    with pytest.raises(ValidationError, match=variable.lower()):
        WorkerSettings()


@pytest.mark.parametrize(("text", "deterministic"), [("true", True), ("false", False)])
def test_a_worker_may_be_told_to_be_deterministic(monkeypatch: pytest.MonkeyPatch, text: str, deterministic: bool):
    monkeypatch.setenv("OCTAVO_DETERMINISTIC", text)
    assert WorkerSettings().deterministic is deterministic


def test_cache_managers_are_a_list(monkeypatch):
    monkeypatch.setenv("OCTAVO_CACHE_MANAGER", "here:1, there:2")
    assert WorkerSettings().cache_manager == ("here:1", "there:2")


@pytest.mark.parametrize("managers", ["here:1,", "here:1,there", "here:1 there:2,x"])
def test_a_list_with_what_is_no_address_is_refused(monkeypatch, managers):
    monkeypatch.setenv("OCTAVO_CACHE_MANAGER", managers)
    with pytest.raises(ValueError, match="wanted host:port"):
        WorkerSettings()


def test_a_deterministic_worker_does_not_guess(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OCTAVO_SPECULATE", "ngram")
    assert WorkerSettings().speculate == "ngram"
    monkeypatch.setenv("OCTAVO_DETERMINISTIC", "true")
    with pytest.raises(ValidationError, match="speculate is ngram and deterministic is true"):
        WorkerSettings()


def test_a_draft_model_is_named_where_one_guesses_and_nowhere_else(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OCTAVO_SPECULATE", "model")
    with pytest.raises(ValidationError, match="speculate is model and draft_model None"):
        WorkerSettings()
    monkeypatch.setenv("OCTAVO_DRAFT_MODEL", "smollm2")
    assert WorkerSettings().draft_model == "smollm2"
    monkeypatch.setenv("OCTAVO_SPECULATE", "ngram")
    with pytest.raises(ValidationError, match="speculate is ngram and draft_model smollm2"):
        WorkerSettings()
