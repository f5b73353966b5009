-- Shared by every script: the keys, the record of a group, and the one function that moves a group between states.
-- Scripts run alone in Redis, so what one script does is seen whole or not at all.
local META, LIVE, SETTLED, DEAD, WAITING, LEASES, VERSIONS, CLAIMS, STEPS, STREAM, BELL, ISSUES = unpack(KEYS)
-- The run, and the id of the ledger that the caller knows (empty: it does not mind).
local RUN, LEDGER_ID = string.match(ARGV[1], '^(%S+) (%S*)$')
local CONSUMERS = 'trainer'
local HISTORY_BYTES = 3000
local call = redis.call

local clock = call('TIME')
local NOW = tonumber(clock[1]) + tonumber(clock[2]) / 1000000

-- State -> the states that may follow it.
local LEGAL = {
  none = {generating = true},
  waiting = {generating = true},
  generating = {waiting = true, buffered = true, dropped = true, dead = true},
  buffered = {claimed = true, waiting = true, dropped = true},
  claimed = {trained = true, waiting = true},
  trained = {committed = true, claimed = true, waiting = true},
  committed = {waiting = true},
  dropped = {},
  dead = {},
}
local HOME = {committed = SETTLED, dropped = SETTLED, dead = DEAD}

-- Ends the script with an error that Python turns into the class named by `code`.
local function refuse(code, text)
  error({err = code .. ' ' .. text})
end

local function integer(value)
  return string.format('%d', value)
end

local function need_ledger()
  local id = call('HGET', META, 'ledger_id')
  if not id then
    refuse('FAILED_PRECONDITION', 'ledger of run ' .. RUN .. ' is gone (Redis lost its data, or the run never started); '
      .. 'restart the trainer to restore it from the last checkpoint')
  elseif LEDGER_ID ~= '' and id ~= LEDGER_ID then
    refuse('FAILED_PRECONDITION', 'ledger of run ' .. RUN .. ' was replaced after Redis lost its data; what this process '
      .. 'holds is void: restart it')
  end
end

local function meta(name)
  return tonumber(call('HGET', META, name) or 0)
end

-- Everything about a group is one hash value: a JSON header, then one line an event, "<milliseconds> <state> <detail>".
local function load(id)
  local text = call('HGET', LIVE, id) or call('HGET', SETTLED, id) or call('HGET', DEAD, id)
  if not text then
    return nil
  end
  local cut = string.find(text, '\n', 1, true)
  local head = cjson.decode(string.sub(text, 1, cut - 1))
  return {
    id = id, state = head[1], attempt = head[2], failures = head[3], owner = head[4], step = head[5],
    entry = head[6], version = head[7], reason = head[8], refusals = head[9], history = string.sub(text, cut),
  }
end

local function blank(id)
  return {
    id = id, state = 'none', attempt = 1, failures = 0, owner = '', step = 0,
    entry = '', version = 0, reason = '', refusals = 0, history = '',
  }
end

local function save(group)
  local head = cjson.encode({
    group.state, group.attempt, group.failures, group.owner, group.step,
    group.entry, group.version, group.reason, group.refusals,
  })
  call('HSET', HOME[group.state] or LIVE, group.id, head .. group.history)
end

local function remember(group, detail)
  local line = '\n' .. integer(NOW * 1000) .. ' ' .. group.state .. ' ' .. string.gsub(detail, '[\r\n]+', ' ')
  local history = group.history .. line
  while #history > HISTORY_BYTES do
    local cut = string.find(history, '\n', 2, true)
    if not cut then
      break
    end
    history = string.sub(history, cut)
  end
  group.history = history
end

local function ordinal(id)
  local epoch, index = string.match(id, '^e(%d+)%.(%d+)$')
  return tonumber(epoch) * meta('dataset_size') + tonumber(index)
end

local rung = false
local function ring()
  if not rung then
    rung = true
    call('XADD', BELL, 'MAXLEN', '1', '*', 'c', '1')
  end
end

local function discard_payload(group)
  if group.entry ~= '' then
    call('XACK', STREAM, CONSUMERS, group.entry)
    call('XDEL', STREAM, group.entry)
    group.entry = ''
  end
end

local function leave(group)
  if group.state == 'waiting' then
    call('ZREM', WAITING, group.id)
  elseif group.state == 'generating' then
    call('ZREM', LEASES, group.id)
  elseif group.state == 'buffered' then
    call('ZREM', VERSIONS, group.id)
  end
end

-- Fields of `group` that belong to the state it enters (owner and lease, entry and version, step, reason) are set by
-- the caller; what belonged to the state it leaves is cleared here. An illegal move writes nothing.
local function move(group, to, detail)
  local from = group.state
  if not LEGAL[from] or not LEGAL[from][to] then
    refuse('INTERNAL', 'group ' .. group.id .. ' cannot go from ' .. from .. ' to ' .. to)
  end
  leave(group)
  if to == 'waiting' or to == 'committed' or to == 'dropped' or to == 'dead' then
    discard_payload(group)
  end
  if to == 'waiting' then
    group.attempt = group.attempt + 1
    group.owner, group.step, group.version = '', 0, 0
    call('ZADD', WAITING, integer(ordinal(group.id)), group.id)
  elseif to == 'generating' then
    call('ZADD', LEASES, string.format('%.6f', group.lease), group.id)
  elseif to == 'buffered' then
    call('ZADD', VERSIONS, integer(group.version), group.id)
  elseif to == 'dropped' then
    call('HINCRBY', META, 'dropped:' .. group.reason, 1)
  end
  if (HOME[from] or LIVE) ~= (HOME[to] or LIVE) then
    call('HDEL', HOME[from] or LIVE, group.id)
  end
  if from ~= 'none' then
    call('HINCRBY', META, 'n:' .. from, -1)
  end
  if to ~= 'dropped' then
    call('HINCRBY', META, 'n:' .. to, 1)
  end
  call('HINCRBY', META, 'sequence', 1)
  group.state = to
  remember(group, detail)
  save(group)
  ring()
end

local function claim_of(step)
  local text = call('HGET', CLAIMS, integer(step))
  return text and cjson.decode(text)
end

-- Steps that have a recorded claim, in order.
local function claimed_steps()
  local steps = {}
  for _, name in ipairs(call('HKEYS', CLAIMS)) do
    steps[#steps + 1] = tonumber(name)
  end
  table.sort(steps)
  return steps
end

local function train(step, claim)
  for _, item in ipairs(claim.groups) do
    local group = load(item[1])
    if group.state == 'claimed' then
      move(group, 'trained', 'step ' .. integer(step))
    end
  end
end
