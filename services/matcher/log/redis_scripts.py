"""How the log lies in Redis, and the scripts that change it: each is atomic, and may be repeated.

All keys have the prefix as hash tag, so that they share one slot of a cluster:

- `records`: a stream; record n has the id n-0, so Redis too refuses another order.
- `heads`: a hash, store -> epoch and sequence, as text of 20 digits each (a Lua number holds 53 bits).
- `state`: a hash of the end (number, chain, total: bytes of all records ever), of `trimmed`, and the format.
- `snapshot`: a hash, the complete snapshot. `snapshot:<number>-<token>:<index>`: parts.
- `begun`: a hash, <number>-<token> -> parts, of every snapshot that has any: what is to be deleted is in here.
- `lease`: the token of who is writing a snapshot.
"""

from services.common.redis_connection import Script

FORMAT = b"1"


class Keys:
    def __init__(self, prefix: str) -> None:
        """Raises ValueError for a prefix that cannot be a hash tag."""
        if not prefix or "{" in prefix or "}" in prefix:
            raise ValueError(f"the key prefix of the log is {prefix!r}; it must not be empty or have braces")
        self._tag = f"{{{prefix}}}:".encode()
        self.records = self._tag + b"records"
        self.heads = self._tag + b"heads"
        self.state = self._tag + b"state"
        self.snapshot = self._tag + b"snapshot"
        self.begun = self._tag + b"begun"
        self.lease = self._tag + b"lease"

    def part(self, name: bytes, index: int) -> bytes:
        return b"%b:%b:%d" % (self.snapshot, name, index)


def digits(number: int) -> str:
    """As text that sorts like the number."""
    return f"{number:020d}"


# KEYS: records, heads, state. ARGV: store, epoch; to append: sequence before the page, its last, 1 for a reset,
# SHA-1 of the page, the page. Numbers as `digits`. Returns ok or stale, sequence or newer epoch, end number, end chain.
APPEND = Script("""
local state = redis.call('HMGET', KEYS[3], 'format', 'number', 'chain', 'total')
if state[1] and state[1] ~= '1' then return {'format', state[1], '0', ''} end
local number, chain, total = state[2] or '0', state[3] or string.rep('\\0', 20), state[4] or '0'
local epoch, durable = string.rep('0', 20), string.rep('0', 20)
local head = redis.call('HGET', KEYS[2], ARGV[1])
if head then epoch, durable = head:sub(1, 20), head:sub(21) end
if ARGV[2] < epoch then return {'stale', epoch, number, chain} end
if ARGV[2] > epoch then durable = string.rep('0', 20) end
local before, last, reset, digest, data = ARGV[3], ARGV[4], ARGV[5], ARGV[6], ARGV[7]
if data and (before == durable or (reset == '1' and before > durable)) then
    number = string.format('%.0f', number + 1)
    total = string.format('%.0f', total + #data)
    chain = redis.sha1hex(chain .. digest):gsub('..', function(hex) return string.char(tonumber(hex, 16)) end)
    redis.call('XADD', KEYS[1], number .. '-0', 'chain', chain, 'total', total, 'data', data)
    redis.call('HSET', KEYS[3], 'format', '1', 'number', number, 'chain', chain, 'total', total)
    redis.call('HSET', KEYS[2], ARGV[1], ARGV[2] .. last)
    durable = last
end
return {'ok', durable, number, chain}
""")

# KEYS: lease. ARGV: token, milliseconds. Takes or renews it; 0 if somebody else has it.
HOLD = Script("""
local holder = redis.call('GET', KEYS[1])
if holder and holder ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 1
""")

# KEYS: lease, begun, part. ARGV: token, milliseconds, snapshot's name, parts with this one, its bytes.
# 0 if somebody else has the lease.
WRITE_PART = Script("""
local holder = redis.call('GET', KEYS[1])
if holder and holder ~= ARGV[1] then return 0 end
redis.call('HSET', KEYS[2], ARGV[3], ARGV[4])
redis.call('SET', KEYS[3], ARGV[5])
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 1
""")

# KEYS: lease, snapshot, state, records. ARGV: token, name, number, chain, parts, checksums.
# Returns ok, lost (lease or parts), gap (the record is not this log's).
SWITCH = Script("""
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 'lost' end
local number, chain, parts = ARGV[3], ARGV[4], tonumber(ARGV[5])
for index = 0, parts - 1 do
    -- Of the same slot as the keys above.
    if redis.call('EXISTS', KEYS[2] .. ':' .. ARGV[2] .. ':' .. index) == 0 then return 'lost' end
end
local before = redis.call('HMGET', KEYS[2], 'number', 'chain', 'total')
local state = redis.call('HMGET', KEYS[3], 'number', 'chain', 'total')
local found = {}
if number == '0' then
    found = {'0', string.rep('\\0', 20), '0'}
elseif number == state[1] then
    found = state
elseif number == before[1] then
    found = before
else
    local record = redis.call('XRANGE', KEYS[4], number .. '-0', number .. '-0')[1]
    if record then found = {number, record[2][2], record[2][4]} end
end
if found[2] ~= chain then return 'gap' end
redis.call('HSET', KEYS[2], 'name', ARGV[2], 'number', number, 'chain', chain, 'total', found[3],
    'parts', ARGV[5], 'checksums', ARGV[6])
redis.call('HSET', KEYS[3], 'trimmed', number)
return 'ok'
""")

# KEYS: lease, snapshot, begun. ARGV: token. The snapshot's name ('' if none), then begun ones with their parts;
# nothing at all without the lease.
BEGUN = Script("""
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return {} end
local begun = redis.call('HGETALL', KEYS[3])
table.insert(begun, 1, redis.call('HGET', KEYS[2], 'name') or '')
return begun
""")

# KEYS: lease. ARGV: token.
RELEASE = Script("""
if redis.call('GET', KEYS[1]) == ARGV[1] then redis.call('DEL', KEYS[1]) end
return 1
""")
