-- ARGV[3]: number, 4: sample index, 5: revision as JSON, 6: the generation that it closes, or 0. The list has no gaps, so
-- its length is the newest number.
if not may_write() then return refused() end
local number, newest = tonumber(ARGV[3]), redis.call('LLEN', REVISIONS)
local same = number >= 1 and redis.call('LINDEX', REVISIONS, number - 1)
if same == ARGV[5] then return {1, revision_changes()} end -- a repetition
if revision_changes() ~= tonumber(ARGV[#ARGV]) then return refused(same) end
if number ~= newest + 1 then return refused(same) end
if ARGV[6] ~= '0' and not is_present(ARGV[6]) then return refused(same) end
local last = newest > 0 and cjson.decode(redis.call('LINDEX', REVISIONS, -1)).sample_index or 0
if tonumber(ARGV[4]) < last then return refused(same) end
if ARGV[6] ~= '0' then redis.call('HSET', RUN, 'closed_generation', ARGV[6]) end
redis.call('RPUSH', REVISIONS, ARGV[5])
return {1, redis.call('HINCRBY', RUN, 'revision_changes', 1)}
