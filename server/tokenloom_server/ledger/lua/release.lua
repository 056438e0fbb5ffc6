if not may_write() then return refused() end
redis.call('HSET', RUN, 'lease_lapses_at', '0')
return {1}
