-- ARGV: identity, consumer, step, count, trainer version, max staleness (-1: none), too_stale, max refusals (-1: none).
-- Returns {1, trainer version, refused, replayed, entries} or {0, have}.
need_ledger()
local consumer, step, count, version = ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])
local bound, policy, most = tonumber(ARGV[6]), ARGV[7], tonumber(ARGV[8])

local recorded = claim_of(step)
if recorded then
  local entries = {}
  for at, item in ipairs(recorded.groups) do
    -- Takes the entry over from whichever consumer held it.
    local got = call('XCLAIM', STREAM, CONSUMERS, consumer, 0, item[2])
    if not got[1] then
      refuse('DATA_LOSS', 'payload ' .. item[2] .. ' of group ' .. item[1] .. ', claimed for step ' .. ARGV[3]
        .. ', is gone from the sample stream of run ' .. RUN .. '; restart the trainer to restore the ledger')
    end
    entries[at] = got[1]
  end
  return {1, recorded.version, recorded.refused, 1, entries}
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

local have = call('ZCARD', VERSIONS)
if have < count then
  return {0, have}
end
local read = call('XREADGROUP', 'GROUP', CONSUMERS, consumer, 'COUNT', count, 'STREAMS', STREAM, '>')
local entries = read and read[1] and read[1][2] or {}
local groups = {}
for at, entry in ipairs(entries) do
  groups[at] = load(entry[2][2])
  if not groups[at] or groups[at].state ~= 'buffered' or groups[at].entry ~= entry[1] then
    refuse('DATA_LOSS', 'entry ' .. entry[1] .. ' of the sample stream of run ' .. RUN .. ' is not a buffered group')
  end
end
if #entries ~= count then
  refuse('DATA_LOSS', 'sample stream of run ' .. RUN .. ' gave ' .. #entries .. ' of ' .. count .. ' buffered groups')
end

local refused = meta('refused_pending')
local record = {version = version, refused = refused, groups = {}}
for at, group in ipairs(groups) do
  record.groups[at] = {group.id, group.entry}
  group.step = step
  move(group, 'claimed', 'step ' .. ARGV[3] .. ' by ' .. consumer)
end
call('HSET', CLAIMS, integer(step), cjson.encode(record))
call('HSET', META, 'refused_pending', '0')
return {1, version, refused, 0, entries}
