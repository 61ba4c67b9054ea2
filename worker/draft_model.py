"""A small model that guesses what the served one will say.

It keeps a copy of each text that it guesses for, in a pool of its own: a few blocks that nobody shares, publishes or
tells of. A copy follows its text: what was guessed wrong is written over, and what was preempted is still there, as the
text is the same. Where no block is left, the copies of those who do not guess now make way; if that is not enough,
there is no guess. Nor is there one where the small model fails: a guess is worth no request.

It draws as the served model will: with the same temperature, penalties and seed, at the same position, hence with the
same random number. So where both models think alike, they say the same, and not only greedily.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from octavo.ids import BlockId, SequenceId
from octavo.models import ModelFolder
from worker.core.drafting import Wish
from worker.core.draws import draws_after
from worker.core.sequence import Sequence, blocks_for
from worker.core.step import Chunk, StepPlan, StepResult

log = logging.getLogger("octavo.worker")

CATCH_UP_TOKENS = 512
"""Of a text that is read in one go. A longer one is read over several steps, without a guess in between."""


def require_same_tokens(draft: ModelFolder, served: ModelFolder) -> None:
    """Raises ValueError unless both models cut texts into the same tokens."""
    if draft.tokenizer_digest != served.tokenizer_digest:
        raise ValueError(f"draft model {draft.name} has another tokenizer than {served.name}")
    if draft.vocab_size != served.vocab_size:
        raise ValueError(
            f"draft model {draft.name} has a vocabulary of {draft.vocab_size}, {served.name} of {served.vocab_size}"
        )


@dataclass(slots=True)
class _Copy:
    """A text as it lies in the pool."""

    table: list[BlockId] = field(default_factory=list[BlockId])
    written: list[int] = field(default_factory=list[int])
    """Its tokens, perhaps with guesses that have turned out wrong at the end."""
    sure: int = 0
    """How many of them were no guesses."""

    def follow(self, tokens: list[int]) -> None:
        """Keep what is as the text has become, but for the newest token, which is to be computed."""
        end = min(self.sure, len(tokens) - 1)
        while end < min(len(self.written), len(tokens) - 1) and self.written[end] == tokens[end]:
            end += 1
        del self.written[end:]
        self.sure = end


class DraftModel:
    """`worker.core.drafting.Source` from a model.

    Invariant: every block is free or in the table of one copy.
    """

    def __init__(
        self,
        execute: Callable[[StepPlan], StepResult],
        *,
        num_blocks: int,
        block_size: int,
        max_model_tokens: int,
    ) -> None:
        """Take a runner's `execute`, and all blocks of its pool."""
        self._execute = execute
        self._block_size = block_size
        self._max_model_tokens = max_model_tokens
        self._free = [BlockId(block) for block in range(num_blocks)]
        self._copies: dict[Sequence, _Copy] = {}
        """Those that were used last come last."""

    def guess(self, wishes: list[Wish]) -> dict[Sequence, tuple[int, ...]]:
        """See Source."""
        try:
            return self._guess(wishes)
        except Exception:  # whatever a model may raise
            log.exception("draft_failed", extra={"sequences": len(wishes)})
            for sequence in list(self._copies):
                self.forget(sequence)
            return {}

    def _guess(self, wishes: list[Wish]) -> dict[Sequence, tuple[int, ...]]:
        """Draw by draw, all texts together."""
        guesses: dict[Sequence, tuple[int, ...]] = {
            wish.sequence: () for wish in wishes if self._has_place(wish, wishes)
        }
        going = [wish for wish in wishes if wish.sequence in guesses]
        while going:
            chunks = [self._chunk(sequence, guesses[sequence]) for sequence, _ in going]
            result = self._execute(StepPlan(tuple(chunks)))
            for (sequence, _), chunk, drawn in zip(going, chunks, result.tokens, strict=True):
                self._copies[sequence].written += chunk.tokens
                guesses[sequence] += drawn
            going = [
                wish
                for wish, chunk in zip(going, chunks, strict=True)
                if chunk.draws and len(guesses[wish.sequence]) < wish.most
            ]
        return {sequence: guess for sequence, guess in guesses.items() if guess}

    def forget(self, sequence: Sequence) -> None:
        """See Source."""
        if (copy := self._copies.pop(sequence, None)) is not None:
            self._free += copy.table

    def check(self) -> None:
        """Assert the invariant."""
        held = [block for copy in self._copies.values() for block in copy.table]
        assert sorted([*held, *self._free]) == list(range(len(held) + len(self._free))), (held, self._free)

    def _has_place(self, wish: Wish, wishes: list[Wish]) -> bool:
        """Whether text and guesses have blocks; they get them."""
        sequence, most = wish
        length = len(sequence.tokens) + most
        if length > self._max_model_tokens:
            return False
        copy = self._copies.pop(sequence, None) or _Copy()
        self._copies[sequence] = copy
        lacking = blocks_for(length, self._block_size) - len(copy.table)
        if lacking > len(self._free):
            self._make_way(lacking, {wish.sequence for wish in wishes})
        if lacking > len(self._free):
            return False
        copy.table += [self._free.pop() for _ in range(lacking)]
        copy.follow(sequence.tokens)
        return True

    def _make_way(self, lacking: int, staying: set[Sequence]) -> None:
        for sequence in [copied for copied in self._copies if copied not in staying]:
            if lacking <= len(self._free):
                break
            self.forget(sequence)

    def _chunk(self, sequence: Sequence, guessed: tuple[int, ...]) -> Chunk:
        """The next tokens of the text and its guesses, and a draw if those are all."""
        copy = self._copies[sequence]
        start, length = len(copy.written), len(sequence.tokens) + len(guessed)
        end = min(length, start + CATCH_UP_TOKENS)
        tokens = (*sequence.tokens[start:end], *guessed[max(0, start - len(sequence.tokens)) :])
        draw = draws_after(sequence, guessed)[-1]
        copy.sure = min(end, len(sequence.tokens))
        return Chunk(
            sequence=SequenceId(0),  # names nothing here
            start=start,
            tokens=tokens[: end - start],
            table=copy.table,
            draws=(replace(draw, logprobs=None),) if end == length else (),
        )
