-- Note that a deployment rests. The longer of two rests counts.
--
-- KEYS[1]  rests by deployment
-- ARGV     deployment, for how many ms, the channel to notify
local time = redis.call('TIME')
local till = time[1] * 1000 + math.floor(time[2] / 1000) + tonumber(ARGV[2])
if till > (tonumber(redis.call('HGET', KEYS[1], ARGV[1]) or '0') or 0) then
    redis.call('HSET', KEYS[1], ARGV[1], till)
    redis.call('PUBLISH', ARGV[3], 'rest')
end
