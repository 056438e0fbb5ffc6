-- ARGV[3]: number, 4: sample index, 5: revision as JSON. The list has no gaps, so its length is the newest number.
local refusal = refused()
if refusal then return refusal end
local number, newest = tonumber(ARGV[3]), redis.call('LLEN', REVISIONS)
if number >= 1 and redis.call('LINDEX', REVISIONS, number - 1) == ARGV[5] then return {'ok'} end -- a repetition
if number ~= newest + 1 then return {'revision', newest} end
local last = newest > 0 and cjson.decode(redis.call('LINDEX', REVISIONS, -1)).sample_index or 0
if tonumber(ARGV[4]) < last then return {'too_early', newest, string.format('%d', last)} end
redis.call('RPUSH', REVISIONS, ARGV[5])
return {'ok'}
