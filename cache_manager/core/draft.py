"""What a worker may ask for: the only place where a call is judged.

A draft sees the books as they will be after the parts that it has already let pass, so a whole exchange is judged
before any of it happens. It raises at the first wrong part and changes nothing, since it only ever writes to itself.
Whether there are enough blocks is not judged here: that is an answer (`unmet`), not an error.
"""

from collections.abc import Sequence

from cache_manager.core.block_table import BlockTables
from cache_manager.core.vocabulary import Vocabulary
from octavo.errors import InvalidRequest, UnknownSequence
from octavo.ids import SequenceId
from octavo.records.attend import MAX_RETAIN_SECONDS, Attach, Exchange
from octavo.records.fleet import PoolSpec
from octavo.records.scope import Media, Scope


class Draft:
    """The future of some books, as far as rules need it: who exists, how long, how far writable."""

    def __init__(self, spec: PoolSpec, vocabulary: Vocabulary, tables: BlockTables) -> None:
        self._spec = spec
        self._vocabulary = vocabulary
        self._tables = tables
        self._extents: dict[SequenceId, tuple[int, int]] = {}
        """(length, end of the writable positions) of the sequences touched so far."""
        self._freed: set[SequenceId] = set()
        self._born: set[SequenceId] = set()

    def judge(self, exchange: Exchange) -> None:
        """Let every part of the exchange pass, in the order in which it will be applied.

        Raises:
            UnknownSequence: a part names a sequence that is not there, or is freed by then.
            InvalidRequest: a part is wrong in itself, or does not fit what comes before it.
        """
        for truncation in exchange.truncations:
            self.truncate(truncation.sequence, truncation.length)
        for sequence, tokens in exchange.commits:
            self.commit(sequence, tokens)
        for fork in exchange.forks:
            self.fork(fork.parent, fork.children, fork.reserve)
        for sequence in exchange.finished:
            self.free(sequence)
        for attach in exchange.attaches:
            self.attach(attach)
        for sequence, count in exchange.reserves:
            self.reserve(sequence, count)

    def truncate(self, sequence: SequenceId, length: int) -> None:
        """Nothing can be truncated to more than it has."""
        current, _ = self._extent(sequence)
        if not 0 <= length <= current:
            raise InvalidRequest(f"length of sequence {sequence}: wanted {length}, it has {current}")
        self._extents[sequence] = (length, length)

    def commit(self, sequence: SequenceId, tokens: Sequence[int]) -> None:
        """Only writable positions can have been written."""
        length, room = self._extent(sequence)
        self._extents[sequence] = (judge_commit(sequence, tokens, length, room, self._vocabulary), room)

    def fork(self, parent: SequenceId, children: Sequence[SequenceId], reserve: int) -> None:
        """Children are new. They may turn out unmet, so nothing but a reserve may build on them in one exchange."""
        self._extent(parent)
        if not children:
            raise InvalidRequest(f"children of sequence {parent}: wanted 0, at least 1 is needed")
        for child in children:
            self._judge_new(child, exists=child in self._tables)
        judge_count(parent, reserve)

    def free(self, sequence: SequenceId) -> None:
        """Nothing is freed twice."""
        self._extent(sequence)
        self._freed.add(sequence)

    def attach(self, attach: Attach) -> None:
        """There is a token to compute, the pool can hold them all, and media have their places among them."""
        sequence = attach.sequence
        self._judge_new(sequence, exists=sequence in self._tables and sequence not in self._freed)
        judge_prompt(f"sequence {sequence}", attach.tokens, attach.scope, self._spec, self._vocabulary)
        if not 0 <= attach.retain_seconds <= MAX_RETAIN_SECONDS:
            raise InvalidRequest(
                f"retain_seconds of sequence {sequence}: {attach.retain_seconds}, wanted from 0 to {MAX_RETAIN_SECONDS}"
            )

    def reserve(self, sequence: SequenceId, count: int) -> None:
        """Any count will do; too large a one is unmet."""
        if (sequence not in self._tables or sequence in self._freed) and sequence not in self._born:
            self._extent(sequence)  # says what is wrong with it
        judge_count(sequence, count)

    def _extent(self, sequence: SequenceId) -> tuple[int, int]:
        """Length and writable end of a sequence that was there before the exchange and still is."""
        extent = self._extents.get(sequence)
        if extent is None:
            table = self._tables[sequence]
            extent = (len(table.tokens), table.room)
        if sequence in self._freed:
            raise UnknownSequence(f"sequence {sequence} is freed already")
        return extent

    def _judge_new(self, sequence: SequenceId, *, exists: bool) -> None:
        if exists or sequence in self._born:
            raise InvalidRequest(f"sequence {sequence} is in the books already")
        self._born.add(sequence)


def judge_commit(sequence: SequenceId, tokens: Sequence[int], length: int, room: int, vocabulary: Vocabulary) -> int:
    """Tokens fit into the writable positions, if they are appended to a sequence of this length. Returns their end."""
    end = length + len(tokens)
    if end > room:
        raise InvalidRequest(f"tokens of sequence {sequence}: end at {end}, writable up to {room}")
    if not vocabulary.holds(tokens):
        raise _stranger(f"sequence {sequence}", tokens, vocabulary)
    return end


def judge_prompt(whose: str, tokens: Sequence[int], scope: Scope, spec: PoolSpec, vocabulary: Vocabulary) -> None:
    """There is a token to compute, the pool can hold them all, and media have their places among them."""
    if not 0 < len(tokens) <= spec.capacity_tokens:
        raise InvalidRequest(
            f"tokens of {whose}: {len(tokens)} of them, from 1 to {spec.capacity_tokens} (capacity_tokens) can be held"
        )
    if not vocabulary.holds(tokens):
        raise _stranger(whose, tokens, vocabulary)
    _judge_media(whose, scope.media, len(tokens))


def _judge_media(whose: str, media: Sequence[Media], end: int) -> None:
    """In order, each at a token of its own."""
    first = 0
    for item in media:
        if not first <= item.position < end:
            raise InvalidRequest(f"media of {whose}: position {item.position}, wanted in [{first}, {end})")
        first = item.position + 1


def _stranger(whose: str, tokens: Sequence[int], vocabulary: Vocabulary) -> InvalidRequest:
    wrong = vocabulary.first_stranger(tokens)
    return InvalidRequest(f"tokens of {whose}: token id {wrong}, vocab_size is {vocabulary.size}")


def judge_count(sequence: SequenceId, count: int) -> None:
    """Any count will do that is one."""
    if count < 0:
        raise InvalidRequest(f"count reserved for sequence {sequence}: wanted {count}, at least 0 is needed")
