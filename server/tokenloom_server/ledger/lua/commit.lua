-- ARGV[3]: generation, 4: journal member or '', 5…: the committed state.
local refusal = refused() or fenced(ARGV[3])
if refusal then return refusal end
local committed, digest = field('sample_index'), field('digest')
local had = tonumber(ARGV[5])
if had == tonumber(committed) and ARGV[7] ~= digest then return {'order', committed, digest} end
if had <= tonumber(committed) then return {'ok', committed} end
put_committed(5)
if ARGV[4] ~= '' then put_journal(ARGV[4], ARGV[8]) end
return {'ok', ARGV[5]}
