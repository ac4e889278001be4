"""The Lua scripts of the lane on Redis: each is one step of a request's life cycle, and is atomic.

The work of a script is bounded by its arguments: it reads so many tenants, takes so many requests, drops so many
expired ones, each at O(log n).
"""

from __future__ import annotations

from typing import Final

# Drops requests whose answer hasn't begun and whose callers have been silent for their lifetime.
_DROP_ABANDONED: Final = """
local function drop_abandoned(callers, waiting, turns, queue_prefix, wanted_prefix, now)
  for _, member in ipairs(redis.call('ZRANGEBYSCORE', callers, '-inf', now, 'LIMIT', 0, 256)) do
    redis.call('ZREM', callers, member)
    local middle = string.find(member, '\\0', 1, true)
    local tenant, id = string.sub(member, 1, middle - 1), string.sub(member, middle + 1)
    if redis.call('ZREM', waiting, id) == 1 then
      redis.call('DEL', wanted_prefix .. id)
      redis.call('ZREM', queue_prefix .. tenant, id)
      if redis.call('EXISTS', queue_prefix .. tenant) == 0 then redis.call('ZREM', turns, tenant) end
    end
  end
end
"""

# KEYS: 1 wanted, 2 waiting, 3 turns, 4 sent, 5 queue, 6 callers.
# ARGV: 1 request id, 2 tenant, 3 attempt, 4 request, 5 ms for which it is wanted, 6 TTL of the queues in ms, 7 maximum
# of waiting requests, 8 maximum of one tenant, 9 lifetime of a caller in ms, 10 prefix of queues, 11 prefix of wanted
# keys.
# A later attempt continues an answer that may have begun: it is never refused because others wait.
SEND: Final = (
    _DROP_ABANDONED
    + """
local time = redis.call('TIME')
local now, caller = time[1] * 1000 + math.floor(time[2] / 1000), ARGV[2] .. '\\0' .. ARGV[1]
redis.call('ZADD', KEYS[6], 'XX', now + ARGV[9], caller)
drop_abandoned(KEYS[6], KEYS[2], KEYS[3], ARGV[10], ARGV[11], now)
local known = redis.call('HGET', KEYS[1], 'attempt')
if known and tonumber(known) >= tonumber(ARGV[3]) then return 'known' end
if tonumber(ARGV[3]) == 1 then
  if redis.call('ZCARD', KEYS[5]) >= tonumber(ARGV[8]) then return 'tenant full' end
  if redis.call('ZCARD', KEYS[2]) >= tonumber(ARGV[7]) then return 'full' end
end
local number = time[1] * 1000000 + time[2]
local last = redis.call('XREVRANGE', KEYS[4], '+', '-', 'COUNT', 1)
if #last > 0 then number = math.max(number, tonumber(string.match(last[1][1], '%d+')) + 1) end
number = string.format('%.0f', number)
redis.call('DEL', KEYS[1])
redis.call('HSET', KEYS[1], 'attempt', ARGV[3], 'number', number, 'tenant', ARGV[2], 'request', ARGV[4])
redis.call('PEXPIRE', KEYS[1], ARGV[5])
redis.call('ZADD', KEYS[2], 0, ARGV[1])
redis.call('ZADD', KEYS[6], now + ARGV[9], caller)
redis.call('ZADD', KEYS[5], number, ARGV[1])
redis.call('ZADD', KEYS[3], 'NX', number, ARGV[2])
redis.call('XADD', KEYS[4], 'MAXLEN', 1, number .. '-0', 'request', ARGV[1])
for at = 2, 6 do
  if redis.call('PTTL', KEYS[at]) < tonumber(ARGV[6]) then redis.call('PEXPIRE', KEYS[at], ARGV[6]) end
end
return 'sent'
"""
)

# KEYS: 1 waiting, 2 turns, 3 callers.  ARGV: 1 prefix of queues, 2 prefix of wanted keys.
COUNT: Final = (
    _DROP_ABANDONED
    + """
local time = redis.call('TIME')
drop_abandoned(KEYS[3], KEYS[1], KEYS[2], ARGV[1], ARGV[2], time[1] * 1000 + math.floor(time[2] / 1000))
return redis.call('ZCARD', KEYS[1])
"""
)

