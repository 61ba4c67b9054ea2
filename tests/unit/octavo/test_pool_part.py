import pytest

from octavo.pool_part import parse_pool_part


@pytest.mark.parametrize(
    ("text", "blocks"),
    [
        ("25%", 50),
        ("0%", 0),
        ("12.5 %", 25),
        ("100%", 200),
        ("4096", 4),
        ("8KiB", 8),
        ("8kB", 7),
        ("1.5 KiB", 1),
        ("1MiB", 200),
        ("3TB", 200),
    ],
)
def test_a_part_is_a_number_of_whole_blocks(text, blocks):
    assert parse_pool_part(text).blocks(num_blocks=200, block_bytes=1024) == blocks


def test_bytes_are_no_blocks_where_the_size_of_a_block_is_not_known():
    assert parse_pool_part("1MiB").blocks(num_blocks=200, block_bytes=0) == 0


@pytest.mark.parametrize("text", ["", "some", "-1%", "1e3", "5 miles", "%", "25%%"])
def test_what_is_no_part_is_shown(text):
    with pytest.raises(ValueError, match="as 25% or 512MiB, got"):
        parse_pool_part(text)


def test_more_than_all_is_refused():
    with pytest.raises(ValueError, match=r"wanted at most 100%, got '101%'"):
        parse_pool_part("101%")
