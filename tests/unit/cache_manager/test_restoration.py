"""Books that are opened again from what a worker was told, and inventories that open none."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache_manager.core.changes import Published
from cache_manager.core.ledger import Ledger
from cache_manager.core.restoration import Restoration
from octavo.block_record import NO_BLOCK, read_records, record_packer
from octavo.errors import InvalidRequest, PoolExhausted
from octavo.ids import NOBODY, BlockHash, BlockId, Epoch, SequenceId
from octavo.records.attend import HeldSequence, Inventory
from octavo.records.fleet import PoolSpec
from tests.support.books import EPOCH, append, exchange, open_ledger, pool_spec, tokens_of
from tests.support.mirror import Mirror

SPEC = pool_spec()
ROOT = SPEC.chain_root().hash()


def restore(inventory: Sequence[Inventory], spec: PoolSpec = SPEC, **how: Any) -> Ledger:
    restoration = Restoration(spec, **how)
    for part in inventory:
        restoration.add(part)
    for _ in restoration.steps():
        pass
    ledger = restoration.open(Epoch(2))
    ledger.check()
    return ledger


class Worker:
    """Books and the mirror of them."""

    def __init__(self, ledger: Ledger | None = None) -> None:
        self.ledger = ledger or open_ledger()
        self.mirror = Mirror(self.ledger.spec.block_size)
        self.step = 0

    def tell(self, **parts: Any) -> None:
        self.step += 1
        told = exchange(step=self.step, **parts)._replace(epoch=self.ledger.epoch)
        self.mirror.does(told)
        self.mirror.hears(told, self.ledger.apply(told))

    def compute(self, sequence: int, tokens: list[int]) -> None:
        self.tell(attaches={sequence: tokens}, reserves=[(sequence, len(tokens))])
        self.tell(commits={sequence: tokens[self.ledger.length(SequenceId(sequence)) :]})

    def restored(self, parts: int = 1) -> Ledger:
        return restore(self.mirror.inventory(parts), self.ledger.spec)


def assert_same_books(new: Ledger, old: Ledger, sequences: Sequence[int]) -> None:
    for sequence in map(SequenceId, sequences):
        assert (new.blocks(sequence), new.length(sequence)) == (old.blocks(sequence), old.length(sequence))
    assert sorted(new.published()) == sorted(old.published())
    assert replace(new.audit(), epoch=EPOCH) == old.audit()


@pytest.mark.parametrize("parts", [1, 3])
def test_books_are_as_they_were(parts):
    """S17"""
    worker = Worker()
    worker.compute(1, tokens_of(0, 10))
    worker.compute(2, [*tokens_of(0, 8), 500])
    worker.compute(3, tokens_of(100, 9))
    worker.tell(forks=[(1, (4, 5), 1)], reserves=[(1, 1)])
    worker.tell(finished=[3])
    new = worker.restored(parts)
    assert_same_books(new, worker.ledger, [1, 2, 4, 5])
    assert new.attach(SequenceId(9), [*tokens_of(100, 8), 1]) == 8


def test_an_empty_inventory_opens_an_empty_pool():
    ledger = restore([Inventory()])
    assert list(ledger.free_list()) == list(range(SPEC.num_blocks))


def test_blocks_are_evicted_in_the_order_of_the_inventory():
    worker = Worker()
    for sequence, start in ((1, 0), (2, 100), (3, 200)):
        worker.compute(sequence, tokens_of(start, 8))
    worker.tell(finished=[2])
    worker.tell(finished=[1])
    worker.tell(finished=[3])
    assert list(worker.restored().free_list()) == list(worker.ledger.free_list())


def test_a_chain_dies_from_its_tail_whatever_the_order_of_the_inventory():
    worker = Worker()
    worker.compute(1, tokens_of(0, 12))
    worker.tell(finished=[1])
    (told,) = worker.mirror.inventory()
    records = worker.mirror.records
    for order in (sorted(records), sorted(records, reverse=True)):
        ledger = restore([replace(told, published=b"".join(records[block] for block in order))])
        assert list(ledger.free_list())[-3:] == [2, 1, 0]


def test_what_the_worker_did_not_know_as_published_is_published():
    """The grant that said so did not arrive."""
    worker = Worker()
    worker.compute(1, tokens_of(0, 9))
    (told,) = worker.mirror.inventory()
    ledger = restore([replace(told, published=b"")])
    assert sorted(ledger.published()) == sorted(worker.ledger.published())
    assert ledger.take_changes() == (Published(tuple(ledger.published())),)
    grant = ledger.apply(exchange()._replace(epoch=ledger.epoch))
    assert {block for block, *_ in read_records("", grant.published, SPEC.block_size)} == {0, 1}
    assert grant.tables == ()


def test_equal_blocks_that_nobody_knew_as_published_become_one():
    """Two sequences each hold their own copy; the worker hears in the first grant which is left."""
    told = [
        held(sequence=1, tokens=tokens_of(0, 5), table=(0, 1)),
        held(sequence=2, tokens=tokens_of(0, 6), table=(2, 3)),
    ]
    ledger = restore([Inventory(sequences=tuple(told))])
    grant = ledger.apply(exchange()._replace(epoch=ledger.epoch))
    assert [(change.sequence, change.start, change.blocks) for change in grant.tables] == [(2, 0, (0, 3))]
    assert ledger.audit().held_blocks == 3


def test_forks_that_share_what_nobody_knew_as_published_go_on_sharing_it():
    told = [held(sequence=sequence, tokens=tokens_of(0, 9), table=(4, 5, 6), room=9) for sequence in (1, 2)]
    ledger = restore([Inventory(sequences=tuple(told))])
    assert ledger.blocks(SequenceId(1)) == ledger.blocks(SequenceId(2)) == (4, 5, 6)
    assert len(ledger.published()) == 2


def test_a_prompt_that_is_being_computed_is_waited_for_again():
    worker = Worker()
    prompt = tokens_of(0, 12)
    worker.tell(attaches={1: prompt}, reserves=[(1, 6)])
    worker.tell(commits={1: prompt[:6]})
    ledger = worker.restored()
    grant = ledger.apply(exchange(attaches={2: [*prompt, 77]})._replace(epoch=ledger.epoch))
    assert grant.waiting == ((2, 1),)


def test_a_truncated_sequence_keeps_the_published_block_that_it_ends_in():
    worker = Worker()
    worker.compute(1, tokens_of(0, 8))
    worker.tell(truncations={1: 6})
    ledger = worker.restored()
    ledger.reserve(SequenceId(1), 1)
    ledger.check()
    assert ledger.stats().copied_blocks == 1


def test_others_get_their_turn_while_books_are_opened():
    """A step is about a millisecond, however much there is."""
    spec = pool_spec(num_blocks=2000, max_model_tokens=8000)
    restoration, pack = Restoration(spec), record_packer(spec.block_size)
    records = b"".join(
        pack(BlockId(block), BlockId(block - 1) if block else NO_BLOCK, ROOT, bytes(16), NOBODY, 0)
        for block in range(2000)
    )
    restoration.add(Inventory(records))
    assert sum(1 for _ in restoration.steps()) >= 7
    restoration.open(EPOCH).check()


# ---- what contradicts itself ----------------------------------------------------------------------------------


def record(block: int, parent: int = NO_BLOCK, first_token: int = 0, root: BlockHash = ROOT) -> bytes:
    tokens = b"".join(token.to_bytes(4, "little") for token in range(first_token, first_token + SPEC.block_size))
    return record_packer(SPEC.block_size)(BlockId(block), BlockId(parent), root, tokens, NOBODY, 0)


def held(*, sequence: int = 1, tokens: Sequence[int] = (), table: Sequence[int] = (), **fields: Any) -> HeldSequence:
    fields.setdefault("room", len(table) * SPEC.block_size)
    return HeldSequence(
        sequence=SequenceId(sequence),
        root=fields.pop("root", ROOT),
        tokens=tuple(tokens),
        table=tuple(map(BlockId, table)),
        **fields,
    )


CHAIN = record(0) + record(1, 0, 4)
PUBLISHED = "inventory.published"
SEQUENCE_1 = "inventory.sequences: sequence 1"
CONTRADICTIONS: dict[str, tuple[Inventory, str]] = {
    "half a record": (Inventory(record(0)[:-1]), f"{PUBLISHED}: 67 bytes, wanted a multiple of 68"),
    "no such block": (Inventory(record(16)), f"{PUBLISHED}: block 16, num_blocks is 16"),
    "no such parent": (Inventory(record(0, 16)), f"{PUBLISHED}: block 0 follows block 16, which is not published"),
    "twice": (Inventory(record(3) + record(3)), f"{PUBLISHED}: block 3 twice, wanted once"),
    "no token": (Inventory(record(0, first_token=998)), f"{PUBLISHED}: token id 1000, vocab_size is 1000"),
    "a hole": (Inventory(record(1, 0, 4)), f"{PUBLISHED}: block 1 follows block 0, which is not published"),
    "a ring": (Inventory(record(0, 1) + record(1, 0, 4)), f"{PUBLISHED}: block 0 follows block 1, which is not"),
    "one content in two blocks": (Inventory(record(0) + record(1)), f"{PUBLISHED}: block 0 holds what block 1 holds"),
    "a sequence twice": (Inventory(b"", (held(), held())), f"{SEQUENCE_1} twice, wanted once"),
    "more tokens than room": (
        Inventory(b"", (held(tokens=(1, 2, 3), table=(0,), room=2),)),
        f"{SEQUENCE_1} has 3 tokens, room 2, blocks for 4",
    ),
    "more room than blocks": (
        Inventory(b"", (held(tokens=(1, 2, 3), table=(0,), room=5),)),
        f"{SEQUENCE_1} has 3 tokens, room 5, blocks for 4",
    ),
    "a table with no such block": (Inventory(b"", (held(table=(16,)),)), f"{SEQUENCE_1}: block 16, num_blocks is 16"),
    "a block twice in a table": (Inventory(b"", (held(table=(2, 2)),)), f"{SEQUENCE_1} names 2 blocks, 1 different"),
    "too long": (
        Inventory(b"", (held(ahead=[1] * 65),)),
        f"{SEQUENCE_1} knows 65 tokens, 64 (capacity_tokens) fit",
    ),
    "a written stranger": (
        Inventory(b"", (held(tokens=(1000,), table=(0,)),)),
        f"{SEQUENCE_1}: token id 1000, vocab_size is 1000",
    ),
    "a stranger ahead": (Inventory(b"", (held(ahead=(1000,)),)), f"{SEQUENCE_1}: token id 1000, vocab_size is 1000"),
    "other tokens than published": (
        Inventory(CHAIN, (held(tokens=[0, 1, 2, 3, 9, 9, 9, 9], table=(0, 1)),)),
        f"{SEQUENCE_1} has other tokens in block 1, from position 4 on",
    ),
    "another salt than published": (
        Inventory(CHAIN, (held(root=BlockHash(bytes(32)), tokens=tokens_of(0, 4), table=(0,)),)),
        f"{SEQUENCE_1} has other tokens in block 0, from position 0 on",
    ),
    "other tokens than a sequence that shares the block": (
        Inventory(
            b"",
            (
                held(sequence=2, tokens=(5, 6), table=(7,), room=2),
                held(sequence=1, tokens=(5, 8), table=(7,), room=2),
            ),
        ),
        f"{SEQUENCE_1} has other tokens in block 7, from position 0 on",
    ),
    "a published block after another than its own": (
        Inventory(CHAIN, (held(tokens=tokens_of(0, 8), table=(9, 1)),)),
        f"{SEQUENCE_1} has other tokens in block 1, from position 4 on",
    ),
    "a published block to come": (
        Inventory(CHAIN, (held(tokens=tokens_of(5, 4), table=(9, 0), room=4),)),
        f"{SEQUENCE_1} may write block 0, which is published",
    ),
    "a published block to write in": (
        Inventory(CHAIN, (held(tokens=tokens_of(0, 6), table=(0, 1)),)),
        f"{SEQUENCE_1} may write block 1, which is published",
    ),
    "a shared block to write in": (
        Inventory(b"", (held(tokens=(5, 6), table=(7,), room=4), held(sequence=2, tokens=(5, 6), table=(7,), room=2))),
        f"{SEQUENCE_1} may write block 7, which 2 tables name, wanted 1",
    ),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_an_inventory_that_contradicts_itself_opens_no_books(name):
    inventory, problem = CONTRADICTIONS[name]
    with pytest.raises(InvalidRequest) as refusal:
        restore([inventory])
    assert str(refusal.value).startswith(problem)


@pytest.mark.parametrize(
    "name", ["no such block", "more tokens than room", "a table with no such block", "too long", "a sequence twice"]
)
def test_what_cannot_be_in_the_pool_is_not_kept_until_the_end_of_the_inventory(name):
    """So what is kept of one that never ends is no more than a pool can hold."""
    inventory, problem = CONTRADICTIONS[name]
    with pytest.raises(InvalidRequest) as refusal:
        Restoration(SPEC).add(inventory)
    assert str(refusal.value).startswith(problem)


def test_an_inventory_has_only_so_many_sequences(monkeypatch):
    monkeypatch.setattr("cache_manager.core.restoration.MAX_SEQUENCES", 2)
    restoration = Restoration(SPEC)
    restoration.add(Inventory(b"", (held(sequence=1), held(sequence=2))))
    with pytest.raises(InvalidRequest, match=r"^inventory\.sequences: sequence 3 is one more than 2$"):
        restoration.add(Inventory(b"", (held(sequence=3),)))


def test_a_pool_that_cannot_be_has_no_inventory():
    with pytest.raises(InvalidRequest, match="num_blocks: 0"):
        Restoration(pool_spec(num_blocks=0))


def busy_worker(dice: Random) -> Worker:
    """One whose sequences share, fork, are cut and end."""
    worker = Worker()
    for sequence in range(1, 7):
        worker.compute(sequence, [*tokens_of(0, 4 * dice.randrange(3)), *dice.choices(range(9), k=dice.randint(1, 6))])
    worker.tell(forks=[(1, (7, 8), dice.randrange(2))], truncations={2: dice.randrange(2)}, finished=[3])
    worker.tell(attaches={9: tokens_of(0, 14)}, reserves=[(9, 2), (4, 1)])
    return worker


def damaged(inventory: Inventory, dice: Random) -> Inventory:
    """The same with something else in one place."""
    number = dice.choice([0, 1, 2, 3, 15, 16, 2**32 - 1])
    if dice.random() < 0.5:
        raw, at = bytearray(inventory.published), 4 * dice.randrange(len(inventory.published) // 4)
        raw[at : at + 4] = number.to_bytes(4, "little")
        return replace(inventory, published=bytes(raw))
    sequences = list(inventory.sequences)
    which = dice.randrange(len(sequences))
    chosen = sequences[which]
    field = dice.choice(["sequence", "root", "tokens", "table", "room", "ahead"])
    match field:
        case "root":
            value: Any = BlockHash(bytes(32))
        case "tokens" | "table" | "ahead":
            value = list(getattr(chosen, field))
            value.insert(dice.randint(0, len(value)), number)
            del value[dice.randrange(len(value))]
            value = tuple(value)
        case _:
            value = number
    sequences[which] = replace(chosen, **{field: value})
    return replace(inventory, sequences=tuple(sequences))


@given(st.integers(0, 2**32))
def test_a_damaged_inventory_is_refused_or_opens_books_that_balance(seed):
    """`restore` checks them; then all sequences go on and end."""
    dice = Random(seed)
    (inventory,) = busy_worker(dice).mirror.inventory()
    for _ in range(dice.randint(1, 3)):
        inventory = damaged(inventory, dice)
    try:
        ledger = restore([inventory])
    except InvalidRequest:
        return
    for held in inventory.sequences:
        with suppress(PoolExhausted):
            append(ledger, held.sequence, [7])
        ledger.check()
    ledger.apply(exchange(finished=[held.sequence for held in inventory.sequences])._replace(epoch=ledger.epoch))
    ledger.check()
    assert ledger.audit().held_blocks == 0
