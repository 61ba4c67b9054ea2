"""The nouns: frozen values that one process tells another. `octavo.wire` gives them their protobuf form.

Those that each exchange carries, one for a sequence at that, are named tuples: they are made three times as fast.
Token lists are tuples where a worker makes them and arrays of u32 where they come off the wire, which costs no
conversion; only the same kinds are equal.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from octavo.errors import OctavoError
from octavo.hashing import NO_SEAM, ChainRoot, Seam
from octavo.ids import (
    NEVER_RESET,
    NO_EPOCH,
    NOBODY,
    UNKNOWN_INCARNATION,
    BlockHash,
    BlockId,
    CacheEpoch,
    Epoch,
    Incarnation,
    SequenceId,
    TenantTag,
    WorkerId,
)


@dataclass(frozen=True, slots=True)
class Media:
    """An image or sound in a prompt."""

    position: int
    """Of its first token."""
    digest: bytes
    """32 bytes, of the content as the model is given it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """What the keys of a sequence's blocks depend on besides its tokens and its pool: scopes that differ share nothing.

    Empty fields are the plain case: the model as it is, text alone, blocks that everybody may find.
    """

    salt: bytes = b""
    """Keeps a tenant's blocks apart: 32 bytes."""
    adapter_digest: bytes = b""
    """Of the adapter's weights, 32 bytes. Its name is no part of this: it may be loaded anew under the same one."""
    media: tuple[Media, ...] = ()
    """By position."""
    public_tokens: int = 0
    """So many leading tokens anybody may know: their full blocks are found by everybody, whatever the salt."""

    def agrees_with(self, other: "Scope") -> bool:
        """Whether equal tokens are equal blocks in both. How many of them are public follows from the tokens."""
        mine, theirs = (self.salt, self.adapter_digest, self.media), (other.salt, other.adapter_digest, other.media)
        return mine == theirs

    def seam(self, block_size: int) -> Seam:
        """Where hash chains of this scope become private, if not at their roots."""
        block = self.public_tokens // block_size
        return Seam(block, self.salt) if block and self.salt else NO_SEAM


PLAIN = Scope()

MAX_RETAIN_SECONDS = 7 * 24 * 3600
"""Of a request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSpec:
    """What a worker's pool is made of."""

    model: str
    """The name clients ask for."""
    model_digest: bytes
    tokenizer_digest: bytes
    dtype: str
    kv_dtype: str
    block_size: int
    num_blocks: int
    max_model_tokens: int
    """Longest sequence that the model takes."""
    vocab_size: int
    block_bytes: int = 0
    """Memory of one block; 0 where it does not matter. What is owed to a tenant in bytes is counted with it."""

    @property
    def capacity_tokens(self) -> int:
        """Longest sequence that both the model and the pool can hold."""
        return min(self.max_model_tokens, self.num_blocks * self.block_size)

    def chain_root(self, scope: Scope = PLAIN, cache_epoch: CacheEpoch = NEVER_RESET) -> ChainRoot:
        """The root of the hash chains of this pool's sequences of that scope."""
        return ChainRoot(
            model_digest=self.model_digest,
            tokenizer_digest=self.tokenizer_digest,
            dtype=self.dtype,
            kv_dtype=self.kv_dtype,
            block_size=self.block_size,
            adapter_digest=scope.adapter_digest,
            media=tuple((media.position, media.digest) for media in scope.media),
            salt=scope.salt if scope.seam(self.block_size) is NO_SEAM else b"",
            cache_epoch=cache_epoch,
        )


