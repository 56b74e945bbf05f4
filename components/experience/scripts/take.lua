-- Take the batch of a training step: the one recorded for it, or B scored groups that are fresh enough.
-- KEYS: counters, state, scored, ready, batch of this step
-- ARGV: step, B, max staleness
-- `ready` lists delivered groups not yet in a batch as "entry group oldest-version", in order of arrival.
local recorded = redis.call('LRANGE', KEYS[5], 0, -1)
if #recorded == 0 then
  local read = redis.call('XREADGROUP', 'GROUP', 'train', 'train', 'COUNT', 4 * ARGV[2], 'STREAMS', KEYS[3], '>')
  if read then
    for _, entry in ipairs(read[1][2]) do
      redis.call('RPUSH', KEYS[4], entry[1] .. ' ' .. entry[2][2] .. ' ' .. entry[2][4])
    end
  end
  local version, stale = tonumber(ARGV[1]) - 1, 0
  local fresh = {}
  for _, item in ipairs(redis.call('LRANGE', KEYS[4], 0, -1)) do
    local entry, group, oldest = string.match(item, '(%S+) (%S+) (%S+)')
    if version - tonumber(oldest) > tonumber(ARGV[3]) then
      redis.call('XACK', KEYS[3], 'train', entry)
      redis.call('XDEL', KEYS[3], entry)
      redis.call('HDEL', KEYS[2], group)
      redis.call('LREM', KEYS[4], 1, item)
      stale = stale + 1
    else
      fresh[#fresh + 1] = {entry, group}
    end
  end
  if stale > 0 then
    redis.call('HINCRBY', KEYS[1], 'dropped', stale)
    redis.call('HINCRBY', KEYS[1], 'dropped:stale', stale)
  end
  if #fresh < tonumber(ARGV[2]) then return {} end
  for i = 1, tonumber(ARGV[2]) do
    redis.call('LPOP', KEYS[4])
    redis.call('RPUSH', KEYS[5], fresh[i][1] .. ' ' .. fresh[i][2])
    redis.call('HSET', KEYS[2], fresh[i][2], 'trained')
  end
  redis.call('HINCRBY', KEYS[1], 'trained', ARGV[2])
  recorded = redis.call('LRANGE', KEYS[5], 0, -1)
end
local out = {}
for _, item in ipairs(recorded) do
  local entry = string.match(item, '%S+')
  out[#out + 1] = redis.call('XRANGE', KEYS[3], entry, entry)[1][2][6]
end
return out
