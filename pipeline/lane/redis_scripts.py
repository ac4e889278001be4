"""The Lua scripts of the lane on Redis: each is one step of a request's life cycle, and is atomic.

The work of a script is bounded, however many requests wait: a call drops at most 256 requests whose callers died or
whose deadline has passed, and the comment above `TAKE` gives its bounds. A command takes O(log n), one that reads m
tenants O(log n + m). Scripts that change queues get the prefix of the lane's keys and the model as their first
arguments, and make the keys of queues themselves: a request may wait in another queue than it was sent to.
"""

from __future__ import annotations

from typing import Final

# A request that is addressed to a worker ("@NAME") waits in that worker's queue and in the one of all such requests
# ("@"), from which other workers take it. If `wanted` has expired the queue is not known. Then the entries in all
# queues but the worker's own are removed: only these count. The worker's own entry is removed when it reads it.
_QUEUES: Final = """
local lane, model = ARGV[1], ARGV[2]
local function is_addressed(name) return string.sub(name, 1, 1) == '@' end
local function of_queue(kind, name) return lane .. kind .. ':' .. model .. (name == '' and '' or '/' .. name) end
local function queue_of(name, tenant) return of_queue('queue', name) .. ':' .. tenant end
local function turns_of(name) return of_queue('turns', name) end
local function queues_of(name)
  if not name then return {'', 'decode', '@'} end
  return is_addressed(name) and {name, '@'} or {name}
end
local function extend(key, ttl)
  if redis.call('PTTL', key) < tonumber(ttl) then redis.call('PEXPIRE', key, ttl) end
end
local function enqueue(name, tenant, id, number, ttl)
  for _, each in ipairs(queues_of(name)) do
    redis.call('ZADD', queue_of(each, tenant), number, id)
    redis.call('ZADD', turns_of(each), 'NX', number, tenant)
    extend(queue_of(each, tenant), ttl)
    extend(turns_of(each), ttl)
  end
end
local function dequeue(name, tenant, id)
  for _, each in ipairs(queues_of(name)) do
    local queue = queue_of(each, tenant)
    if redis.call('ZREM', queue, id) == 1 and redis.call('EXISTS', queue) == 0 then
      redis.call('ZREM', turns_of(each), tenant)
    end
  end
end
"""

# Drops requests whose answer hasn't begun, and whose callers have been silent for their lifetime or whose deadline has
# passed.
_DROP_ABANDONED: Final = (
    _QUEUES
    + """
local function drop_abandoned(callers, waiting, now)
  for _, member in ipairs(redis.call('ZRANGEBYSCORE', callers, '-inf', now, 'LIMIT', 0, 256)) do
    redis.call('ZREM', callers, member)
    local middle = string.find(member, '\\0', 1, true)
    local tenant, id = string.sub(member, 1, middle - 1), string.sub(member, middle + 1)
    if redis.call('ZREM', waiting, id) == 1 then
      dequeue(redis.call('HGET', lane .. 'wanted:' .. id, 'queue'), tenant, id)
      redis.call('DEL', lane .. 'wanted:' .. id)
    end
  end
end
"""
)

# KEYS: 1 wanted, 2 waiting, 3 sent, 4 callers.
# ARGV: 1 prefix, 2 model, 3 request id, 4 queue, 5 tenant, 6 attempt, 7 request, 8 ms for which it is wanted, 9 TTL of
# the queues in ms, 10 maximum of waiting requests, 11 maximum of one tenant, 12 lifetime of a caller in ms.
# A later attempt continues an answer that may have begun: it is never refused because others wait.
SEND: Final = (
    _DROP_ABANDONED
    + """
local time = redis.call('TIME')
local now, caller = time[1] * 1000 + math.floor(time[2] / 1000), ARGV[5] .. '\\0' .. ARGV[3]
local caller_until = now + math.min(ARGV[12], ARGV[8])
local known = redis.call('HMGET', KEYS[1], 'attempt', 'queue', 'tenant')
if known[1] then redis.call('ZADD', KEYS[4], 'XX', caller_until, caller) end
drop_abandoned(KEYS[4], KEYS[2], now)
if known[1] and tonumber(known[1]) >= tonumber(ARGV[6]) then return 'known' end
if tonumber(ARGV[6]) == 1 then
  local own = 0
  for _, name in ipairs({'', 'decode', '@'}) do own = own + redis.call('ZCARD', queue_of(name, ARGV[5])) end
  if own >= tonumber(ARGV[11]) then return 'tenant full' end
  if redis.call('ZCARD', KEYS[2]) >= tonumber(ARGV[10]) then return 'full' end
end
dequeue(known[2], known[3] or ARGV[5], ARGV[3])
local number = time[1] * 1000000 + time[2]
local last = redis.call('XREVRANGE', KEYS[3], '+', '-', 'COUNT', 1)
if #last > 0 then number = math.max(number, tonumber(string.match(last[1][1], '%d+')) + 1) end
number = string.format('%.0f', number)
redis.call('DEL', KEYS[1])
redis.call(
  'HSET', KEYS[1], 'attempt', ARGV[6], 'number', number, 'tenant', ARGV[5], 'queue', ARGV[4], 'request', ARGV[7]
)
redis.call('PEXPIRE', KEYS[1], ARGV[8])
redis.call('ZADD', KEYS[2], 0, ARGV[3])
redis.call('ZADD', KEYS[4], caller_until, caller)
enqueue(ARGV[4], ARGV[5], ARGV[3], number, ARGV[9])
redis.call('XADD', KEYS[3], 'MAXLEN', 1, number .. '-0', 'request', ARGV[3])
for at = 2, 4 do extend(KEYS[at], ARGV[9]) end
return 'sent'
"""
)

