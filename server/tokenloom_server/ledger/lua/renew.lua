-- ARGV[3]: generation, 4: what the server knows as committed in it, 5: lease in seconds, 6: when all ranks had been
-- heard, or '', 7: holder.
local refusal = refused() or rolled_back(ARGV[3], ARGV[4])
if refusal then return refusal end
local holder = field('lease_holder')
if holder ~= ARGV[7] then return {'twice', holder, field('name')} end
redis.call('HSET', RUN, 'lease_lapses_at', string.format('%.3f', now() + tonumber(ARGV[5])), 'lease_s', ARGV[5],
  'heard_at', ARGV[6])
return {'ok'}