# KEYS: 1 waiting, 2 turns, 3 sent, 4 callers.
# ARGV: 1 worker, 2 maximum of requests, 3 maximum of one tenant, 4 lifetime in ms, 5 TTL of the queues in ms, 6 prefix
# of queues, 7 prefix of wanted keys, 8 prefix of alive keys, then the name of each tenant with requests at the worker,
# and their number.
# Returns the id in `sent` after which to wait for more (0-0: call again at once), then the id, number and JSON of each
# request.
# First, requests whose workers fell silent wait again at their old position. Then the tenant with the fewest requests
# at this worker is next, among equal ones the one with the lowest turn; the tenants with the lowest turns, as many as
# are held plus requested, include all that can be next. If expired requests were dropped, further tenants may have
# some: the caller calls again at once.
TAKE: Final = (
    _DROP_ABANDONED
    + """
local time = redis.call('TIME')
local now, turn = time[1] * 1000 + math.floor(time[2] / 1000), time[1] * 1000000 + time[2]
drop_abandoned(KEYS[4], KEYS[1], KEYS[2], ARGV[6], ARGV[7], now)
local most, each, checks = tonumber(ARGV[2]), tonumber(ARGV[3]), 1000
for _, id in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '(0', now, 'LIMIT', 0, 256)) do
  local known = redis.call('HMGET', ARGV[7] .. id, 'tenant', 'number')
  if known[1] then
    redis.call('HDEL', ARGV[7] .. id, 'worker')
    redis.call('ZADD', KEYS[1], 0, id)
    redis.call('ZADD', ARGV[6] .. known[1], known[2], id)
    redis.call('ZADD', KEYS[2], 'NX', known[2], known[1])
    redis.call('PEXPIRE', ARGV[6] .. known[1], ARGV[5])
    redis.call('PEXPIRE', KEYS[2], ARGV[5])
  else
    redis.call('ZREM', KEYS[1], id)
  end
end
local held, tenants = {}, 0
for at = 9, #ARGV, 2 do
  held[ARGV[at]] = tonumber(ARGV[at + 1])
  tenants = tenants + 1
end
local ready = redis.call('ZRANGE', KEYS[2], 0, tenants + most - 1)
local last = redis.call('XREVRANGE', KEYS[3], '+', '-', 'COUNT', 1)
local found, dropped = {#last > 0 and last[1][1] or '0-1'}, false
while (#found - 1) / 3 < most do
  local best, fewest = nil, each
  for at, tenant in ipairs(ready) do
    local here = held[tenant] or 0
    if here < fewest then best, fewest = at, here end
  end
  if checks == 0 or (not best and dropped) then found[1] = '0-0' end
  if checks == 0 or not best then break end
  checks = checks - 1
  local tenant = ready[best]
  local queue = ARGV[6] .. tenant
  local id = redis.call('ZPOPMIN', queue)[1]
  local known = id and redis.call('HMGET', ARGV[7] .. id, 'number', 'request') or {}
  if known[2] then
    redis.call('HSET', ARGV[7] .. id, 'worker', ARGV[1])
    redis.call('ZADD', KEYS[1], now + ARGV[4], id)
    redis.call('SET', ARGV[8] .. id, '1', 'PX', ARGV[4])
    for _, part in ipairs({id, known[1], known[2]}) do table.insert(found, part) end
    held[tenant] = fewest + 1
    turn = turn + 1
    redis.call('ZADD', KEYS[2], string.format('%.0f', turn), tenant)
    table.insert(ready, table.remove(ready, best))
    best = #ready
  elseif id then
    redis.call('ZREM', KEYS[1], id)
  end
  if redis.call('EXISTS', queue) == 0 then
    redis.call('ZREM', KEYS[2], tenant)
    table.remove(ready, best)
    dropped = true
  end
end
return found
"""
)

