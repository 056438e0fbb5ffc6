-- ARGV[3]: the pin; '' removes it. 4: the number of this change, by the server epoch.
if not may_write() then return refused() end
if tonumber(ARGV[4]) < tonumber(field('pin_number') or '0') then return refused() end -- it came late
redis.call('HSET', RUN, 'pin_number', ARGV[4])
if ARGV[3] ~= '' then redis.call('HSET', RUN, 'pin', ARGV[3]) else redis.call('HDEL', RUN, 'pin') end
return {1}
