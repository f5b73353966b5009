-- Shared by every operation: the record of a group, and the one function that moves a group between states. Operations
-- run alone in Redis, so what one does is seen whole or not at all. The names of the keys come before this text.
local HISTORY_BYTES = 3000

-- Of the present call: the way to Redis (there is none while the library loads), its arguments, the run, the ledger
-- that the caller knows (empty: any), the fence of a trainer (0: the caller is none) and its incarnation, the time, and
-- whether the doorbells were rung. The keys are set by each call too.
local call, ARGV, RUN, LEDGER_ID, FENCE, HOLDER, NOW, rung, opened

local function begin(keys, arguments)
  call = redis.call
  if keys[1] ~= PREFIX then
    set_keys(keys[1])
  end
  ARGV, rung, opened = arguments, false, false
  RUN, LEDGER_ID, FENCE, HOLDER = string.match(arguments[1], '^(%S+) (%S*) (%d+) (%S*)$')
  FENCE = tonumber(FENCE)
  local clock = call('TIME')
  NOW = tonumber(clock[1]) + tonumber(clock[2]) / 1000000
end

-- Every move that is allowed; nothing else changes the state of a group.
local LEGAL = {
  ['none>generating'] = true, ['waiting>generating'] = true,
  ['generating>waiting'] = true, ['generating>buffered'] = true, ['generating>dropped'] = true,
  ['generating>dead'] = true,
  ['buffered>claimed'] = true, ['buffered>waiting'] = true, ['buffered>dropped'] = true,
  ['claimed>trained'] = true, ['claimed>waiting'] = true,
  ['trained>committed'] = true, ['trained>claimed'] = true, ['trained>waiting'] = true,
  ['committed>waiting'] = true,
}
-- After a move to one of these more may be issued. Being issued and being put are most of the changes, and open nothing.
local OPENS = {waiting = true, claimed = true, trained = true, dropped = true, dead = true}
local COUNTED = {claimed = true, trained = true, committed = true, dead = true}

-- The hash that holds the record of a group in this state.
local function home(state)
  if state == 'committed' or state == 'dropped' then
    return SETTLED
  end
  return state == 'dead' and DEAD or LIVE
end

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
    refuse('FAILED_PRECONDITION', 'run ' .. RUN .. ' has no ledger yet; rollout makes it when it has read the data. '
      .. 'Where steps were trained Redis has lost it: restart the trainer, which restores it from the last checkpoint')
  elseif LEDGER_ID ~= '' and id ~= LEDGER_ID then
    refuse('FAILED_PRECONDITION', 'ledger of run ' .. RUN .. ' was replaced after Redis lost its data; what this '
      .. 'process holds is void: restart it')
  end
end

local function meta(name)
  return tonumber(call('HGET', META, name) or 0)
end

-- For what only the trainer does: the newest fence that was seen stays, and an earlier trainer is refused.
local function need_newest_trainer()
  local newest = meta('fence')
  if FENCE < newest then
    local caller = FENCE == 0 and 'a trainer without a fence' or 'trainer ' .. HOLDER .. ' (fence ' .. integer(FENCE) .. ')'
    refuse('FAILED_PRECONDITION', caller .. ' of run ' .. RUN .. ' was replaced by trainer '
      .. call('HGET', META, 'fence_holder') .. ' (fence ' .. integer(newest) .. '); a run has one trainer: stop this one')
  elseif FENCE > newest then
    call('HSET', META, 'fence', integer(FENCE), 'fence_holder', HOLDER)
  end
end

local function need_trainer()
  need_ledger()
  need_newest_trainer()
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

-- Writes the record with one more event in its history.
local function save(group, detail)
  local history = group.history .. '\n' .. integer(NOW * 1000) .. ' ' .. group.state .. ' '
    .. string.gsub(detail, '[\r\n]+', ' ')
  while #history > HISTORY_BYTES do
    history = string.sub(history, string.find(history, '\n', 2, true) or HISTORY_BYTES)
  end
  local head = cjson.encode({
    group.state, group.attempt, group.failures, group.owner, group.step,
    group.entry, group.version, group.reason, group.refusals,
  })
  call('HSET', home(group.state), group.id, head .. history)
end

local function ring(opens)
  if not rung then
    rung = true
    call('XADD', DOORBELL, 'MAXLEN', '1', '*', 'c', '1')
  end
  if opens and not opened then
    opened = true
    call('XADD', OPENINGS, 'MAXLEN', '1', '*', 'c', '1')
  end
end

-- Place of a group in the data.
local function ordinal(id)
  local epoch, index = string.match(id, '^e(%d+)%.(%d+)$')
  return integer(tonumber(epoch) * meta('dataset_size') + tonumber(index))
end

-- Fields of `group` that belong to the state it enters (owner and lease, entry and version, step, reason) are set by
-- the caller; what belonged to the state it leaves is cleared here. An illegal move writes nothing.
local function move(group, to, detail)
  local id, from = group.id, group.state
  if not LEGAL[from .. '>' .. to] then
    refuse('INTERNAL', 'group ' .. id .. ' cannot go from ' .. from .. ' to ' .. to)
  end
  local sequence = call('HINCRBY', META, 'sequence', 1)
  if from == 'waiting' then
    call('ZREM', WAITING, id)
  elseif from == 'generating' then
    call('ZREM', LEASES, id)
  elseif from == 'buffered' then
    call('ZREM', BUFFER, id)
    call('ZREM', VERSIONS, id)
  end
  if group.entry ~= '' and to ~= 'buffered' and to ~= 'claimed' and to ~= 'trained' then
    call('XACK', SAMPLES, CONSUMERS, group.entry)
    call('XDEL', SAMPLES, group.entry)
    group.entry = ''
  end
  if to == 'waiting' then
    group.attempt = group.attempt + 1
    group.owner, group.step, group.version = '', 0, 0
    call('ZADD', WAITING, ordinal(id), id)
  elseif to == 'generating' then
    call('ZADD', LEASES, string.format('%.6f', group.lease), id)
  elseif to == 'buffered' then
    call('ZADD', BUFFER, integer(sequence), id)
    call('ZADD', VERSIONS, integer(group.version), id)
  end
  if from ~= 'none' and home(from) ~= home(to) then
    call('HDEL', home(from), id)
  end
  -- What is waiting, generating or buffered is counted by its index.
  if COUNTED[from] then
    call('HINCRBY', META, 'n:' .. from, -1)
  end
  if to == 'dropped' then
    call('HINCRBY', META, 'dropped:' .. group.reason, 1)
  elseif COUNTED[to] then
    call('HINCRBY', META, 'n:' .. to, 1)
  end
  group.state = to
  save(group, detail)
  ring(OPENS[to])
end
