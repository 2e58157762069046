-- Move kept results to the dead letters if no process can wait for them, because the time of their
-- requests is over.
--
-- KEYS[1]  the list of results
-- ARGV     how many to look at, how many dead letters are kept, for how many ms
local kept, dead = KEYS[1] .. ':kept', KEYS[1] .. ':dead'
local late = 0
for _, id in ipairs(redis.call('HRANDFIELD', kept, ARGV[1])) do
    if redis.call('EXISTS', KEYS[1] .. ':sent:' .. id) == 0 then
        redis.call('LPUSH', dead, redis.call('HGET', kept, id))
        redis.call('HDEL', kept, id)
        late = late + 1
    end
end
if late > 0 then
    redis.call('LTRIM', dead, 0, ARGV[2] - 1)
    redis.call('PEXPIRE', dead, ARGV[3])
end
return late
