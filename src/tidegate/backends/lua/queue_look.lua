-- Return the counts of the queue, and the score of its first request.
--
-- KEYS[1]  the list of results
-- ARGV     the sorted set of requests
return {
    redis.call('ZCARD', ARGV[1]),
    redis.call('ZRANGE', ARGV[1], 0, 0, 'WITHSCORES')[2] or '0',
    redis.call('LLEN', KEYS[1]),
    redis.call('HLEN', KEYS[1] .. ':kept'),
    redis.call('LLEN', KEYS[1] .. ':dead'),
}
