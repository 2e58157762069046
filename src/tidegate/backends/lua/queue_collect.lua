-- Sort the results that came back, and report those that this process waits for. Reading removes
-- nothing: a result is kept until its outcome is recorded, whichever process sorted it.
--
-- KEYS[1]  the list of results
-- ARGV     how many to sort, the most bytes of one result, the most bytes of an answer, 1 to look
--          for lost ones, how many dead letters are kept, for how many ms, then the ids
local kept, dead = KEYS[1] .. ':kept', KEYS[1] .. ':dead'
local garbage, unknown, duplicate = 0, 0, 0

local function id_of(message)
    local id = string.match(message, '^%s*{%s*"id"%s*:%s*"([%w_%.%-]+)"')
    if id or #message > 262144 then
        return id
    end
    local fine, read = pcall(cjson.decode, message)
    return fine and type(read) == 'table' and type(read['id']) == 'string' and read['id'] or nil
end

local function bury(message)
    redis.call('LPUSH', dead, message)
    redis.call('LTRIM', dead, 0, ARGV[5] - 1)
    redis.call('PEXPIRE', dead, ARGV[6])
end

for _ = 1, tonumber(ARGV[1]) do
    local message = redis.call('RPOP', KEYS[1])
    if not message then
        break
    end
    local id = id_of(message)
    local state = id and redis.call('GET', KEYS[1] .. ':sent:' .. id)
    if not id then
        garbage = garbage + 1
        bury(message)
    elseif not state then
        unknown = unknown + 1
        bury(message)
    elseif state == 'done' or redis.call('HSETNX', kept, id, message) == 0 then
        duplicate = duplicate + 1
    end
end

local answer = { garbage, unknown, duplicate, redis.call('LLEN', KEYS[1]) }
local left = tonumber(ARGV[3])
for i = 7, #ARGV do
    local size = redis.call('HSTRLEN', kept, ARGV[i])
    if size == 0 then
        if ARGV[4] == '1' then
            local state = redis.call('GET', KEYS[1] .. ':sent:' .. ARGV[i])
            if not state then
                answer[#answer + 1] = { ARGV[i], 'lost', '' }
            elseif state == 'done' then
                answer[#answer + 1] = { ARGV[i], 'recorded', '' }
            end
        end
    elseif size > tonumber(ARGV[2]) then
        answer[#answer + 1] = { ARGV[i], 'too_large', '' }
    elseif size <= left or left == tonumber(ARGV[3]) then
        left = left - size
        answer[#answer + 1] = { ARGV[i], 'answered', redis.call('HGET', kept, ARGV[i]) }
    end
end
return answer
