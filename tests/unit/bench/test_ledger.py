"""The bench of the books measures what it says: a full pool, half of each prompt found."""

import json

from bench.ledger import BLOCK_SIZE, PROMPT_TOKENS, SHARED_TOKENS, ChapterBooks, Prompts, main


def test_every_figure_is_printed_as_one_json_object_a_line(capsys):
    main(["--quick"])
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["name"] for line in lines] == [
        "ledger_us_4k",
        "ledger_by_token_us_4k",
        "ledger_exchange_us_4k",
        "ledger_us_8k",
        "ledger_by_token_us_8k",
        "ledger_exchange_us_8k",
        "chapter_us_4k",
    ]
    assert all(line["unit"] == "us" and line["value"] > 0 for line in lines)


class TestTheChaptersBooks:
    """What the ledger is measured against does the same work."""

    def test_a_computed_prompt_is_found(self):
        books, prompts = ChapterBooks(256, BLOCK_SIZE), Prompts()
        prompt = prompts.next().tolist()
        assert books.attach(1, prompt) == 0
        self.compute(books, 1, prompt)
        other = prompt[:SHARED_TOKENS] + [0] * SHARED_TOKENS
        assert books.attach(2, other) == SHARED_TOKENS
        assert books.attach(3, prompt) == PROMPT_TOKENS - BLOCK_SIZE

    def test_the_oldest_prompt_makes_room(self):
        books = ChapterBooks(3, 4)
        for sequence, prompt in enumerate([[1] * 4, [2] * 4, [3] * 4, [4] * 4]):
            books.attach(sequence, prompt)
            self.compute(books, sequence, prompt)
            books.free(sequence)
        assert [books.attach(10 + token, [token] * 5) for token in (1, 2, 3, 4)] == [0, 4, 4, 4]

    @staticmethod
    def compute(books, sequence, prompt):
        books.reserve(sequence, len(prompt))
        books.commit(sequence, len(prompt))
        books.remember(sequence, prompt)
