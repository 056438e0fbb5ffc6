-- ARGV[3]: id, 4: snapshot as JSON. Answers with the one that is there now.
local refusal = refused()
if refusal then return refusal end
redis.call('HSETNX', SNAPSHOTS, ARGV[3], ARGV[4])
return {'ok', redis.call('HGET', SNAPSHOTS, ARGV[3])}
