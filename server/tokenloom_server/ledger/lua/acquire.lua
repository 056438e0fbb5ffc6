-- ARGV[3]: holder, 4: lease in seconds, 5: the epoch to be beyond, 6: by how much the clock may go back (see Lease.left_s).
if not may_write() then return refused() end
local holder = field('lease_holder')
local left = tonumber(field('lease_lapses_at') or '0') - now()
if left > tonumber(field('lease_s') or '0') + tonumber(ARGV[6]) then left = 0 end
if holder and holder ~= ARGV[3] and left > 0 then return refused() end
-- Nobody trains (0): the last word of a server that let its lease go, and of no other.
if tonumber(field('lease_lapses_at') or '0') ~= 0 and tonumber(field('heard_at')) == 0 then
  redis.call('HSET', RUN, 'heard_at', '')
end
local epoch = math.max(tonumber(field('epoch')), tonumber(ARGV[5])) + 1
redis.call('HSET', RUN, 'epoch', string.format('%d', epoch), 'lease_holder', ARGV[3],
  'lease_acquired_at', string.format('%.3f', now()), 'lease_lapses_at', string.format('%.3f', now() + tonumber(ARGV[4])),
  'lease_s', ARGV[4])
redis.call('HDEL', RUN, 'pin_number')
return {1, epoch}
