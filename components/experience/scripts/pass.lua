-- Pass groups from one stage to the next, each exactly once however often it is passed.
-- KEYS: counters, state, source stream, target stream, partials
-- ARGV: source consumer group, stage it must be in, stage it enters, then (entry, group, oldest version, payload) a group
local passed = 0
for i = 4, #ARGV, 4 do
  local entry, group = ARGV[i], ARGV[i + 1]
  if redis.call('HGET', KEYS[2], group) == ARGV[2] then
    redis.call('XACK', KEYS[3], ARGV[1], entry)
    redis.call('XDEL', KEYS[3], entry)
    redis.call('XADD', KEYS[4], '*', 'g', group, 'v', ARGV[i + 2], 'p', ARGV[i + 3])
    redis.call('HSET', KEYS[2], group, ARGV[3])
    redis.call('HDEL', KEYS[5], group)
    passed = passed + 1
  end
end
local count = (#ARGV - 3) / 4
if passed > 0 then redis.call('HINCRBY', KEYS[1], ARGV[3], passed) end
if passed < count then redis.call('HINCRBY', KEYS[1], 'duplicates', count - passed) end
return passed