class WorkerLoad(NamedTuple):
    """What a worker has in hand; the totals count from its start."""

    running_sequences: int = 0
    waiting_sequences: int = 0
    queued_prefill_tokens: int = 0
    """Prompt tokens accepted and not yet computed."""
    held_blocks: int = 0
    cached_blocks: int = 0
    """Published blocks without an owner: evictable."""
    prompt_tokens: int = 0
    """Each prompt counted once."""
    cached_tokens: int = 0
    """Of the prompt tokens, those taken from published blocks."""
    output_tokens: int = 0
    preemptions: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerInfo:
    """One worker of the fleet, as its manager knows it."""

    worker_id: WorkerId
    epoch: Epoch
    address: str
    """host:port of its Serve."""
    pool: PoolSpec
    load: WorkerLoad
    draining: bool = False
    incarnation: Incarnation = UNKNOWN_INCARNATION
    """The process: another epoch with the same one is the same process, which still has what it had."""
    cache_epoch: CacheEpoch = NEVER_RESET

    def chain_root(self, scope: Scope) -> ChainRoot:
        """The root of the hash chains under which it publishes sequences of that scope."""
        return self.pool.chain_root(scope, self.cache_epoch)


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetUpdate:
    """What changed in the fleet; a snapshot names every worker there is."""

    workers: tuple[WorkerInfo, ...] = ()
    gone: tuple[WorkerId, ...] = ()
    snapshot: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Registration:
    """A worker that asks to join."""

    worker_id: WorkerId
    incarnation: Incarnation
    address: str
    pool: PoolSpec
    first_epoch: Epoch = NO_EPOCH
    """The first that this process was given by any manager; 0 if none."""
    last_epoch: Epoch = NO_EPOCH
    """The last that it was given."""
    inventory_parts: int = 0
    """How many parts of an inventory follow; 0: the pool is empty."""
    cache_epoch: CacheEpoch = NEVER_RESET
    """The last that it was told of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldSequence:
    """A sequence in the books, as its worker knows it."""

    sequence: SequenceId
    root: BlockHash
    tokens: Sequence[int]
    """Those that are written."""
    table: tuple[BlockId, ...]
    room: int
    """End of the positions that it may write without asking."""
    ahead: Sequence[int] = ()
    """The rest of the prompt that it was attached with, while that is being computed."""
    forgotten: bool = False
    """It was attached before the last reset: nothing of it is published."""
    tenant: TenantTag = NOBODY
    retain_seconds: int = 0
    """This and the tenant as it was attached with."""
    seam: Seam = NO_SEAM
    """Of the scope that it was attached with."""


@dataclass(frozen=True, slots=True)
class Inventory:
    """A part of what a worker's pool holds, told to a manager that has lost the books."""

    published: bytes = b""
    """Records (octavo.block_record), the block to be reused first ahead."""
    sequences: tuple[HeldSequence, ...] = ()


@dataclass(frozen=True, slots=True)
class Registered:
    """The manager's answer to a registration."""

    epoch: Epoch
    lease_seconds: float
    cache_epoch: CacheEpoch = NEVER_RESET


class Commit(NamedTuple):
    """Tokens whose keys and values the last step wrote, in order, at the end of a sequence."""

    sequence: SequenceId
    tokens: Sequence[int]


@dataclass(frozen=True, slots=True)
class Fork:
    """Children that alias their parent's table; each must be able to write `reserve` positions."""

    parent: SequenceId
    children: tuple[SequenceId, ...]
    reserve: int


@dataclass(frozen=True, slots=True)
class Attach:
    """A sequence to create on the longest prefix hit of its tokens."""

    sequence: SequenceId
    tokens: Sequence[int]
    scope: Scope = PLAIN
    tenant: TenantTag = NOBODY
    """On whose account its blocks are kept."""
    retain_seconds: int = 0
    """For so long after its end its blocks are to be retained, as far as the tenant's quota reaches."""


class Reservation(NamedTuple):
    """Positions [length, length + positions) of a sequence that must become writable."""

    sequence: SequenceId
    positions: int


class Truncation(NamedTuple):
    """A sequence that goes back to `length` tokens."""

    sequence: SequenceId
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """What a worker did since its last exchange, and what it needs now. Applied in the order of the fields."""

    epoch: Epoch
    step: int
    truncations: tuple[Truncation, ...] = ()
    commits: tuple[Commit, ...] = ()
    forks: tuple[Fork, ...] = ()
    finished: tuple[SequenceId, ...] = ()
    attaches: tuple[Attach, ...] = ()
    reserves: tuple[Reservation, ...] = ()
    """Whom to serve first, first. For a sequence attached in the same exchange the count ends at its last token."""
    load: WorkerLoad = field(default_factory=WorkerLoad)
    draining: bool = False


