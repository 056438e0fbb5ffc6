-- ARGV[3]: the pin; '' removes it.
if not may_write() then return refused() end
if ARGV[3] ~= '' then redis.call('HSET', RUN, 'pin', ARGV[3]) else redis.call('HDEL', RUN, 'pin') end
return {1}
