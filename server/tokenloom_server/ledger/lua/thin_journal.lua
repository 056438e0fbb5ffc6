-- Members are generation:index with leading zeros, so their order is (generation, index).
if not may_write() then return refused() end
local generation, place = nil, 0
for _, member in ipairs(redis.call('ZRANGE', JOURNAL, 0, -1)) do
  local of = string.sub(member, 1, 16)
  if of ~= generation then generation, place = of, 0 end
  place = place + 1
  if place % 2 == 0 then
    redis.call('HINCRBY', RUN, 'journal_bytes', -redis.call('HSTRLEN', STATES, member))
    redis.call('ZREM', JOURNAL, member)
    redis.call('HDEL', STATES, member)
  end
end
return {1}
