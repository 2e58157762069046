-- Put a request into the queue, once: a process that asks again while it is out waits for the same
-- one.
--
-- KEYS[1]  the list of results; everything we keep begins with its name
-- ARGV     id, the sorted set of requests, message, score, token, the process that asks, for how
--          many ms it is remembered
local sent = KEYS[1] .. ':sent:' .. ARGV[1]
local state = redis.call('GET', sent)
if state == 'done' then
    -- Its outcome is recorded: it need not be sent again.
    return 'recorded'
end
if state then
    local token, score = string.match(state, '^%S+ (%S+) (%S+)$')
    redis.call('SET', sent, ARGV[6] .. ' ' .. token .. ' ' .. score, 'KEEPTTL')
    -- An earlier process may have asked to cancel it; now it is wanted again.
    redis.call('DEL', 'request-cancel:' .. ARGV[1])
    return 'out'
end
-- The set first: if its key has another type, this fails before anything is noted.
redis.call('ZADD', ARGV[2], ARGV[4], ARGV[3])
redis.call('SET', sent, ARGV[6] .. ' ' .. ARGV[5] .. ' ' .. ARGV[4], 'PX', ARGV[7])
redis.call('SET', 'request-active:' .. ARGV[1], ARGV[5], 'PX', ARGV[7])
redis.call('DEL', 'request-cancel:' .. ARGV[1])
return 'laid'
