-- ARGV[3]: the pin; none removes it.
local refusal = refused()
if refusal then return refusal end
if ARGV[3] then redis.call('HSET', RUN, 'pin', ARGV[3]) else redis.call('HDEL', RUN, 'pin') end
return {'ok'}
