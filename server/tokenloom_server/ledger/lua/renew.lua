-- ARGV[3]: holder, 4: lease in seconds, 5: when all ranks had been heard, or '', 6: generation, 7: what the server knows
-- as committed in it.
if not may_write() or rolled_back(ARGV[6], ARGV[7]) then return refused() end
if field('lease_holder') ~= ARGV[3] then return refused() end
redis.call('HSET', RUN, 'lease_lapses_at', string.format('%.3f', now() + tonumber(ARGV[4])), 'lease_s', ARGV[4],
  'heard_at', ARGV[5])
return {1}
