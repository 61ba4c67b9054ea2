"""How the prefix index lies in Redis: one SET per worker and epoch, whose members are truncated block hashes.

A SET of 16-byte members costs 72 bytes an entry, is forgotten by dropping one key, and lets one script call per
worker find the longest prefix. A new epoch is a new key, so an old incarnation's blocks are never seen.

Beside the blocks, a SET holds WHOLE_MARK while its writer believes that it has all of them. A SET without it was lost,
has expired, or is being written: what it holds may be used, what it lacks proves nothing.

Beside each SET, under the same worker and epoch, lie the claims on it: blocks that gateways have sent prompts for and
that the worker has not published yet. They end by themselves; managers never touch them.
"""

from typing import NamedTuple

from octavo.ids import BlockHash, Epoch, WorkerId

MEMBER_BYTES = 16

WHOLE_MARK = b"whole"
"""Shorter than a block's member, so never mistaken for one."""

MAX_CLAIMS = 1 << 14
"""Of one worker: what it computes in a claim's life, and more; some 1.5 MB."""

CLAIM_SECONDS = 5.0
"""From a claim to when it is forgotten, unless it is made again. A claim that will not come true, since its prompt was
cancelled, attracts others for so long; a prompt that waits longer is known to its own gateway only."""

LONGEST_PREFIX_SCRIPT = """
-- KEYS[1]: a worker's SET. KEYS[2]: the claims on it. ARGV[1]: members of a prompt's leading blocks, 16 bytes each,
-- joined.
-- Returns how many leading ones are in the SET, whether it has the mark of ARGV[2] (1 or 0), and how many there will be
-- once what is claimed behind them has come. Probes in growing chunks and stops at the first miss.
local total = #ARGV[1] / 16
local function reach(found, call, command, key, least)
  local chunk = 8
  while found < total do
    local upto = math.min(found + chunk, total)
    local probe = {}
    for i = found, upto - 1 do probe[#probe + 1] = string.sub(ARGV[1], i * 16 + 1, i * 16 + 16) end
    local values = call(command, key, unpack(probe))
    for i = 1, #probe do
      if (values[i] or 0) * 1 <= least then return found + i - 1 end
    end
    found, chunk = upto, math.min(chunk * 4, 1024)
  end
  return found
end
local time = redis.call('TIME')
local held = reach(0, redis.call, 'SMISMEMBER', KEYS[1], 0)
local coming = reach(held, redis.pcall, 'ZMSCORE', KEYS[2], time[1] * 1000 + time[2] / 1000)
return {held, redis.call('SISMEMBER', KEYS[1], ARGV[2]), coming}
"""
"""SMISMEMBER and ZMSCORE need Redis 6.2 or newer. A value of another type under the claims' key claims nothing."""

CLAIM_SCRIPT = """
-- KEYS[1]: the claims on a worker. ARGV[1]: members, 16 bytes each, joined, 3,000 at most. ARGV[2]: how long they live,
-- in ms. ARGV[3]: how many there may be. Those that end first make room.
if redis.call('TYPE', KEYS[1]).ok ~= 'zset' then redis.call('DEL', KEYS[1]) end
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now)
local claims = {}
for at = 1, #ARGV[1], 16 do
  claims[#claims + 1] = now + ARGV[2]
  claims[#claims + 1] = string.sub(ARGV[1], at, at + 15)
end
redis.call('ZADD', KEYS[1], unpack(claims))
redis.call('ZREMRANGEBYRANK', KEYS[1], 0, -1 - ARGV[3])
redis.call('PEXPIRE', KEYS[1], ARGV[2])
"""
"""The server's clock is the only one: those of two gateways may differ by more than a claim's life."""


class IndexAnswer(NamedTuple):
    """What LONGEST_PREFIX_SCRIPT found, in leading blocks."""

    held: int
    whole: bool
    """The SET has its mark."""
    coming: int
    """`held`, and what is claimed behind it."""


def index_answer(reply: object, asked: int) -> IndexAnswer | None:
    """The script's reply to a question about `asked` blocks; None for whatever else a server may have said."""
    match reply:
        case [int(held), int(whole), int(coming)] if 0 <= held <= coming <= asked:
            return IndexAnswer(held, bool(whole), coming)
        case _:
            return None


def index_key(worker: WorkerId, epoch: Epoch) -> str:
    """The SET of a worker's epoch."""
    return f"octavo:index:{_together(worker)}:{epoch}"


def claims_key(worker: WorkerId, epoch: Epoch) -> str:
    """The sorted set of the claims on a worker's epoch: member -> when it ends, in ms of the server's clock."""
    return f"octavo:claims:{_together(worker)}:{epoch}"


def _together(worker: WorkerId) -> str:
    """Keeps one worker's keys on one node of a Redis Cluster: what decides ends at the first closing brace."""
    return "{" + worker.replace("%", "%25").replace("}", "%7D") + "}"


def index_member(block_hash: BlockHash) -> bytes:
    """What stands for a block in the SET; the manager compares the tokens themselves on attach."""
    return block_hash[:MEMBER_BYTES]
