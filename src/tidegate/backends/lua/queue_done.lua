-- Remove these results. Recorded ones are remembered for a while, so that a repeated result is
-- recognized.
--
-- KEYS[1]  the list of results
-- ARGV     for how many ms they are remembered (0: not at all, they may be sent again at once), then
--          the ids
for i = 2, #ARGV do
    local sent = KEYS[1] .. ':sent:' .. ARGV[i]
    redis.call('HDEL', KEYS[1] .. ':kept', ARGV[i])
    if ARGV[1] == '0' then
        redis.call('DEL', sent)
    else
        redis.call('SET', sent, 'done', 'PX', ARGV[1])
    end
    redis.call('DEL', 'request-active:' .. ARGV[i], 'request-cancel:' .. ARGV[i])
end
