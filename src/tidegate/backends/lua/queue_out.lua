-- Whether a request is out, wherever it is: in the set, with whoever took it, or answered and not recorded.
--
-- KEYS[1]  the list of results
-- ARGV     id
local state = redis.call('GET', KEYS[1] .. ':sent:' .. ARGV[1])
return state and state ~= 'done' and 1 or 0