# KEYS: 1 waiting, 2 callers.  ARGV: 1 prefix, 2 model.
COUNT: Final = (
    _DROP_ABANDONED
    + """
local time = redis.call('TIME')
drop_abandoned(KEYS[2], KEYS[1], time[1] * 1000 + math.floor(time[2] / 1000))
return redis.call('ZCARD', KEYS[1])
"""
)

# KEYS: 1 waiting, 2 sent, 3 callers.
# ARGV: 1 prefix, 2 model, 3 worker, 4 maximum of requests, 5 maximum of one tenant, 6 lifetime in ms, 7 TTL of the
# queues in ms, 8 number of queues, then the name of each queue and how long a request must have waited there in ms,
# then the name of each tenant with requests at the worker, and their number.
# Returns the id in `sent` after which to wait for more (0-0: call again at once), the ms until a request of these
# queues has waited long enough (-1: there is none), then the id, number and JSON of each request.
# First, at most 256 requests whose workers fell silent wait again at their old position, addressed to no worker. Then
# requests are taken one by one: of the tenant with the fewest requests at this worker; among equal ones from the first
# queue that has one, and there of the tenant with the lowest turn: when one of its requests was taken last from any of
# the call's queues. The tenants with the lowest turns, as many as are held plus requested, include all that can be
# next. In a queue with a minimum wait the lowest ones may not be due: there at least the first 1,000 are read.
# The bounds: the tenants of a queue are read with one command, and only if no queue before it has one of which the
# worker holds nothing. In a queue with a minimum wait the oldest entry of a tenant is read once when the tenant could
# be next, and again after an entry of this tenant was removed. So each such queue takes at most one read for each of
# its tenants (1,000, or as many as are held plus requested, if these are more) and for each removed entry. A call
# removes at most 1,000 entries. If some were of requests that are not wanted, tenants that it didn't read may be next:
# the caller calls again at once.
TAKE: Final = (
    _DROP_ABANDONED
    + """
local time = redis.call('TIME')
local now, micros = time[1] * 1000 + math.floor(time[2] / 1000), time[1] * 1000000 + time[2]
local turn = micros
drop_abandoned(KEYS[3], KEYS[1], now)
for _, id in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '(0', now, 'LIMIT', 0, 256)) do
  local wanted = lane .. 'wanted:' .. id
  local known = redis.call('HMGET', wanted, 'tenant', 'number', 'queue')
  if known[1] then
    local name = is_addressed(known[3] or '') and '' or known[3] or ''
    redis.call('HDEL', wanted, 'worker')
    redis.call('HSET', wanted, 'queue', name)
    redis.call('ZADD', KEYS[1], 0, id)
    enqueue(name, known[1], id, known[2], ARGV[7])
  else
    redis.call('ZREM', KEYS[1], id)
  end
end
local max_requests, max_each, max_removed, last_queue = tonumber(ARGV[4]), tonumber(ARGV[5]), 1000, 8 + 2 * ARGV[8]
local held, tenants, queues = {}, 0, {}
for at = last_queue + 1, #ARGV, 2 do
  held[ARGV[at]] = tonumber(ARGV[at + 1])
  tenants = tenants + 1
end
for at = 9, last_queue, 2 do
  local min_wait = tonumber(ARGV[at + 1]) * 1000
  local limit = math.max(tenants + max_requests, min_wait > 0 and 1000 or 0)
  table.insert(queues, {name = ARGV[at], min_wait = min_wait, limit = limit})
end
local found, turns, sent_at, due, dropped, again = {}, {}, {}, nil, false, false

local function is_due(queue, tenant)
  if queue.min_wait == 0 then return true end
  local key = queue_of(queue.name, tenant)
  sent_at[key] = sent_at[key] or tonumber(redis.call('ZRANGE', key, 0, 0, 'WITHSCORES')[2] or 0)
  local left = sent_at[key] + queue.min_wait - micros
  if left > 0 then due = math.min(due or left, left) end
  return left <= 0
end

-- The index of the queue's next tenant, if the worker holds fewer than `fewest` of it, and how many it holds. A tenant
-- that has nothing to take is replaced by false.
local function next_tenant(queue, fewest)
  local best, lowest = nil, 0
  queue.tenants = queue.tenants or redis.call('ZRANGE', turns_of(queue.name), 0, queue.limit - 1)
  for at, tenant in ipairs(queue.tenants) do
    local here, its_turn = held[tenant] or 0, turns[tenant] or 0
    if tenant and (here < fewest or (best and here == fewest and its_turn < lowest)) then
      if is_due(queue, tenant) then
        best, fewest, lowest = at, here, its_turn
      else
        queue.tenants[at] = false
      end
    end
    if best and fewest == 0 then break end
  end
  return best, fewest
end

while #found / 3 < max_requests do
  local queue, best, fewest = nil, nil, max_each
  for _, one in ipairs(queues) do
    local at, fewer = next_tenant(one, fewest)
    if at then queue, best, fewest = one, at, fewer end
    if fewest == 0 then break end
  end
  if max_removed == 0 or (not best and dropped) then again = true end
  if max_removed == 0 or not best then break end
  max_removed = max_removed - 1
  local tenant = queue.tenants[best]
  local key = queue_of(queue.name, tenant)
  local oldest = redis.call('ZPOPMIN', key)
  local id = oldest[1]
  local known = id and redis.call('HMGET', lane .. 'wanted:' .. id, 'number', 'request', 'queue') or {}
  if known[2] and tonumber(known[1]) == tonumber(oldest[2]) then
    dequeue(known[3], tenant, id)
    redis.call('HSET', lane .. 'wanted:' .. id, 'worker', ARGV[3])
    redis.call('ZADD', KEYS[1], now + ARGV[6], id)
    redis.call('SET', lane .. 'alive:' .. id, '1', 'PX', ARGV[6])
    for _, part in ipairs({id, known[1], known[2]}) do table.insert(found, part) end
    held[tenant] = fewest + 1
    turn = turn + 1
    turns[tenant] = turn
    local score = string.format('%.0f', turn)
    for _, one in ipairs(queues) do redis.call('ZADD', turns_of(one.name), 'XX', score, tenant) end
  elseif id and not known[2] then
    redis.call('ZREM', KEYS[1], id)
    dequeue(nil, tenant, id)
  end
  for _, one in ipairs(queues) do sent_at[queue_of(one.name, tenant)] = nil end
  if redis.call('EXISTS', key) == 0 then
    redis.call('ZREM', turns_of(queue.name), tenant)
    queue.tenants[best] = false
    dropped = true
  end
end

local last = redis.call('XREVRANGE', KEYS[2], '+', '-', 'COUNT', 1)
table.insert(found, 1, again and '0-0' or #last > 0 and last[1][1] or '0-1')
table.insert(found, 2, due and math.ceil(due / 1000) or -1)
return found
"""
)

