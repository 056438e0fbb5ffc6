-- ARGV[3]: the ledger that the run is in; '' for this one.
if field('uid') ~= ARGV[1] or not has_epoch() then return refused() end
if ARGV[3] ~= '' then redis.call('HSET', RUN, 'elsewhere', ARGV[3]) else redis.call('HDEL', RUN, 'elsewhere') end
if field('lease_holder') then redis.call('HSET', RUN, 'lease_lapses_at', '0') end
return {1}
