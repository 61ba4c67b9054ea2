"""How the prefix index lies in Redis: one SET per worker and epoch, whose members are truncated block hashes.

A SET of 16-byte members costs 72 bytes an entry, is forgotten by dropping one key, and lets one script call per
worker find the longest prefix. A new epoch is a new key, so an old incarnation's blocks are never seen.
"""

from octavo.ids import BlockHash, Epoch, WorkerId

MEMBER_BYTES = 16

LONGEST_PREFIX_SCRIPT = """
-- KEYS[1]: a worker's SET. ARGV[1]: members of a prompt's leading blocks, 16 bytes each, joined.
-- Returns how many leading ones are in the SET; probes in growing chunks and stops at the first miss.
local total, found, chunk = #ARGV[1] / 16, 0, 8
while found < total do
  local upto = math.min(found + chunk, total)
  local probe = {}
  for i = found, upto - 1 do probe[#probe + 1] = string.sub(ARGV[1], i * 16 + 1, i * 16 + 16) end
  local hits = redis.call('SMISMEMBER', KEYS[1], unpack(probe))
  for i = 1, #hits do
    if hits[i] == 0 then return found + i - 1 end
  end
  found, chunk = upto, math.min(chunk * 4, 1024)
end
return total
"""
"""SMISMEMBER needs Redis 6.2 or newer."""


def index_key(worker: WorkerId, epoch: Epoch) -> str:
    """The SET of a worker's epoch. The braces keep one worker's keys on one node of a Redis Cluster."""
    return f"octavo:index:{{{worker}}}:{epoch}"


def index_member(block_hash: BlockHash) -> bytes:
    """What stands for a block in the SET; the manager compares the whole hash and the tokens on attach."""
    return block_hash[:MEMBER_BYTES]
