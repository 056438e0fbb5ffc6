-- ARGV[3]: generation, 4: what the server knows as committed in it, 5: lease in seconds, 6: when all ranks had been
-- heard, or '', 7: holder.
if not may_write() or rolled_back(ARGV[3], ARGV[4]) then return refused() end
if field('lease_holder') ~= ARGV[7] then return refused() end
redis.call('HSET', RUN, 'lease_lapses_at', string.format('%.3f', now() + tonumber(ARGV[5])), 'lease_s', ARGV[5],
  'heard_at', ARGV[6])
return {1}
