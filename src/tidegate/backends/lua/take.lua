-- Take from a lent block, or learn what to do instead.
--
-- KEYS[1]  the block of one set of budgets
-- ARGV     requests asked for, tokens of each, how many of the requests were not counted before, how
--          long a lender may take
--
-- Answers: {'granted', how many, for how many ms more, the store's grant}
--          {'resting', for how many ms, the budget that is spent, the tokens that it has left for
--              smaller requests}
--          {'busy'}  another process is fetching a block
--          {'lend', this server's time, how many requests were asked for since the last block}
--              Borrow a block and deposit it soon. The count is 0 while the store had too little
--              lately: a part that no process takes in time would be lost.
local KEEP_MS = 120000
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local asked, each = tonumber(ARGV[1]), tonumber(ARGV[2])
local block = redis.call('HMGET', KEYS[1], 'requests', 'tokens', 'from', 'till', 'grant', 'rest_till', 'rest_each', 'wait_till', 'spent', 'lender_till', 'tight_till', 'at', 'left_tokens')
local function number(place) return tonumber(block[place] or '0') or 0 end
-- Lua would write a large number with an exponent.
local function whole(value) return string.format('%.0f', value) end

-- This server's clock went back: what was written before would be valid until it has caught up.
if number(12) > now then
    redis.call('DEL', KEYS[1])
    block = {}
end
redis.call('HINCRBY', KEYS[1], 'asked', ARGV[3])
redis.call('PEXPIRE', KEYS[1], KEEP_MS)

-- If the clock went back to before the block's beginning, the block would live too long.
if number(1) > 0 and number(3) <= now and now < number(4) then
    local count = math.min(asked, number(1))
    if each > 0 then
        count = math.min(count, math.floor(number(2) / each))
    end
    if count > 0 then
        redis.call('HSET', KEYS[1], 'requests', whole(number(1) - count), 'tokens', whole(number(2) - count * each))
        return {'granted', count, number(4) - now, block[5]}
    end
end
if number(6) > now and each >= number(7) then
    return {'resting', number(8) - now, block[9], number(13)}
end
if number(10) > now then
    return {'busy'}
end
local demand = 0
if number(11) <= now then
    demand = tonumber(redis.call('HGET', KEYS[1], 'asked'))
end
redis.call('HSET', KEYS[1], 'lender_till', now + tonumber(ARGV[4]), 'asked', 0, 'at', now)
return {'lend', now, demand}
