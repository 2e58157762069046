-- Put down a block that the store lent, or the note that it lends nothing for a while. Return the
-- rest of the last block.
--
-- KEYS[1]  the block of one set of budgets
-- ARGV     requests, tokens, from, till (this server's time, read before the store was asked), the
--          store's grant, for how long no process needs to ask the store, for requests of how many
--          tokens or more, until when to wait, the spent budget, the tokens that it has left for
--          smaller requests
--
-- Answers: {the last block's grant, requests that were left of it, tokens}
local KEEP_MS = 120000
-- For this long after the store lent less than it was asked for, it is asked only for what one
-- process needs.
local TIGHT_MS = 90000
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local old = redis.call('HMGET', KEYS[1], 'grant', 'requests', 'tokens')
local left = tonumber(old[2] or '0') or 0
local rest_till, wait_till = now + tonumber(ARGV[6]), tonumber(ARGV[8])
if left > 0 then
    -- The rest goes back to the store, which did not know of it when it computed that moment.
    wait_till = math.min(wait_till, rest_till)
end
-- A block that came too late is put down all the same: no process takes from it, and the next
-- deposit returns it to the store.
redis.call('HSET', KEYS[1], 'requests', ARGV[1], 'tokens', ARGV[2], 'from', ARGV[3], 'till', ARGV[4], 'grant', ARGV[5],
    'rest_till', string.format('%.0f', rest_till), 'rest_each', ARGV[7], 'wait_till', string.format('%.0f', wait_till), 'spent', ARGV[9], 'left_tokens', ARGV[10], 'at', now)
if tonumber(ARGV[6]) > 0 then
    redis.call('HSET', KEYS[1], 'tight_till', now + TIGHT_MS)
end
redis.call('HDEL', KEYS[1], 'lender_till')
redis.call('PEXPIRE', KEYS[1], KEEP_MS)
return {old[1] or '', left, tonumber(old[3] or '0') or 0}
