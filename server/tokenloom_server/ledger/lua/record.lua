-- KEYS: the run, then a hash of its history for each kind. ARGV[3…], for each kind: how many words follow, which are
-- fields and texts in turn; then how many fields to remove follow.
if not may_write() then return {0} end
local at = 3
for kind = 2, #KEYS do
  local words = tonumber(ARGV[at])
  for place = at + 1, at + words, 2 do redis.call('HSET', KEYS[kind], ARGV[place], ARGV[place + 1]) end
  at = at + words + 1
  local fields = tonumber(ARGV[at])
  for place = at + 1, at + fields do redis.call('HDEL', KEYS[kind], ARGV[place]) end
  at = at + fields + 1
end
return {1}
