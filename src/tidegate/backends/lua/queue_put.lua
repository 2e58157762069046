-- Lay a request down, once: whoever asks again while it is out waits for the same one.
--
-- KEYS[1]  the list of results; everything we keep begins with its name
-- ARGV     id, the sorted set of requests, message, score, token, who asks, for how many ms it is remembered
local sent = KEYS[1] .. ':sent:' .. ARGV[1]
local state = redis.call('GET', sent)
if state == 'done' then
    -- Whoever had its answer recorded it: there is nothing to ask for again.
    return 'recorded'
end
if state then
    local token, score = string.match(state, '^%S+ (%S+) (%S+)$')
    redis.call('SET', sent, ARGV[6] .. ' ' .. token .. ' ' .. score, 'KEEPTTL')
    -- Whoever left it may have wanted it stopped; it is wanted again.
    redis.call('DEL', 'request-cancel:' .. ARGV[1])
    return 'out'
end
-- The set first: where its name belongs to something else this fails, and nothing was noted.
redis.call('ZADD', ARGV[2], ARGV[4], ARGV[3])
redis.call('SET', sent, ARGV[6] .. ' ' .. ARGV[5] .. ' ' .. ARGV[4], 'PX', ARGV[7])
redis.call('SET', 'request-active:' .. ARGV[1], ARGV[5], 'PX', ARGV[7])
redis.call('DEL', 'request-cancel:' .. ARGV[1])
return 'laid'
