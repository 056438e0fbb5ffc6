-- ARGV[3]: generation, 4: attempt, 5: mark, 6: opening as JSON, 7: journal member, 8: start state,
-- 9: a revision as JSON ('' for none), 10…: the committed state.
if not may_write() then return refused() end
local current = field('generation')
if tonumber(current) == tonumber(ARGV[3]) and field('opening_mark') == ARGV[5] then return {1} end -- a repetition
local used = redis.call('HGET', ATTEMPTS, ARGV[4])
if used then return refused(used) end
if tonumber(ARGV[3]) <= math.max(tonumber(current), tonumber(field('closed_generation') or '0')) then return refused() end
if ARGV[9] ~= '' then
  if revision_changes() ~= tonumber(ARGV[#ARGV]) then return refused() end
  redis.call('RPUSH', REVISIONS, ARGV[9])
  redis.call('HINCRBY', RUN, 'revision_changes', 1)
end
redis.call('HSET', RUN, 'generation', ARGV[3], 'opening_mark', ARGV[5], 'heard_at', '')
redis.call('HDEL', RUN, 'pin')
redis.call('HINCRBY', RUN, 'pin_number', 1) -- what is pinned late is refused
redis.call('HSET', OPENINGS, ARGV[3], ARGV[6])
redis.call('HSET', ATTEMPTS, ARGV[4], ARGV[3])
redis.call('DEL', SLOTS)
put_committed(10)
put_journal(ARGV[7], ARGV[8])
return {1}
