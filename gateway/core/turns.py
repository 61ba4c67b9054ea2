"""The very tokens of earlier answers, found again by the text that ends with them. Pure, and bounded.

A conversation comes back as text. Its tokenizer may part that text otherwise than the model did when it wrote it, and
then nothing that was computed behind that point is found again. So answers are remembered as they were generated:

    key      a hash over all text up to the answer's end, within a realm that others do not share
    value    where the answer begins, and its tokens

Hashes are chained over chunks of CHUNK_CHARACTERS, so that one pass over a text finds every answer in it, wherever it
ends; the characters after the last whole chunk are compared as they are.

Invariant: the answers together cost at most `max_tokens`; those that were not recalled for longest go first.
"""

from array import array
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gateway.core.events import Delta, Event, Finished
from octavo.hashing import digest_of

CHUNK_CHARACTERS = 512
ANSWER_COST = 256
"""Tokens that an answer counts for besides its own: what its key and its place in the books take, at 4 bytes each."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A part [start, end) of a text, in characters, that was generated."""

    start: int
    end: int
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Key:
    chain: bytes
    """The hash of all whole chunks."""
    tail: str
    """The characters behind them, fewer than a chunk."""


@dataclass(frozen=True, slots=True)
class _Kept:
    start: int
    tokens: "array[int]"
    """u32."""

    @property
    def cost(self) -> int:
        return len(self.tokens) + ANSWER_COST


class TurnMemory:
    """Answers of one gateway."""

    def __init__(self, max_tokens: int) -> None:
        """Remember answers of `max_tokens` together; 0 remembers none."""
        self._max_tokens = max_tokens
        self._kept: OrderedDict[_Key, _Kept] = OrderedDict()  # those that were recalled for longest ago first
        self._tails: dict[bytes, dict[int, int]] = {}  # chain -> length of tail -> how many answers have it
        self._cost = 0

    @property
    def answers(self) -> int:
        """How many are remembered."""
        return len(self._kept)

    def remember(self, realm: bytes, text: str, start: int, tokens: Sequence[int]) -> None:
        """Of `text` the part from character `start` on was generated as `tokens`. An answer too large is forgotten."""
        assert 0 <= start < len(text), (start, len(text))
        key = self._key(realm, text)
        self._forget(key)
        kept = _Kept(start, array("I", tokens))
        self._kept[key] = kept
        self._cost += kept.cost
        lengths = self._tails.setdefault(key.chain, {})
        lengths[len(key.tail)] = lengths.get(len(key.tail), 0) + 1
        while self._cost > self._max_tokens:
            self._forget(next(iter(self._kept)))

    def recall(self, realm: bytes, text: str) -> tuple[Answer, ...]:
        """The remembered answers in a text, by their place. None overlap: the one that ends last wins."""
        if not self._kept:
            return ()
        chains = list(_chains(realm, text))
        found: list[Answer] = []
        end = len(text)
        while (answer := self._last(chains, text, end)) is not None:
            found.append(answer)
            end = answer.start
        return tuple(reversed(found))

    def _last(self, chains: Sequence[bytes], text: str, limit: int) -> Answer | None:
        """The answer that ends last, at `limit` or before."""
        for whole in range(limit // CHUNK_CHARACTERS, -1, -1):
            at = whole * CHUNK_CHARACTERS
            for length in sorted(self._tails.get(chains[whole], ()), reverse=True):
                key = _Key(chains[whole], text[at : at + length])
                if at + length <= limit and key in self._kept:
                    self._kept.move_to_end(key)
                    kept = self._kept[key]
                    return Answer(kept.start, at + length, tuple(kept.tokens))
        return None

    def _key(self, realm: bytes, text: str) -> _Key:
        *_, chain = _chains(realm, text)
        return _Key(chain, text[len(text) - len(text) % CHUNK_CHARACTERS :])

    def _forget(self, key: _Key) -> None:
        kept = self._kept.pop(key, None)
        if kept is None:
            return
        self._cost -= kept.cost
        lengths = self._tails[key.chain]
        lengths[len(key.tail)] -= 1
        if not lengths[len(key.tail)]:
            del lengths[len(key.tail)]
        if not lengths:
            del self._tails[key.chain]

    def check(self) -> None:
        """Assert the invariants."""
        assert self._cost == sum(kept.cost for kept in self._kept.values()), self._cost
        assert self._cost <= self._max_tokens, (self._cost, self._max_tokens)
        tails: dict[bytes, dict[int, int]] = {}
        for key in self._kept:
            lengths = tails.setdefault(key.chain, {})
            lengths[len(key.tail)] = lengths.get(len(key.tail), 0) + 1
        assert tails == self._tails, "the lengths of tails are not those of the answers"


def _chains(realm: bytes, text: str) -> Iterator[bytes]:
    """The hash of the first 0, 1, 2, … whole chunks of a text."""
    chain = digest_of(b"octavo turn", realm)
    yield chain
    for end in range(CHUNK_CHARACTERS, len(text) + 1, CHUNK_CHARACTERS):
        chunk = text[end - CHUNK_CHARACTERS : end]
        chain = digest_of(chain, chunk.encode(errors="surrogatepass"))
        yield chain


class Listener:
    """Puts the answers of one request together from what its client is told."""

    def __init__(self) -> None:
        self._heard: defaultdict[int, tuple[list[str], list[int]]] = defaultdict(lambda: ([], []))

    def hear(self, event: Event) -> tuple[str, tuple[int, ...]] | None:
        """The text and the tokens of the sample that ends with this event."""
        if isinstance(event, Delta):
            texts, tokens = self._heard[event.sample]
            texts.append(event.text)
            tokens += event.token_ids
        return self._take(event.sample) if isinstance(event, Finished) else None

    def rest(self) -> list[tuple[str, tuple[int, ...]]]:
        """Those of the samples that have not ended, when nothing more comes: a client may go on from there as well."""
        return [taken for sample in list(self._heard) if (taken := self._take(sample)) is not None]

    def _take(self, sample: int) -> tuple[str, tuple[int, ...]] | None:
        if sample not in self._heard:
            return None
        texts, tokens = self._heard.pop(sample)
        return "".join(texts), tuple(tokens)
