"""Vectors that may never change: another process, version or machine must compute the same hashes."""

from dataclasses import replace

import pytest

from octavo.hashing import ChainRoot, block_hashes, digest_of, hit_candidates, next_hash, token_bytes
from octavo.ids import BlockHash

ROOT = ChainRoot(
    model_digest=bytes(range(32)),
    tokenizer_digest=bytes(range(32, 64)),
    dtype="float32",
    kv_dtype="bfloat16",
    block_size=16,
)
OTHER_FIELDS = {
    "model_digest": b"\x01" * 32,
    "tokenizer_digest": b"\x02" * 32,
    "dtype": "bfloat16",
    "kv_dtype": "float8_e4m3fn",
    "block_size": 32,
    "adapter_digest": b"\x03" * 32,
    "media": ((5, b"\x04" * 32),),
    "salt": b"\x05" * 32,
    "cache_epoch": 1,
}


def test_the_root_of_a_plain_pool_is_fixed():
    assert ROOT.hash().hex() == "d4b516f668915e4ac5c3fc66b5700dc599b9f18ddad34dc51e7c8fcd6f2ade36"


def test_the_root_with_every_field_set_is_fixed():
    root = replace(
        ROOT,
        adapter_digest=b"a" * 32,
        media=((5, b"b" * 32), (9, b"c" * 32)),
        salt=b"d" * 32,
        cache_epoch=7,
    )
    assert root.hash().hex() == "455c5930588360465d86260428a69f82cc2f8a6b83f68f0d67099f723dbb6945"


def test_the_chain_of_the_first_forty_tokens_is_fixed():
    assert [block_hash.hex() for block_hash in block_hashes(ROOT.hash(), range(40), 16)] == [
        "b82fb3f53732a88b1f25e8a2ae89289f5bad97cf3fd99147dbfaabc50d0fadc9",
        "e6f32f0a96c7ea4521995e28c94defb16b1e97f101123ddbaeead70149635f0c",
    ]


@pytest.mark.parametrize("field", OTHER_FIELDS)
def test_each_field_of_the_root_changes_the_hash(field):
    """S6: nothing that changes activations, or who may see them, is left out of the key."""
    assert replace(ROOT, **{field: OTHER_FIELDS[field]}).hash() != ROOT.hash()


def test_the_table_of_fields_is_complete():
    assert set(OTHER_FIELDS) == set(ChainRoot.__slots__)


def test_the_place_of_an_image_changes_the_hash():
    """S6: the same image two tokens later is another prompt."""
    assert replace(ROOT, media=((5, b"i" * 32),)).hash() != replace(ROOT, media=((7, b"i" * 32),)).hash()


@pytest.mark.parametrize(
    ("one", "other"),
    [((b"ab", b"c"), (b"a", b"bc")), ((b"a", b""), (b"", b"a")), ((b"",), ()), ((b"a",), (b"a", b""))],
)
def test_two_lists_of_fields_never_run_together(one, other):
    assert digest_of(*one) != digest_of(*other)


def test_a_block_hash_depends_on_everything_before_it():
    same_end = [1, 2, 3, 4], [9, 2, 3, 4]
    first, second = (block_hashes(ROOT.hash(), [*start, 5, 6, 7, 8], 4) for start in same_end)
    assert first[1] != second[1]


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("blocks", [1, 2, 3])
def test_only_full_blocks_have_a_hash(blocks, block_size):
    """Boundary lengths kS-1, kS, kS+1."""
    length = blocks * block_size
    counts = [len(block_hashes(ROOT.hash(), range(n), block_size)) for n in (length - 1, length, length + 1)]
    assert counts == [blocks - 1, blocks, blocks + (block_size == 1)]


def test_a_chain_is_made_of_single_steps():
    tokens = [7, 8, 9, 10]
    first = next_hash(ROOT.hash(), token_bytes(tokens[:2]))
    assert block_hashes(ROOT.hash(), tokens, 2) == [first, next_hash(first, token_bytes(tokens[2:]))]


def test_tokens_are_little_endian_words():
    assert token_bytes([1, 0x01020304]) == bytes([1, 0, 0, 0, 4, 3, 2, 1])


@pytest.mark.parametrize("token", [-1, 1 << 32])
def test_what_is_no_word_is_refused(token):
    with pytest.raises(OverflowError):
        token_bytes([token])


@pytest.mark.parametrize(
    ("prompt", "blocks"),
    [(0, 0), (1, 0), (15, 0), (16, 0), (17, 1), (31, 1), (32, 1), (33, 2), (48, 2), (49, 3)],
)
def test_a_hit_leaves_a_token_to_compute(prompt, blocks):
    """S5: a prompt of exactly kB tokens may take k-1 blocks."""
    assert hit_candidates(prompt, 16) == blocks


def test_a_hash_is_plain_bytes():
    assert isinstance(ROOT.hash(), bytes)
    assert len(BlockHash(ROOT.hash())) == 32
