-- ARGV[3]: generation, 4: journal member or '', 5: what the server knows as committed, 6…: the committed state.
local refusal = refused() or fenced(ARGV[3]) or rolled_back(ARGV[3], ARGV[5])
if refusal then return refusal end
local committed, digest = field('sample_index'), field('digest')
local had = tonumber(ARGV[6])
if had == tonumber(committed) and ARGV[8] ~= digest then return {'order', committed, digest} end
if had <= tonumber(committed) then return {'ok', committed} end
put_committed(6)
if ARGV[4] ~= '' then put_journal(ARGV[4], ARGV[9]) end
return {'ok', ARGV[6]}
