-- Return the deployments that rest, and for how many more ms. Forget the rests that are over.
--
-- KEYS[1]  rests by deployment
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local all, answer = redis.call('HGETALL', KEYS[1]), {}
for place = 1, #all, 2 do
    local left = (tonumber(all[place + 1]) or 0) - now
    if left > 0 then
        answer[#answer + 1] = all[place]
        answer[#answer + 1] = left
    else
        redis.call('HDEL', KEYS[1], all[place])
    end
end
return answer