# KEYS: 1 wanted, 2 waiting, 3 alive, 4 queue, 5 turns.  ARGV: 1 request id, 2 tenant.
# After its deadline a request is no longer wanted, but may still be in its queue.
CANCEL: Final = """
redis.call('ZREM', KEYS[2], ARGV[1])
redis.call('ZREM', KEYS[4], ARGV[1])
if redis.call('EXISTS', KEYS[4]) == 0 then redis.call('ZREM', KEYS[5], ARGV[2]) end
return redis.call('DEL', KEYS[1], KEYS[3])
"""

# KEYS: 1 wanted, 2 waiting, 3 alive, 4 callers.  ARGV: 1 request id, 2 attempt, 3 tenant, 4 a caller's lifetime in ms.
# Returns 1 when no worker will answer. The call also renews the caller's lifetime.
LOST: Final = """
local known = redis.call('HMGET', KEYS[1], 'attempt', 'ended')
if not known[1] or tonumber(known[1]) < tonumber(ARGV[2]) then return 1 end
if redis.call('ZSCORE', KEYS[2], ARGV[1]) then
  local time = redis.call('TIME')
  local until_then = time[1] * 1000 + math.floor(time[2] / 1000) + ARGV[4]
  redis.call('ZADD', KEYS[4], 'XX', until_then, ARGV[3] .. '\\0' .. ARGV[1])
  return 0
end
if known[2] or redis.call('EXISTS', KEYS[3]) == 1 then return 0 end
return 1
"""

# KEYS: 1 wanted, 2 waiting, 3 alive, 4 events.
# ARGV: 1 request id, 2 attempt, 3 number, 4 worker, 5 event id, 6 event, 7 maximum of events, 8 TTL of events in ms,
# 9 lifetime in ms, 10 whether it is the last.  Returns 1 when the event is stored (perhaps by an earlier call), 0 when
# it is not wanted. With its first event a request stops waiting, and its JSON is deleted.
EMIT: Final = """
local known = redis.call('HMGET', KEYS[1], 'attempt', 'number', 'worker', 'ended')
if known[1] ~= ARGV[2] or known[2] ~= ARGV[3] or known[3] ~= ARGV[4] then return 0 end
if redis.call('HDEL', KEYS[1], 'request') == 1 then redis.call('ZREM', KEYS[2], ARGV[1]) end
if known[4] then return #redis.call('XRANGE', KEYS[4], ARGV[5], ARGV[5]) end
local added = redis.pcall('XADD', KEYS[4], 'MAXLEN', ARGV[7], ARGV[5], 'event', ARGV[6])
if type(added) == 'table' and added.err and not string.find(added.err, 'equal or smaller') then return added end
redis.call('PEXPIRE', KEYS[4], ARGV[8])
if ARGV[10] == '1' then
  redis.call('HSET', KEYS[1], 'ended', '1')
  redis.call('PEXPIRE', KEYS[1], ARGV[8])
  redis.call('DEL', KEYS[3])
else
  redis.call('SET', KEYS[3], '1', 'PX', ARGV[9])
end
return 1
"""

# KEYS: 1 wanted, 2 waiting, 3 alive, 4 events.  ARGV: 1 request id, 2 attempt, 3 number, 4 worker, 5 lifetime in ms,
# 6 TTL of events in ms.  Returns 1 when the request is still wanted from this worker.
HOLD: Final = """
local known = redis.call('HMGET', KEYS[1], 'attempt', 'number', 'worker', 'ended')
if known[1] ~= ARGV[2] or known[2] ~= ARGV[3] or known[3] ~= ARGV[4] or known[4] then return 0 end
local time = redis.call('TIME')
redis.call('ZADD', KEYS[2], 'XX', time[1] * 1000 + math.floor(time[2] / 1000) + ARGV[5], ARGV[1])
redis.call('SET', KEYS[3], '1', 'PX', ARGV[5])
redis.call('PEXPIRE', KEYS[4], ARGV[6])
return 1
"""
