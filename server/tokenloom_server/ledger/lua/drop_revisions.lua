-- ARGV[3]: the first number to remove.
if not may_write() then return refused() end
if revision_changes() ~= tonumber(ARGV[#ARGV]) then return {1, revision_changes()} end -- a repetition
local left = math.max(tonumber(ARGV[3]) - 1, 0)
if left == 0 then redis.call('DEL', REVISIONS) else redis.call('LTRIM', REVISIONS, 0, left - 1) end
return {1, redis.call('HINCRBY', RUN, 'revision_changes', 1)}
