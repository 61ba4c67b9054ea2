"""What is kept for the mirror, and for how long."""

import asyncio

from cache_manager.change_queue import MAX_ENDED, ChangeQueue
from cache_manager.core.changes import Cleared, Evicted, Forgotten, Published
from octavo.ids import BlockHash

A, B = BlockHash(b"a" * 32), BlockHash(b"b" * 32)
KEY_A, KEY_B = b"a" * 16, b"b" * 16


def opened(*indexes: str, max_pending: int = 100) -> ChangeQueue:
    """Of these indexes the reader has made the first copy."""
    queue = ChangeQueue(max_pending)
    for index in indexes:
        queue.open(index, lambda: [A])
    queue.take()
    return queue


def test_an_index_is_copied_when_it_begins() -> None:
    """Empty or not: until then readers do not call it whole."""
    queue = ChangeQueue()
    queue.open("w", list)
    assert queue.take().stale == ["w"]


def test_a_batch_holds_what_was_published_and_evicted() -> None:
    queue = opened("w")
    queue.put("w", [Published((A,)), Evicted((B,))])
    batch = queue.take()
    assert batch.updates == {"w": {KEY_A: True, KEY_B: False}}
    assert (batch.stale, batch.ended) == ([], [])


def test_an_index_that_was_forgotten_is_copied_anew_and_told_of_nothing_else() -> None:
    queue = opened("w")
    queue.put("w", [Published((A,)), Forgotten(), Published((B,))])
    batch = queue.take()
    assert (batch.updates, batch.stale) == ({}, ["w"])


def test_a_batch_is_given_once() -> None:
    queue = opened("w")
    queue.put("w", [Published((A,))])
    queue.take()
    assert queue.take().updates == {}


def test_the_last_word_on_a_block_counts() -> None:
    queue = opened("w")
    queue.put("w", [Published((A,)), Evicted((A,))])
    queue.put("w", [Published((B,)), Evicted((B,)), Published((B,))])
    assert queue.take().updates == {"w": {KEY_A: False, KEY_B: True}}


def test_what_is_not_open_has_nothing() -> None:
    queue = opened("w")
    queue.put("w", [Published((A,)), Cleared()])
    batch = queue.take()
    assert (batch.updates, batch.ended) == ({}, ["w"])
    assert list(queue.open_indexes()) == []
    assert list(queue.truth("w")) == []


def test_too_many_changes_make_an_index_stale_and_no_other() -> None:
    queue = opened("busy", "calm", max_pending=3)
    queue.put("busy", [Published((BlockHash(bytes([n]) * 32),)) for n in range(10)])
    queue.put("calm", [Published((A,))])
    batch = queue.take()
    assert batch.stale == ["busy"]
    assert batch.updates == {"calm": {KEY_A: True}}
    assert list(queue.truth("busy")) == [A]


def test_changes_of_a_stale_index_are_not_kept_until_it_is_taken() -> None:
    queue = opened("w")
    queue.spoil(["w"])
    queue.put("w", [Published((A,))])
    assert queue.take().updates == {}
    queue.put("w", [Published((B,))])
    assert queue.take().updates == {"w": {KEY_B: True}}


def test_only_a_living_index_can_be_spoilt() -> None:
    queue = opened("w")
    queue.put("w", [Cleared()])
    queue.spoil(["w", "never was"])
    assert queue.take().stale == []


def test_an_index_that_ends_while_it_is_stale_is_only_dropped() -> None:
    queue = opened("w")
    queue.spoil(["w"])
    queue.put("w", [Cleared()])
    batch = queue.take()
    assert (batch.stale, batch.ended) == ([], ["w"])


def test_the_longest_dead_are_forgotten_first() -> None:
    queue = ChangeQueue()
    queue.drop(f"w{number}" for number in range(MAX_ENDED + 2))
    ended = queue.take().ended
    assert len(ended) == MAX_ENDED
    assert ended[0] == "w2"


async def test_a_reader_waits_until_there_is_something() -> None:
    queue = opened("w")
    reader = asyncio.create_task(queue.wait())
    await asyncio.sleep(0)
    assert not reader.done()
    queue.put("w", [Published((A,))])
    await reader
