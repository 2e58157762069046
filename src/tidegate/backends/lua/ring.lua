-- Wake the loops of every process that listens.
--
-- KEYS[1]  the channel
-- ARGV     the process that rings, or a notice
return redis.call('PUBLISH', KEYS[1], ARGV[1])
