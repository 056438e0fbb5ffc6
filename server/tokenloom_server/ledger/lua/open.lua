-- ARGV[3]: generation, 4: attempt, 5: mark, 6: opening as JSON, 7: journal member, 8: start state,
-- 9: parent, 10: world size, 11: batch size, 12: micro-steps between boundaries, 13: start index, 14: opened at;
-- 15…: the committed state.
if not may_write() then return refused() end
local current = field('generation')
if tonumber(current) == tonumber(ARGV[3]) and field('opening_mark') == ARGV[5] then return {1} end -- a repetition
local used = redis.call('HGET', ATTEMPTS, ARGV[4])
if used then return refused(used) end
if tonumber(ARGV[3]) <= tonumber(current) then return refused() end
redis.call('HSET', RUN, 'generation', ARGV[3], 'attempt', ARGV[4], 'opening_mark', ARGV[5], 'parent', ARGV[9],
  'world_size', ARGV[10], 'batch_size', ARGV[11], 'group_micro_steps', ARGV[12], 'start_index', ARGV[13],
  'opened_at', ARGV[14])
redis.call('HDEL', RUN, 'pin', 'group_steps') -- the second is the name that group_micro_steps once had
redis.call('HSET', OPENINGS, ARGV[3], ARGV[6])
redis.call('HSET', ATTEMPTS, ARGV[4], ARGV[3])
redis.call('DEL', SLOTS)
put_committed(15)
put_journal(ARGV[7], ARGV[8])
return {1}
