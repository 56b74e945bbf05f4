-- Acknowledge the groups of every step up to one that a durable checkpoint covers.
-- KEYS: counters, state, scored, then the batch of each step in order
-- ARGV: the last step
for i = 4, #KEYS do
  local batch = redis.call('LRANGE', KEYS[i], 0, -1)
  for _, item in ipairs(batch) do
    local entry, group = string.match(item, '(%S+) (%S+)')
    redis.call('XACK', KEYS[3], 'train', entry)
    redis.call('XDEL', KEYS[3], entry)
    redis.call('HDEL', KEYS[2], group)
  end
  if #batch > 0 then redis.call('HINCRBY', KEYS[1], 'durable', #batch) end
  redis.call('DEL', KEYS[i])
end
redis.call('HSET', KEYS[1], 'durable_step', ARGV[1])
return redis.status_reply('OK')
