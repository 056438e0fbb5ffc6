-- ARGV[3]: generation, 4: rank, 5: nonce.
local refusal = refused() or fenced(ARGV[3])
if refusal then return refusal end
redis.call('HSETNX', SLOTS, ARGV[4], ARGV[5])
if redis.call('HGET', SLOTS, ARGV[4]) ~= ARGV[5] then return {'slot'} end
return {'ok'}
