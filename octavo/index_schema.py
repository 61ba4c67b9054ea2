"""How the prefix index lies in Redis: one SET per worker and epoch, whose members are truncated block hashes.

A SET of 16-byte members costs 72 bytes an entry, is forgotten by dropping one key, and lets one script call per
worker find the longest prefix. A new epoch is a new key, so an old incarnation's blocks are never seen.

Beside the blocks, a SET holds WHOLE_MARK while its writer believes that it has all of them. A SET without it was lost,
has expired, or is being written: what it holds may be used, what it lacks proves nothing.
"""

from octavo.ids import BlockHash, Epoch, WorkerId

MEMBER_BYTES = 16

WHOLE_MARK = b"whole"
"""Shorter than a block's member, so never mistaken for one."""

LONGEST_PREFIX_SCRIPT = """
-- KEYS[1]: a worker's SET. ARGV[1]: members of a prompt's leading blocks, 16 bytes each, joined.
-- Returns how many leading ones are in the SET, and -1 less that many if the SET lacks the mark of ARGV[2].
-- Probes in growing chunks and stops at the first miss.
local total, found, chunk = #ARGV[1] / 16, 0, 8
local function count(leading)
  if redis.call('SISMEMBER', KEYS[1], ARGV[2]) == 1 then return leading end
  return -1 - leading
end
while found < total do
  local upto = math.min(found + chunk, total)
  local probe = {}
  for i = found, upto - 1 do probe[#probe + 1] = string.sub(ARGV[1], i * 16 + 1, i * 16 + 16) end
  local hits = redis.call('SMISMEMBER', KEYS[1], unpack(probe))
  for i = 1, #hits do
    if hits[i] == 0 then return count(found + i - 1) end
  end
  found, chunk = upto, math.min(chunk * 4, 1024)
end
return count(total)
"""
"""SMISMEMBER needs Redis 6.2 or newer."""


def index_count(reply: int) -> tuple[int, bool]:
    """Leading blocks, and whether the SET is whole, from the script's reply."""
    return (reply, True) if reply >= 0 else (-1 - reply, False)


def index_key(worker: WorkerId, epoch: Epoch) -> str:
    """The SET of a worker's epoch. The braces keep one worker's keys on one node of a Redis Cluster."""
    return f"octavo:index:{{{worker}}}:{epoch}"


def index_member(block_hash: BlockHash) -> bytes:
    """What stands for a block in the SET; the manager compares the tokens themselves on attach."""
    return block_hash[:MEMBER_BYTES]
