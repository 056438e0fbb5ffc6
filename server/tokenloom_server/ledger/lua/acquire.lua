-- ARGV[3]: holder, 4: lease in seconds, 5: the epoch to be beyond, 6: by how much the clock may go back (see Lease.left_s).
local refusal = refused()
if refusal then return refusal end
local time, holder = now(), field('lease_holder')
local left = tonumber(field('lease_lapses_at') or '0') - time
if left > tonumber(field('lease_s') or '0') + tonumber(ARGV[6]) then left = 0 end
if holder and holder ~= ARGV[3] and left > 0 then
  return {'held', holder, field('lease_acquired_at'), string.format('%.3f', left)}
end
local epoch = math.max(tonumber(field('epoch')), tonumber(ARGV[5])) + 1
redis.call('HSET', RUN, 'epoch', string.format('%d', epoch), 'lease_holder', ARGV[3],
  'lease_acquired_at', string.format('%.3f', time), 'lease_lapses_at', string.format('%.3f', time + tonumber(ARGV[4])),
  'lease_s', ARGV[4])
return {'ok', epoch}
