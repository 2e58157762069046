-- Return whether a request is out: in the set, taken by a processor, or answered and not recorded.
--
-- KEYS[1]  the list of results
-- ARGV     id
local state = redis.call('GET', KEYS[1] .. ':sent:' .. ARGV[1])
return state and state ~= 'done' and 1 or 0
