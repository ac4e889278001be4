"""The Lua scripts of the lane on Redis: each is one step of a request's life, and happens whole or not at all."""

from __future__ import annotations

from typing import Final

GROUP: Final = "workers"

# KEYS: 1 wanted, 2 requests, 3 entry.
# ARGV: 1 attempt, 2 request, 3 ms that it is wanted, 4 ms that the stream of requests is kept, 5 most that may wait,
# 6 ms that its place in the stream is known beyond (3).
# A later attempt goes on with an answer that may have begun: it is never refused for others that wait.
SEND: Final = """
local known = redis.call('HGET', KEYS[1], 'attempt')
if known and tonumber(known) >= tonumber(ARGV[1]) then return 'known' end
if tonumber(ARGV[1]) == 1 and redis.call('XLEN', KEYS[2]) >= tonumber(ARGV[5]) then return 'full' end
local old = redis.call('HGET', KEYS[1], 'entry')
if old then
  redis.pcall('XACK', KEYS[2], 'workers', old)
  redis.call('XDEL', KEYS[2], old)
end
local entry = redis.call('XADD', KEYS[2], '*', 'request', ARGV[2])
redis.call('DEL', KEYS[1])
redis.call('HSET', KEYS[1], 'attempt', ARGV[1], 'entry', entry)
redis.call('PEXPIRE', KEYS[1], ARGV[3])
redis.call('SET', KEYS[3], entry, 'PX', tonumber(ARGV[3]) + tonumber(ARGV[6]))
if redis.call('PTTL', KEYS[2]) < tonumber(ARGV[4]) then redis.call('PEXPIRE', KEYS[2], ARGV[4]) end
return 'sent'
"""

# KEYS: 1 wanted, 2 requests, 3 alive, 4 entry.
# Behind its deadline a request is no longer wanted, but may still lie in the stream.
CANCEL: Final = """
local entry = redis.call('GET', KEYS[4])
if entry then
  redis.pcall('XACK', KEYS[2], 'workers', entry)
  redis.call('XDEL', KEYS[2], entry)
end
return redis.call('DEL', KEYS[1], KEYS[3], KEYS[4])
"""

# KEYS: 1 wanted, 2 requests, 3 alive.  ARGV: 1 attempt.  Returns 1 when nobody will answer.
LOST: Final = """
local known = redis.call('HMGET', KEYS[1], 'attempt', 'entry', 'ended')
if not known[1] or tonumber(known[1]) < tonumber(ARGV[1]) then return 1 end
if known[3] or redis.call('EXISTS', KEYS[3]) == 1 then return 0 end
if #redis.call('XRANGE', KEYS[2], known[2], known[2]) > 0 then return 0 end
return 1
"""

# KEYS: 1 wanted, 2 requests, 3 alive.  ARGV: 1 attempt, 2 entry, 3 lifetime in ms.
# Returns 1 when the request is still wanted; else it is struck off.
TAKE: Final = """
local known = redis.call('HMGET', KEYS[1], 'attempt', 'entry')
if known[1] == ARGV[1] and known[2] == ARGV[2] then
  redis.call('SET', KEYS[3], '1', 'PX', ARGV[3])
  return 1
end
redis.call('XACK', KEYS[2], 'workers', ARGV[2])
redis.call('XDEL', KEYS[2], ARGV[2])
return 0
"""

# KEYS: 1 wanted, 2 requests, 3 alive, 4 events.
# ARGV: 1 attempt, 2 entry, 3 worker, 4 event id, 5 event, 6 most events, 7 ms that events are kept, 8 lifetime in ms,
# 9 whether it is the last.  Returns 1 when the event is there now (perhaps since before), 0 when nobody wants it.
EMIT: Final = """
local known = redis.call('HMGET', KEYS[1], 'attempt', 'entry', 'ended', 'worker')
if known[1] ~= ARGV[1] or known[2] ~= ARGV[2] then return 0 end
if known[4] and known[4] ~= ARGV[3] then return 0 end
if not known[4] then
  local mine = redis.pcall('XPENDING', KEYS[2], 'workers', ARGV[2], ARGV[2], 1)
  if mine.err or #mine == 0 or mine[1][2] ~= ARGV[3] then return 0 end
  redis.call('XACK', KEYS[2], 'workers', ARGV[2])
  redis.call('XDEL', KEYS[2], ARGV[2])
  redis.call('HSET', KEYS[1], 'worker', ARGV[3])
end
if known[3] then
  return #redis.call('XRANGE', KEYS[4], ARGV[4], ARGV[4])
end
local added = redis.pcall('XADD', KEYS[4], 'MAXLEN', ARGV[6], ARGV[4], 'event', ARGV[5])
if type(added) == 'table' and added.err and not string.find(added.err, 'equal or smaller') then return added end
redis.call('PEXPIRE', KEYS[4], ARGV[7])
if ARGV[9] == '1' then
  redis.call('HSET', KEYS[1], 'ended', '1')
  redis.call('PEXPIRE', KEYS[1], ARGV[7])
  redis.call('DEL', KEYS[3])
else
  redis.call('SET', KEYS[3], '1', 'PX', ARGV[8])
end
return 1
"""

# KEYS: 1 wanted, 2 requests, 3 alive, 4 events.  ARGV: 1 attempt, 2 entry, 3 worker, 4 lifetime in ms, 5 ms that events
# are kept.  Returns 1 when the request is still wanted from this worker.
HOLD: Final = """
local known = redis.call('HMGET', KEYS[1], 'attempt', 'entry', 'ended', 'worker')
if known[1] ~= ARGV[1] or known[2] ~= ARGV[2] or known[3] then return 0 end
if known[4] then
  if known[4] ~= ARGV[3] then return 0 end
else
  local mine = redis.pcall('XPENDING', KEYS[2], 'workers', ARGV[2], ARGV[2], 1)
  if mine.err or #mine == 0 or mine[1][2] ~= ARGV[3] then return 0 end
  redis.call('XCLAIM', KEYS[2], 'workers', ARGV[3], 0, ARGV[2], 'JUSTID')
end
redis.call('SET', KEYS[3], '1', 'PX', ARGV[4])
redis.call('PEXPIRE', KEYS[4], ARGV[5])
return 1
"""
