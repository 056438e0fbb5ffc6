-- Goes before every other script. KEYS are all keys of one run, in the order of KEYS_OF_A_RUN in
-- redis.py. ARGV[1] is the run's uid, ARGV[2] the server epoch ('' where the call has none), and the last one how many
-- changes of the revisions the server knows.
-- Integers are compared as doubles (all are below 2^53) and stored as the strings that came.
local RUN, SAMPLES, ROWS, TOKENS = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local OPENINGS, ATTEMPTS, SLOTS = KEYS[5], KEYS[6], KEYS[7]
local JOURNAL, STATES, SNAPSHOTS, REVISIONS = KEYS[8], KEYS[9], KEYS[10], KEYS[11]

local function field(name)
  return redis.call('HGET', RUN, name)
end

-- The ledger's clock: Unix time in seconds, the same for all of a script.
local clock
local function now()
  if not clock then
    local time = redis.call('TIME')
    clock = tonumber(time[1]) + tonumber(time[2]) / 1000000
  end
  return clock
end

-- Of a run's fields those that decide: neither its record nor its state, which may be large.
local HEAD = {'name', 'uid', 'epoch', 'generation', 'opening_mark', 'sample_index', 'digest', 'lease_holder',
  'lease_acquired_at', 'lease_lapses_at', 'lease_s', 'heard_at', 'revision_changes', 'closed_generation', 'elsewhere',
  'pin_number'}

-- The answer of a script that wrote nothing: what it saw of the run (Head in rules.py), which says why. item is what
-- the run's lists hold of the call's own attempt, rank, number or id.
local function refused(item)
  return {
    0,
    string.format('%.17g', now()),
    HEAD,
    redis.call('HMGET', RUN, unpack(HEAD)),
    redis.call('LINDEX', REVISIONS, -1),
    item or false,
  }
end

local function revision_changes()
  return tonumber(field('revision_changes') or '0')
end

-- Whether the caller has the server epoch, and the ledger has all changes of the revisions that the caller knows.
local function has_epoch()
  if ARGV[2] == '' then return true end
  return tonumber(field('epoch')) == tonumber(ARGV[2]) and revision_changes() >= tonumber(ARGV[#ARGV])
end

-- Whether the run is in this ledger, and not in another.
local function is_here()
  return (field('elsewhere') or '') == ''
end

local function may_write()
  return field('uid') == ARGV[1] and is_here() and has_epoch()
end

local function is_present(generation)
  local present = tonumber(field('generation') or '0')
  return present > tonumber(field('closed_generation') or '0') and present == tonumber(generation)
end

-- Whether the run has less than what the caller knows as committed in its generation (0: none).
local function rolled_back(generation, known)
  local present, committed = tonumber(field('generation') or '0'), tonumber(field('sample_index') or '0')
  local same = present == tonumber(generation)
  return present < tonumber(generation) or (same and committed < tonumber(known))
end

local function put_counters(key, specs, first)
  -- In parts, because unpack() has a limit.
  for start = 1, #specs, 1000 do
    local pairs_of = {}
    for place = start, math.min(start + 999, #specs) do
      pairs_of[#pairs_of + 1] = specs[place]
      pairs_of[#pairs_of + 1] = ARGV[first + place - 1]
    end
    redis.call('HSET', key, unpack(pairs_of))
  end
end

-- ARGV[at]: sample index, total tokens, digest, state, time, number of specs n; then n specs,
-- their n samples, n rows and n tokens.
local function put_committed(at)
  redis.call('HSET', RUN, 'sample_index', ARGV[at], 'total_tokens', ARGV[at + 1], 'digest', ARGV[at + 2],
    'state', ARGV[at + 3], 'committed_at', ARGV[at + 4])
  local count = tonumber(ARGV[at + 5])
  local specs = {}
  for place = 1, count do specs[place] = ARGV[at + 5 + place] end
  for place, key in ipairs({SAMPLES, ROWS, TOKENS}) do
    local first = at + 6 + place * count
    put_counters(key, specs, first)
    if redis.call('HLEN', key) ~= count then -- specs that are no longer counted
      redis.call('DEL', key)
      put_counters(key, specs, first)
    end
  end
end

local function put_journal(member, state)
  if redis.call('HSETNX', STATES, member, state) == 1 then
    redis.call('ZADD', JOURNAL, 0, member)
    redis.call('HINCRBY', RUN, 'journal_bytes', #state)
  end
end
