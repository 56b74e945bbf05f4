-- Begin a worker's leases anew; returns the entries that are still its own.
-- KEYS: tickets
-- ARGV: worker, then the entries
local own = {}
for i = 2, #ARGV do
  local pending = redis.call('XPENDING', KEYS[1], 'rollout', ARGV[i], ARGV[i], 1)[1]
  if pending and pending[2] == ARGV[1] then
    redis.call('XCLAIM', KEYS[1], 'rollout', ARGV[1], 0, ARGV[i], 'JUSTID')
    own[#own + 1] = ARGV[i]
  end
end
return own
