-- ARGV[3]: the new uid, 4: 'do', else nothing is written. The keys stay; only the field changes.
local refusal = refused()
if refusal then
  local repeated = refusal[1] == 'renamed' and refusal[2] == ARGV[3]
  if not repeated then return refusal end
  local epoch = field('epoch')
  if tonumber(epoch) ~= tonumber(ARGV[2]) then return {'not_leader', epoch} end
  return {'ok'}
end
local generation = field('generation')
if generation ~= '0' then return {'opened', generation} end
if ARGV[4] == 'do' then redis.call('HSET', RUN, 'uid', ARGV[3]) end
return {'ok'}
