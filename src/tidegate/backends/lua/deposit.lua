-- Put down a block that the store lent, or word that it lends nothing for a while; and fetch what was left of the last one.
--
-- KEYS[1]  the block of one set of budgets
-- ARGV     requests, tokens, from, till (this server's time, read before the store was asked), the store's grant,
--          for how long nobody needs to ask the store, with how many tokens each or more, until when to wait, the spent budget
--
-- Answers: {the last block's grant, requests that were left of it, tokens}
local KEEP_MS = 60000
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local old = redis.call('HMGET', KEYS[1], 'grant', 'requests', 'tokens')
-- One that came too late is put down all the same: nobody takes from it, and whoever comes next gives it back to the store.
redis.call('HSET', KEYS[1], 'requests', ARGV[1], 'tokens', ARGV[2], 'from', ARGV[3], 'till', ARGV[4], 'grant', ARGV[5],
    'rest_till', now + tonumber(ARGV[6]), 'rest_each', ARGV[7], 'wait_till', ARGV[8], 'spent', ARGV[9])
redis.call('HDEL', KEYS[1], 'lender_till')
redis.call('PEXPIRE', KEYS[1], KEEP_MS)
return {old[1] or '', tonumber(old[2] or '0') or 0, tonumber(old[3] or '0') or 0}
