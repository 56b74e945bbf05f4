-- Lease tickets to a rollout worker: lapsed ones first, then new ones while the staleness bound has room.
-- KEYS: counters, state, tickets, verified, partials
-- ARGV: worker, limit, version, digest, batch groups B, max staleness, steps, lease (ms)
local proof = redis.call('HGET', KEYS[4], ARGV[1])
if proof ~= ARGV[3] .. ':' .. ARGV[4] then
  return redis.error_reply('UNVERIFIED worker ' .. ARGV[1] .. ' asked for work with version ' .. ARGV[3] .. ', proven is ' .. (proof or 'none'))
end
local limit, version, batch = tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[5])
local out = {}
-- A lapsed ticket was issued for a version. A worker that holds an older one (training went back to a checkpoint) would
-- sample it too stale for the step it is meant for, so it waits until training is there again.
for _, pending in ipairs(redis.call('XPENDING', KEYS[3], 'rollout', 'IDLE', ARGV[8], '-', '+', 10000)) do
  if #out == limit then break end
  local entry = redis.call('XRANGE', KEYS[3], pending[1], pending[1])[1]
  if entry and tonumber(entry[2][4]) <= version then
    redis.call('XCLAIM', KEYS[3], 'rollout', ARGV[1], 0, pending[1], 'JUSTID')
    redis.call('HINCRBY', KEYS[1], 'reclaimed', 1)
    out[#out + 1] = {entry[1], entry[2][2], redis.call('HGET', KEYS[5], entry[2][2]) or ''}
  end
end
local counted = redis.call('HMGET', KEYS[1], 'issued', 'dropped')
local standing = (tonumber(counted[1]) or 0) - (tonumber(counted[2]) or 0)
-- AReaL's admission rule (arXiv 2505.24298), with the version the worker holds: what it samples now is trained on at
-- the latest max_staleness versions later.
local bound = math.min((tonumber(ARGV[6]) + version + 1), tonumber(ARGV[7])) * batch
local fresh = math.min(limit - #out, bound - standing)
for _ = 1, fresh do
  local group = redis.call('HINCRBY', KEYS[1], 'issued', 1)
  redis.call('HSET', KEYS[2], group, 'running')
  redis.call('XADD', KEYS[3], '*', 'g', group, 'v', version)
end
if fresh > 0 then
  local read = redis.call('XREADGROUP', 'GROUP', 'rollout', ARGV[1], 'COUNT', fresh, 'STREAMS', KEYS[3], '>')
  for _, entry in ipairs(read[1][2]) do out[#out + 1] = {entry[1], entry[2][2], ''} end
end
return out
