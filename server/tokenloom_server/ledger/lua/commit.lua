-- ARGV[3]: generation, 4: journal member or '', 5: what the server knows as committed, 6…: the committed state.
if not (may_write() and is_present(ARGV[3])) or rolled_back(ARGV[3], ARGV[5]) then return refused() end
local index, committed = tonumber(ARGV[6]), tonumber(field('sample_index'))
if index == committed and ARGV[8] ~= field('digest') then return refused() end
if index <= committed then return {1, field('sample_index')} end
put_committed(6)
if ARGV[4] ~= '' then put_journal(ARGV[4], ARGV[9]) end
return {1, ARGV[6]}
