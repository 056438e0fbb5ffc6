-- ARGV[3]: generation, 4: rank, 5: nonce.
if not (may_write() and is_present(ARGV[3])) then return refused() end
redis.call('HSETNX', SLOTS, ARGV[4], ARGV[5])
local nonce = redis.call('HGET', SLOTS, ARGV[4])
if nonce ~= ARGV[5] then return refused(nonce) end
return {1}
