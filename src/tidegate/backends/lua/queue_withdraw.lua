-- Take a request back, if it is still ours: remove it from the set, or ask the processor that took
-- it to cancel it.
--
-- KEYS[1]  the list of results
-- ARGV     id, the sorted set of requests, the process that asks
local sent = KEYS[1] .. ':sent:' .. ARGV[1]
local owner, token, score = string.match(redis.call('GET', sent) or '', '^(%S+) (%S+) (%S+)$')
if owner ~= ARGV[3] then
    return 'not_ours'
end
for _, message in ipairs(redis.call('ZRANGEBYSCORE', ARGV[2], score, score, 'LIMIT', 0, 4096)) do
    if string.find(message, '"' .. token .. '"', 1, true) then
        redis.call('ZREM', ARGV[2], message)
        redis.call('DEL', sent, 'request-active:' .. ARGV[1])
        return 'withdrawn'
    end
end
if redis.call('HEXISTS', KEYS[1] .. ':kept', ARGV[1]) == 0 then
    redis.call('SET', 'request-cancel:' .. ARGV[1], token, 'PX', math.max(redis.call('PTTL', sent), 1))
end
return 'taken'
