-- Drop groups for a reason; a group no longer in the stage is left alone.
-- KEYS: counters, state, stream
-- ARGV: consumer group, stage, reason, then (entry, group) a group
local dropped = 0
for i = 4, #ARGV, 2 do
  if redis.call('HGET', KEYS[2], ARGV[i + 1]) == ARGV[2] then
    redis.call('XACK', KEYS[3], ARGV[1], ARGV[i])
    redis.call('XDEL', KEYS[3], ARGV[i])
    redis.call('HDEL', KEYS[2], ARGV[i + 1])
    dropped = dropped + 1
  end
end
if dropped > 0 then
  redis.call('HINCRBY', KEYS[1], 'dropped', dropped)
  redis.call('HINCRBY', KEYS[1], 'dropped:' .. ARGV[3], dropped)
end
return dropped
