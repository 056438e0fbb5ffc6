-- ARGV[3]: id, 4: text, 5: snapshot as JSON.
if not may_write() then return refused() end
if redis.call('HSETNX', SNAPSHOTS, ARGV[3], ARGV[5]) == 0 then
  local text = cjson.decode(redis.call('HGET', SNAPSHOTS, ARGV[3])).text
  if text ~= ARGV[4] then return refused(text) end
end
return {1}
