-- ARGV[3]: name, ARGV[4]: stream, ARGV[5]: record.
local name = field('name')
if name then
  if name ~= ARGV[3] or field('uid') ~= ARGV[1] then return {'taken', name} end
  return {'ok'}
end
redis.call('HSET', RUN, 'name', ARGV[3], 'stream', ARGV[4], 'uid', ARGV[1], 'record', ARGV[5], 'epoch', '0',
  'generation', '0')
return {'ok'}
