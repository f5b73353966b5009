-- ARGV: identity, consumer, step, count, trainer version, max staleness (-1: none), too_stale, max refusals (-1: none),
-- 1 for the order of the data, 0 for that of the puts.
-- Returns {1, trainer version, refused, replayed, id, entry, id, entry, ...} or {0, have}. Payloads do not pass through
-- Lua, which would copy them twice: the caller reads the entries, which are neighbours in the order of the puts.
need_trainer()
local consumer, step, count, version = ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])
local bound, policy, most = tonumber(ARGV[6]), ARGV[7], tonumber(ARGV[8])

-- Delivers an entry to the consumer, or takes it over from the one that held it.
local function deliver(id, entry)
  if not call('XCLAIM', SAMPLES, CONSUMERS, consumer, 0, entry, 'FORCE', 'JUSTID')[1] then
    refuse('DATA_LOSS', 'payload ' .. entry .. ' of group ' .. id .. ', for step ' .. ARGV[3] .. ', is gone from the '
      .. 'sample stream of run ' .. RUN .. '; restart the trainer to restore the ledger from the last checkpoint')
  end
end

local recorded = claim_of(step)
if recorded then
  local reply = {1, recorded.version, recorded.refused, 1}
  for _, item in ipairs(recorded.groups) do
    deliver(item[1], item[2])
    reply[#reply + 1], reply[#reply + 2] = item[1], item[2]
  end
  return reply
end

local steps = claimed_steps()
local newest = math.max(steps[#steps] or 0, meta('committed_step'))
if step <= newest then
  refuse('FAILED_PRECONDITION', 'step ' .. ARGV[3] .. ' cannot be claimed: step ' .. integer(newest)
    .. ' of run ' .. RUN .. ' was claimed or committed already; rewind the ledger to the checkpoint first')
end

if bound >= 0 then
  for _, id in ipairs(call('ZRANGEBYSCORE', VERSIONS, '-inf', integer(version - bound - 1))) do
    local group = load(id)
    local why = 'weight version ' .. integer(group.version) .. ' at trainer version ' .. ARGV[5]
    group.refusals = group.refusals + 1
    call('HINCRBY', META, 'refused_stale', 1)
    call('HINCRBY', META, 'refused_pending', 1)
    if policy == 'drop' or (most >= 0 and group.refusals >= most) then
      group.reason = 'stale'
      move(group, 'dropped', 'stale: ' .. why)
    else
      move(group, 'waiting', 'too stale: ' .. why)
    end
  end
end
if bound == 0 then
  local ahead = call('ZRANGEBYSCORE', VERSIONS, integer(version + 1), '+inf', 'LIMIT', '0', '1')[1]
  if ahead then
    refuse('FAILED_PRECONDITION', 'group ' .. ahead .. ' was made with weight version ' .. integer(load(ahead).version)
      .. ', newer than the trainer at version ' .. ARGV[5] .. '; with max_staleness 0 both must be equal')
  end
end

local ready = call('ZRANGE', BUFFER, 0, -1)
local last_put = {}
for at, id in ipairs(ready) do
  last_put[id] = at
end
if ARGV[9] == '1' then
  -- A group waits for all that stand before it in the data, so that what a step is made of does not depend on speed.
  local first = math.huge
  for _, index in ipairs({WAITING, LEASES}) do
    for _, id in ipairs(call('ZRANGE', index, 0, -1)) do
      first = math.min(first, tonumber(ordinal(id)))
    end
  end
  local places, free = {}, {}
  for _, id in ipairs(ready) do
    places[id] = tonumber(ordinal(id))
    if places[id] < first then
      free[#free + 1] = id
    end
  end
  table.sort(free, function(one, other) return places[one] < places[other] end)
  ready = free
end
local have = #ready
if have < count then
  return {0, have}
end
local refused = meta('refused_pending')
local record, reply = {version = version, refused = refused, groups = {}}, {1, version, refused, 0}
local groups = {}
local newest_entry, newest_put = '', 0
for at = 1, count do
  local id = ready[at]
  groups[at] = load(id)
  deliver(id, groups[at].entry)
  if last_put[id] > newest_put then
    newest_put, newest_entry = last_put[id], groups[at].entry
  end
end
for at, group in ipairs(groups) do
  record.groups[at] = {group.id, group.entry}
  reply[#reply + 1], reply[#reply + 2] = group.id, group.entry
  group.step = step
  move(group, 'claimed', 'step ' .. ARGV[3] .. ' by ' .. consumer)
end
call('XGROUP', 'SETID', SAMPLES, CONSUMERS, newest_entry)
call('HSET', CLAIMS, integer(step), cjson.encode(record))
call('HSET', META, 'refused_pending', '0')
return reply
