-- ARGV[3]: the new uid, 4: 'do', else nothing is written. The keys stay; only the field changes.
local uid = field('uid')
if (uid ~= ARGV[1] and uid ~= ARGV[3]) or not (is_here() and has_epoch()) then return refused() end
if uid ~= ARGV[1] then return {1} end -- a repetition
if field('generation') ~= '0' then return refused() end
if ARGV[4] == 'do' then redis.call('HSET', RUN, 'uid', ARGV[3]) end
return {1}