class TableChange(NamedTuple):
    """Entries [start, start + len(blocks)) of a sequence's table."""

    sequence: SequenceId
    start: int
    blocks: tuple[BlockId, ...]


class BlockCopy(NamedTuple):
    """Copy one block's keys and values, in all layers, before any write of the step."""

    source: BlockId
    target: BlockId


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """What the manager gives for a step."""

    epoch: Epoch
    step: int
    attached: tuple[tuple[SequenceId, int], ...] = ()
    """(sequence, tokens reused). They end inside a block when leading tokens of a published one were copied."""
    waiting: tuple[tuple[SequenceId, SequenceId], ...] = ()
    """(sequence, the sequence it waits for). Not attached: the other one is computing the first block that this one is
    missing. Ask again when that is published, or the other one is gone."""
    tables: tuple[TableChange, ...] = ()
    copies: tuple[BlockCopy, ...] = ()
    unmet: tuple[SequenceId, ...] = ()
    """Reserves and forks that found too few blocks. An unmet child does not exist."""
    free_blocks: int = 0
    """Left after this grant, evictable ones included."""
    published: bytes = b""
    """A record (octavo.block_record) for each block that was published since the last grant."""
    evicted: tuple[BlockId, ...] = ()
    """Blocks in which nothing is published any more."""
    roots: tuple[BlockHash, ...] = ()
    """Of the hash chains of `attached`, in that order."""
    cache_epoch: CacheEpoch = NEVER_RESET
    """Where it differs from the last grant's, nothing that was published before this grant is any more, and the
    sequences attached before it publish nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolAudit:
    """A worker's books, recomputed from its tables."""

    epoch: Epoch
    num_blocks: int
    free_blocks: int
    cached_blocks: int
    held_blocks: int
    sequences: int
    violation: str = ""
    """Empty when the books balance."""


class TableBlock(NamedTuple):
    """An entry of a sequence's table."""

    block: BlockId
    references: int
    """Tables that name it."""
    published: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceDescription:
    """Where a sequence lives."""

    epoch: Epoch
    length: int
    """Committed positions."""
    room: int
    """End of the writable ones."""
    blocks: tuple[TableBlock, ...]


class HitEnd(Enum):
    """Why a hit goes no further than it does."""

    LAST_TOKEN = "last token"
    """All but the last token is published: that one is always computed."""
    DIFFERS = "differs"
    """What is published goes on with another token."""
    NOT_PUBLISHED = "not published"
    """Nothing is published there: it was never computed under these keys, or it was evicted or reset."""
    BEING_COMPUTED = "being computed"
    """Another sequence computes the next block: the prompt would wait for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptExplanation:
    """What an attach of a prompt would find in a worker's books, and why no more."""

    epoch: Epoch
    reused_tokens: int
    end: HitEnd
    position: int
    """The first that is not published as the prompt has it. Beyond the reused tokens where too few of a block's tokens
    are in common to copy it, or no block is free for the copy."""
    block: BlockId | None = None
    """The published block that the prompt leaves at that position."""
    leader: SequenceId | None = None
    """The sequence that computes the next block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheReset:
    """What a reset did."""

    cache_epoch: CacheEpoch
    """Of the workers that were reset, from now on."""
    workers: int
    blocks: int
    """That can be found no longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the next token is drawn. Temperature 0 is greedy."""

    temperature: float = 0.0
    top_k: int = 0
    """0 keeps all."""
    top_p: float = 1.0
    seed: int = 0
    min_p: float = 0.0
    """Keeps what has at least this share of the likeliest token's probability."""
    repetition_penalty: float = 1.0
    """Divides the positive logits of tokens that prompt and output hold, and multiplies their negative ones."""
    presence_penalty: float = 0.0
    """Taken from the logits of tokens that the output holds."""
    frequency_penalty: float = 0.0
    """Likewise, as often as the output holds them."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, what is added to its logit), by id."""

    @property
    def counts_output(self) -> bool:
        """Whether it matters which tokens the output holds already, and how often."""
        return self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def penalises(self) -> bool:
        """Whether it matters which tokens came before."""
        return self.repetition_penalty != 1 or self.counts_output


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearch:
    """A search for the likeliest texts in place of draws."""

    width: int
    """Beams kept."""
    length_penalty: float = 1.0
    """Texts are ranked by the logarithm of their probability over their length to this power."""
    early_stopping: bool = False
    """End as soon as `width` texts have ended, though better ones may come."""
    exhaustive: bool = False
    """End only when no beam could do better even at its full length; not with `early_stopping`."""


