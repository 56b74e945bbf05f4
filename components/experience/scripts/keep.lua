-- Keep what a worker has of groups it cannot finish, for the worker that leases them next.
-- KEYS: state, partials
-- ARGV: (group, payload) a group
for i = 1, #ARGV, 2 do
  if redis.call('HGET', KEYS[1], ARGV[i]) == 'running' then redis.call('HSET', KEYS[2], ARGV[i], ARGV[i + 1]) end
end
return redis.status_reply('OK')
