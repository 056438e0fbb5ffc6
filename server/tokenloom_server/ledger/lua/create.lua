-- ARGV[3]: name, ARGV[4]: stream, ARGV[5]: record.
local name = field('name')
if name and (name ~= ARGV[3] or field('uid') ~= ARGV[1] or not is_here()) then return refused() end
if not name then
  redis.call('HSET', RUN, 'name', ARGV[3], 'stream', ARGV[4], 'uid', ARGV[1], 'record', ARGV[5], 'epoch', '0',
    'generation', '0')
end
return {1}