class TokenLogprobs(NamedTuple):
    """How likely a token was, and which were the likeliest in its place: natural logarithms of probabilities.

    Under the model's own distribution, that of its logits as they are.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """(token id, logarithm), the likeliest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """A request as a worker sees it: token ids only."""

    request: int
    prompt: tuple[int, ...]
    max_tokens: int
    samples: int = 1
    sampling: SamplingParams = SamplingParams()
    stop_tokens: frozenset[int] = frozenset()
    scope: Scope = PLAIN
    tenant: TenantTag = NOBODY
    retain_seconds: int = 0
    """See Attach."""
    priority: int = 0
    """Higher is served sooner, an i32."""
    first_sample: int = 0
    """Number of the first of `samples`, the others follow: 0 unless an earlier visit to a worker ended some."""
    carried_tokens: int = 0
    """Of the end of `prompt`, what an earlier visit drew: output as to `max_tokens` and everything else."""
    min_tokens: int = 0
    """Output tokens before which no stop token is drawn."""
    logprobs: int | None = None
    """None: not wanted. Else how many of the likeliest are listed with each output token."""
    prompt_logprobs: int | None = None
    """Likewise for the prompt's tokens from the second on."""
    beam: BeamSearch | None = None
    """`samples` are then the best that it finds."""

    @property
    def output_begins(self) -> int:
        """Position of the first token of output, wherever it was drawn."""
        return len(self.prompt) - self.carried_tokens

    @property
    def sequences(self) -> int:
        """That run for it side by side: its samples, or the beams of its search."""
        return self.samples if self.beam is None else self.beam.width

    @property
    def longest_sequence(self) -> int:
        """Positions that prompt and output may come to."""
        return self.output_begins + self.max_tokens


class IndexState(Enum):
    """What a gateway's look-up in the prefix index is worth. This is where the three words are defined."""

    EXACT = "exact"
    """Every worker that was asked about was answered about within the budget, from a copy that its manager calls whole:
    what is not there was not published, but for changes on their way."""
    DEGRADED = "degraded"
    """Some workers were answered about so, but not all: of the others, what was found counts and may be too little."""
    FALLBACK = "fallback"
    """Nothing was learned, or nobody was asked, since Redis has not answered lately: all workers count as no hits."""


class FinishReason(Enum):
    """Why a sample ended."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class Tokens:
    """New tokens of one sample."""

    request: int
    sample: int
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One a token, where they were asked for."""


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Logprobs of consecutive tokens of a prompt. Every position is told once, in order, from the second on."""

    request: int
    start: int
    """Position of the first."""
    tokens: tuple[TokenLogprobs, ...]


@dataclass(frozen=True, slots=True)
class Prefilled:
    """A prompt has been computed, all but the `cached_tokens` of it that were found in published blocks."""

    request: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class SampleFinished:
    """The last word on one sample."""

    request: int
    sample: int
    reason: FinishReason
    cumulative_logprob: float | None = None
    """Of a beam: its score before the length penalty."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """A request that ends with an error."""

    request: int
    error: OctavoError


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """Everything one step produced for one gateway."""

    tokens: tuple[Tokens, ...] = ()
    prefilled: tuple[Prefilled, ...] = ()
    finished: tuple[SampleFinished, ...] = ()
    refused: tuple[Refusal, ...] = ()
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()