# KEYS: 1 wanted, 2 waiting, 3 alive.  ARGV: 1 prefix, 2 model, 3 request id, 4 queue, 5 tenant.
# After its deadline a request is no longer wanted, but may still be in its queue, or in the general one.
CANCEL: Final = (
    _QUEUES
    + """
redis.call('ZREM', KEYS[2], ARGV[3])
for _, name in ipairs({ARGV[4], redis.call('HGET', KEYS[1], 'queue')}) do dequeue(name, ARGV[5], ARGV[3]) end
return redis.call('DEL', KEYS[1], KEYS[3])
"""
)

# KEYS: 1 wanted, 2 waiting, 3 alive, 4 callers.  ARGV: 1 request id, 2 attempt, 3 tenant, 4 a caller's lifetime in ms.
# Returns 1 when no worker will answer. The call also renews the caller's lifetime, up to the request's deadline.
LOST: Final = """
local known = redis.call('HMGET', KEYS[1], 'attempt', 'ended')
if not known[1] or tonumber(known[1]) < tonumber(ARGV[2]) then return 1 end
if redis.call('ZSCORE', KEYS[2], ARGV[1]) then
  local time = redis.call('TIME')
  local left = math.min(ARGV[4], redis.call('PTTL', KEYS[1]))
  local caller_until = time[1] * 1000 + math.floor(time[2] / 1000) + left
  redis.call('ZADD', KEYS[4], 'XX', caller_until, ARGV[3] .. '\\0' .. ARGV[1])
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
